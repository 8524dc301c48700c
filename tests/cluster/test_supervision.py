"""The end of Ray, and processes that outlive their driver."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments.drivers import PATIENCE

MARK = "CLUSTER_TEST_MARK"

# Ray's idle agents may search for their dead head node for a minute before they end.
AGENTS = (b"DashboardAgent", b"RuntimeEnvAgent")


def marked(mark: str, besides: tuple[bytes, ...] = ()) -> list[int]:
    """Processes that inherited the mark, also if their parent has ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                if not any(name in (folder / "cmdline").read_bytes() for name in besides):
                    found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def wait_until_gone(mark: str, besides: tuple[bytes, ...] = ()) -> None:
    limit = time.monotonic() + PATIENCE
    while left := marked(mark, besides):
        assert time.monotonic() < limit, left
        time.sleep(0.1)


def kill_ray(process: str, mark: str) -> None:
    """Kills a process of Ray: `raylet` or `gcs_server`."""
    (pid,) = [pid for pid in marked(mark) if Path(f"/proc/{pid}/exe").resolve().name == process]
    os.kill(pid, signal.SIGKILL)


QUICK_CHECKS = """
import ray
from cluster import session, supervision

supervision._SECONDS_BETWEEN_CHECKS = 0.001
with session.session():
    ray.shutdown()  # as in a sweep that Ctrl-C interrupts
"""


@pytest.mark.slow
def test_end_of_ray_before_the_end_of_the_session_is_not_its_death() -> None:
    command = [sys.executable, "-c", QUICK_CHECKS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
