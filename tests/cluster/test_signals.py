"""Ctrl-C, SIGTERM and the sudden death of the driver or of its raylet, with a driver that starts a local cluster of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "CLUSTER_TEST_MARK"


# Ray's agents, idle, may look for their dead head node for a minute before they end.
AGENTS = (b"DashboardAgent", b"RuntimeEnvAgent")


def marked(mark: str, besides: tuple[bytes, ...] = ()) -> list[int]:
    """Processes that inherited the mark, whatever their parents are by now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                if not any(name in (folder / "cmdline").read_bytes() for name in besides):
                    found.append(int(folder.name))
        except OSError:  # gone, or not ours
            continue
    return found


def seconds_until_gone(mark: str, besides: tuple[bytes, ...], limit: float) -> float:
    begin = time.monotonic()
    while marked(mark, besides) and time.monotonic() - begin < limit:
        time.sleep(0.1)
    return time.monotonic() - begin


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver whose first cell has begun; whatever is left of it is killed."""
    environment = os.environ | {MARK: str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.cluster.cells", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any(line.startswith("pid") for line in process.stdout)
    yield process
    process.kill()
    for pid in marked(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_cell_survives_the_driver(driver: subprocess.Popen[str], tmp_path: Path, name: str) -> None:
    assert len(marked(str(tmp_path))) > 3
    if name != "SIGKILL":
        if name == "SIGINT":
            os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        else:
            driver.terminate()
        assert driver.wait(timeout=20) == 130
        assert not list(tmp_path.iterdir())
    else:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(timeout=20)
    seconds = seconds_until_gone(str(tmp_path), AGENTS if name == "SIGKILL" else (), limit=20)
    print(f"{name}: all cells gone after {seconds:.1f} s")
    assert seconds < 15


def test_sweep_ends_when_its_raylet_is_killed(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    (raylet,) = [pid for pid in marked(str(tmp_path)) if Path(f"/proc/{pid}/exe").resolve().name == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    begin = time.monotonic()
    output, _ = driver.communicate(timeout=60)
    print(f"noticed after {time.monotonic() - begin:.0f} s")
    assert driver.returncode == 1
    assert "san: Ray died on this machine" in output
    assert seconds_until_gone(str(tmp_path), AGENTS, limit=20) < 20
