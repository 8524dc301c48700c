"""`san run` restarts Ray if one of its processes dies. Real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster import supervision
from experiments.runner.restart import LIMIT, RESTARTS, Restart
from tests.cluster.heads import ray_head
from tests.cluster.test_supervision import MARK, marked, wait_until_gone
from tests.experiments.conftest import SMALL_GRID, OpenGrid
from tests.experiments.drivers import PATIENCE, Driver


def kill(process: str, mark: Path) -> None:
    """Kills a process of Ray."""
    (pid,) = [pid for pid in marked(str(mark)) if Path(f"/proc/{pid}/exe").resolve().name == process]
    os.kill(pid, signal.SIGKILL)


RESTARTED = f"""
import os, socket, threading
from experiments.runner.restart import Restart

inherited = 100
if "{RESTARTS}" in os.environ:
    print("open" if os.path.exists(f"/proc/self/fd/{{inherited}}") else "closed")
else:
    os.dup2(0, inherited)  # as a file of Ray
    def read(end):
        with end:
            end.recv(1)
    pairs = [socket.socketpair() for _ in range(50)]
    for end, _ in pairs:
        threading.Thread(target=read, args=[end], daemon=True).start()
    Restart(None, (), local=True)("Ray died")
"""


@pytest.mark.slow
def test_restart_closes_files_and_disturbs_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", RESTARTED], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.splitlines()[-1] == "closed"
    assert done.stderr.startswith("Ray died; restarting Ray ")


@pytest.mark.parametrize(("restarts", "is_interrupted", "is_local"), [(LIMIT, False, True), (0, True, True), (0, False, False)])
def test_run_ends_instead_of_restarting(
    restarts: int, is_interrupted: bool, is_local: bool, open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After too many restarts without progress, after an interruption, and on a cluster that others started."""
    monkeypatch.setenv(RESTARTS, str(restarts))
    monkeypatch.setattr(supervision, "exit_lost", Mock(side_effect=SystemExit))
    monkeypatch.setattr(os, "execv", Mock(side_effect=AssertionError))
    grid_run = open_small_grid()
    restart = Restart(grid_run, grid_run.trials, is_local, is_interrupted=lambda: is_interrupted)
    with pytest.raises(SystemExit):
        restart("Ray died")
    supervision.exit_lost.assert_called_once_with(  # type: ignore[attr-defined]
        "Ray died. Finished epochs are kept; run the same command again to resume"
    )


@pytest.mark.slow
def test_run_continues_after_ray_died(tmp_path: Path) -> None:
    options = ["recipe.epochs=30", "recipe.batch_size=64", "--only", "resnet26_3"]
    with Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path)}) as driver:
        driver.wait_for("_3 starts")
        kill("raylet", tmp_path)
        assert driver.finish() == 0, driver.said
    assert "restarting Ray" in driver.said and "Traceback" not in driver.said
    assert "1/1 done] resnet26_3 finished" in driver.said and "epoch 30/30" in driver.said
    wait_until_gone(str(tmp_path))


@pytest.mark.slow
def test_signal_to_all_processes_ends_the_run(tmp_path: Path) -> None:
    """As from `timeout`: Ray gets the signal, too, and is not started again."""
    options = ["recipe.epochs=200", "--only", "resnet26_3"]
    with Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path)}) as driver:
        driver.wait_for("_3 epoch")
        os.killpg(driver.process.pid, signal.SIGTERM)
        assert driver.finish() == 1
    assert driver.said.splitlines()[-1].endswith("run the same command again to resume") and "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))


@pytest.mark.slow
def test_run_ends_if_the_head_of_a_cluster_is_gone(tmp_path: Path) -> None:
    with ray_head("--num-cpus=1", "--include-dashboard=false") as head:
        options = ["recipe.epochs=200", "--address", head.address]
        token = "0" * 64  # the head does not ask for it, but trials failed if the driver had one
        with Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path), "RAY_AUTH_TOKEN": token}) as driver:
            driver.wait_for("_3 starts")
            kill("gcs_server", head.folder)
            assert driver.finish() == 1
    assert "run the same command again to resume" in driver.said
    assert "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))
