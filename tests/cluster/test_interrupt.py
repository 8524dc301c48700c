"""The first signal asks the trials to stop. `experiments/cli/test_end_to_end.py` interrupts a whole run."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from cluster import Resources
from cluster.interrupt import interruptible
from tests.experiments.drivers import PATIENCE


def test_first_signal_asks_the_trials_to_stop_and_the_second_interrupts(resources: Resources) -> None:
    """Although the process that trials ask was killed."""
    before, notified = signal.getsignal(signal.SIGTERM), threading.Event()
    with interruptible(notified.set) as (should_stop, is_interrupted):
        assert (should_stop(), is_interrupted()) == (False, False)
        flags = [each for each in psutil.Process().children(recursive=True) if "ray::_Flag" in " ".join(each.cmdline())]
        assert flags
        for process in flags:
            process.kill()
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert notified.wait(PATIENCE) and is_interrupted()
        limit = time.monotonic() + PATIENCE
        while not should_stop():
            assert time.monotonic() < limit
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) is before
