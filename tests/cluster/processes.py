"""Processes of Ray that outlive their driver, found by a variable of their environment."""

import os
import signal
import time
from pathlib import Path

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


def kill_ray(process: str, mark: str, by: int = signal.SIGKILL) -> None:
    """Sends a signal to a process of Ray: `raylet` or `gcs_server`."""
    (pid,) = [pid for pid in marked(mark) if Path(f"/proc/{pid}/exe").resolve().name == process]
    os.kill(pid, by)
