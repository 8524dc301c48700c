"""Ctrl-C and SIGTERM end a sweep in two steps: its trials save and return, then the sweep ends. A second ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from cluster.sweep import DRIVER_RESOURCES

SECONDS_TO_SAVE = 30.0
"""Time after which the sweep ends although a trial has not returned, for example because it validates."""


class _Flag:
    def __init__(self) -> None:
        self._value = False

    def set(self) -> None:
        self._value = True

    def is_set(self) -> bool:
        return self._value


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Whether the trials of a sweep are asked to save and return. Any process of the session can call it."""

    actor: Any

    def __call__(self) -> bool:
        """Takes about a millisecond."""
        return ray.get(self.actor.is_set.remote())


@contextmanager
def interruptible(notify: Callable[[], object]) -> Iterator[tuple[StopRequest, Callable[[], bool]]]:
    """Inside the block, the first SIGINT or SIGTERM calls `notify` and asks the trials to stop, instead of raising
    KeyboardInterrupt. Yields what trials ask, and what this process asks."""
    start: Any = ray.remote(_Flag)
    # Restarted if its process is killed, so that no trial fails with it.
    actor = start.options(num_cpus=0, resources=DRIVER_RESOURCES, max_restarts=-1, max_task_retries=-1).remote()
    interrupted, ended = threading.Event(), threading.Event()

    def ask_trials() -> None:  # in a thread, because the main thread may be inside Ray when a signal arrives
        interrupted.wait()
        if ended.is_set():
            return
        notify()
        actor.set.remote()
        if not ended.wait(SECONDS_TO_SAVE):
            os.kill(os.getpid(), signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        interrupted.set()

    is_main = threading.current_thread() is threading.main_thread()  # only this thread can set handlers
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    thread = threading.Thread(target=ask_trials, daemon=True)
    thread.start()
    try:
        yield StopRequest(actor), interrupted.is_set
    finally:
        was_interrupted = interrupted.is_set()
        ended.set()
        interrupted.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        if ray.is_initialized() and not was_interrupted:  # an interrupted sweep ends the session
            ray.kill(actor)
