"""The first signal asks the trials to stop. `experiments/cli/test_end_to_end.py` interrupts a whole run."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cluster import interrupt
from cluster.interrupt import interruptible
from tests.experiments.drivers import PATIENCE


def test_first_signal_asks_the_trials_and_the_second_interrupts() -> None:
    before, asked = signal.getsignal(signal.SIGTERM), threading.Event()
    with interruptible(asked.set) as is_interrupted:
        assert not is_interrupted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(PATIENCE) and is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_is_known_while_the_main_thread_is_blocked() -> None:
    """As inside Ray: code in C that does not return to Python, so no handler runs meanwhile."""
    libc, mutex, asked, found = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event(), list[bool]()
    main = threading.get_native_id()

    def interrupt_main_thread() -> None:
        state = "R"
        while state != "S":  # until the main thread waits
            time.sleep(0.01)
            state = Path(f"/proc/self/task/{main}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(os.getpid(), signal.SIGTERM)
        found.append(asked.wait(PATIENCE) and is_interrupted())
        libc.pthread_mutex_unlock(mutex)

    with interruptible(asked.set) as is_interrupted:
        libc.pthread_mutex_lock(mutex)
        threading.Thread(target=interrupt_main_thread).start()
        libc.pthread_mutex_lock(mutex)
    assert found == [True]


def test_trials_that_do_not_return_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "SECONDS_TO_SAVE", 0.0)
    limit = time.monotonic() + PATIENCE
    with interruptible(lambda: None), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        while time.monotonic() < limit:  # not one long sleep: a signal that arrives just before it would wait for its end
            time.sleep(0.01)


def test_without_a_signal_nobody_is_asked() -> None:
    asked, before = threading.Event(), set(threading.enumerate())
    with interruptible(asked.set):
        (waiting,) = set(threading.enumerate()) - before
    waiting.join(PATIENCE)
    assert not waiting.is_alive() and not asked.is_set()
