"""Ctrl-C and SIGTERM end a sweep in two steps: its trials save and return, then the sweep ends. A second ends it at once."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_TO_SAVE = 30.0
"""Time after which the sweep ends although a trial has not returned, for example because it validates."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = threading.Event()
"""Set by the signal. There is one for the process, as for its handlers, so that whatever ends the process can ask."""


@contextmanager
def interruptible(ask_trials: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Inside the block, the first SIGINT or SIGTERM calls `ask_trials`, which is to make the trials return, instead of raising
    KeyboardInterrupt. Yields a function that returns whether there was a signal. Only for the main thread."""
    INTERRUPTED.clear()
    handled, ended = threading.Event(), threading.Event()
    arrivals, sent = socket.socketpair()
    sent.setblocking(False)

    def wait() -> None:
        with arrivals:  # open until the end, because Python complains if it cannot send
            # Python runs handlers only in the main thread, which may be inside Ray, but sends the number of a signal at once.
            number = arrivals.recv(1)
            while number and number[0] not in SIGNALS:
                number = arrivals.recv(1)
            if not number:  # the block has ended
                return
            INTERRUPTED.set()
            ask_trials()
            if not ended.wait(SECONDS_TO_SAVE):
                handled.wait()  # Python would take a second signal before that for the same one
                os.kill(os.getpid(), signal.SIGINT)
            ended.wait()

    def handle(number: int, frame: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler)
        handled.set()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    fd_before = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield INTERRUPTED.is_set
    finally:
        signal.set_wakeup_fd(fd_before)
        sent.close()
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        handled.set()  # not before: a handler would wait for the lock that this takes
