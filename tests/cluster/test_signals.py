"""Signals to a driver that has started a local cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver whose first trial has started. Kills the remaining processes at the end."""
    environment = os.environ | {MARK: str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.cluster.functions", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said: list[str] = []
    while not (said and said[-1].startswith("pid")):
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)
    yield process
    process.kill()
    for pid in marked(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_trials_end_with_the_driver(driver: subprocess.Popen[str], tmp_path: Path, name: str) -> None:
    assert len(marked(str(tmp_path))) > 3
    if name == "SIGINT":
        os.killpg(driver.pid, signal.SIGINT)  # like Ctrl-C in a terminal
    else:
        driver.send_signal(signal.Signals[name])
    code = driver.wait(timeout=PATIENCE)
    wait_until_gone(str(tmp_path), AGENTS if name == "SIGKILL" else ())
    if name != "SIGKILL":
        assert code == 130
        assert not list(tmp_path.iterdir())


QUICK_CHECKS = """
import ray
from cluster import session, supervision

supervision._SECONDS_BETWEEN_CHECKS = 0.001
with session.session():
    ray.shutdown()  # as in a sweep that Ctrl-C interrupts
"""


@pytest.mark.slow
def test_end_of_ray_before_the_end_of_the_session_is_not_its_death() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", QUICK_CHECKS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
