"""Ctrl-C and SIGTERM end a sweep in two steps: its trials save and return, then the sweep ends. A second ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_TO_SAVE = 30.0
"""Time after which the sweep ends although a trial has not returned, for example because it validates."""


@contextmanager
def interruptible(ask_trials: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Inside the block, the first SIGINT or SIGTERM calls `ask_trials`, which is to make the trials return, instead of raising
    KeyboardInterrupt. Yields a function that returns whether there was a signal."""
    interrupted, ended = threading.Event(), threading.Event()

    def wait() -> None:  # in a thread, because the main thread may be inside Ray when a signal arrives
        interrupted.wait()
        if ended.is_set():
            return
        ask_trials()
        if not ended.wait(SECONDS_TO_SAVE):
            os.kill(os.getpid(), signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        interrupted.set()

    is_main = threading.current_thread() is threading.main_thread()  # only this thread can set handlers
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield interrupted.is_set
    finally:
        ended.set()
        interrupted.set()
        for number, handler in before.items():
            signal.signal(number, handler)
