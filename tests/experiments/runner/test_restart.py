"""`san run` restarts Ray if one of its processes dies. Real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.runner.restart import LIMIT, RESTARTS
from tests.cluster.heads import ray_head
from tests.cluster.test_supervision import MARK, marked, wait_until_gone
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import PATIENCE, Driver
from tests.experiments.servers import free_port


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


def test_restart_closes_files_and_disturbs_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", RESTARTED], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.splitlines()[-1] == "closed"
    assert done.stderr.splitlines() == ["Ray died; restarting Ray (1 of 10); finished epochs are kept"]


@pytest.mark.slow
@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_run_continues_after_ray_died(process: str, tmp_path: Path) -> None:
    driver = Driver(
        SMALL_GRID,
        tmp_path / "runs",
        ["recipe.epochs=30", "recipe.batch_size=64", "--only", "resnet26_3"],
        {MARK: str(tmp_path)},
    )
    driver.wait_for("_3 starts")
    kill(process, tmp_path)
    driver.wait_for(rf"restarting Ray \(1 of {LIMIT}\); finished epochs are kept")
    assert driver.finish() == 0, driver.said
    assert "Traceback" not in driver.said
    assert "1/1 done] resnet26_3 finished" in driver.said and "epoch 30/30" in driver.said
    wait_until_gone(str(tmp_path))


@pytest.mark.slow
def test_signal_to_all_processes_ends_the_run(tmp_path: Path) -> None:
    """As from `timeout`: Ray gets the signal, too, and is not started again."""
    driver = Driver(SMALL_GRID, tmp_path / "runs", ["recipe.epochs=200", "--only", "resnet26_3"], {MARK: str(tmp_path)})
    driver.wait_for("_3 epoch")
    before = driver.said.count("restarting Ray")  # on a busy machine, Ray may need a second start
    os.killpg(driver.process.pid, signal.SIGTERM)
    assert driver.finish() == 1
    assert "run the same command again to resume" in driver.said and driver.said.count("restarting Ray") == before
    assert "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))


@pytest.mark.slow
def test_run_gives_up_after_too_many_restarts(tmp_path: Path) -> None:
    """A pause after the first step prevents progress, which would reset the number of restarts."""
    environment = {MARK: str(tmp_path), RESTARTS: str(LIMIT), "WITNESS_PAUSE": str(PATIENCE)}
    driver = Driver(SMALL_GRID, tmp_path / "runs", ["recipe.batch_size=64"], environment, "tests.faults.witness")
    driver.wait_for("_3 starts")
    kill("raylet", tmp_path)
    assert driver.finish() == 1
    assert "san: Ray died on this machine" in driver.said
    assert "run the same command again to resume" in driver.said
    wait_until_gone(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("process", ["gcs_server", "raylet"])
def test_run_ends_if_the_head_of_a_cluster_is_gone(process: str, tmp_path: Path) -> None:
    port = free_port()
    with ray_head(port, "--num-cpus=1", "--include-dashboard=false") as head:
        options = ["recipe.epochs=200", "--address", f"127.0.0.1:{port}"]
        token = "0" * 64  # the head does not ask for it, but trials failed if the driver had one
        driver = Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path), "RAY_AUTH_TOKEN": token})
        driver.wait_for("_3 starts")
        kill(process, head)
        killed_at = time.monotonic()
        assert driver.finish() == 1
    print(f"ended {time.monotonic() - killed_at:.0f} s after {process} was killed")
    assert "run the same command again to resume" in driver.said
    assert "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))
