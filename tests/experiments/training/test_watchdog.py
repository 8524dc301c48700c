"""The watchdog ends a worker without progress."""

import subprocess
import sys

import pytest

from experiments.grids.config import PROJECT_DIR
from tests.experiments.drivers import PATIENCE


@pytest.mark.parametrize("hang", ["time.sleep(100_000)", "ctypes.PyDLL(None).sleep(100_000)"])  # the second keeps Python's lock
def test_ends_a_worker_that_hangs(hang: str) -> None:
    script = f"""
import ctypes, sys, time
from experiments.training.watchdog import Watchdog
with Watchdog(30, sys.stderr):
    pass
with Watchdog(1, sys.stderr) as watchdog:
    for step in range(15):
        time.sleep(0.1)
        watchdog.step_ended()
    print("steps", flush=True)
    {hang}
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "steps\n")
    assert done.stderr.startswith("Timeout") and 'File "<string>", line 11' in done.stderr
