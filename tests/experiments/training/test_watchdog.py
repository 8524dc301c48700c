"""The watchdog ends a worker without progress."""

import math
import subprocess
import sys
from unittest.mock import Mock

import pytest

from experiments.grids.config import PROJECT_DIR
from experiments.training import watchdog
from experiments.training.watchdog import Watchdog
from tests.experiments.drivers import PATIENCE
from tests.experiments.runner.test_progress import Clock


def test_ends_a_worker_that_hangs() -> None:
    """In C code that keeps Python's lock."""
    script = """
import ctypes, sys
from experiments.training.watchdog import Watchdog
with Watchdog(30, sys.stderr):
    pass
with Watchdog(1, sys.stderr):
    ctypes.PyDLL(None).sleep(100_000)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout") and 'File "<string>", line 7' in done.stderr


def test_every_step_starts_the_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, clock = Mock(), Clock()
    monkeypatch.setattr(watchdog, "faulthandler", timer)
    monkeypatch.setattr(watchdog.time, "monotonic", clock)
    with Watchdog(60, sys.stderr) as watched:
        starts = [timer.dump_traceback_later.call_count]
        for seconds in (0.01, 1, 59):  # the first step is too short to start the timer
            clock.now += seconds
            watched.step_ended()
            starts.append(timer.dump_traceback_later.call_count)
        timer.cancel_dump_traceback_later.assert_not_called()
    timer.dump_traceback_later.assert_called_with(60, exit=True, file=sys.stderr)
    timer.cancel_dump_traceback_later.assert_called_once()
    assert starts == [1, 1, 2, 3]
    timer.reset_mock()
    with Watchdog(math.inf, sys.stderr) as watched:
        watched.step_ended()
    timer.dump_traceback_later.assert_not_called()
