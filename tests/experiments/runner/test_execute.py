"""`san run` ends if Ray does, and the same command continues. Real processes."""

import os
import re
import signal
from pathlib import Path

import pytest

from experiments.config.grid import GridRequest
from experiments.runner.grid_run import open_grid_run
from tests.cluster.test_supervision import MARK, kill_ray, wait_until_gone
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import Driver
from tests.experiments.samples import logged_epochs, runs_of

AGAIN = "Finished epochs are kept; run the same command again to continue"


@pytest.mark.slow
def test_run_ends_if_ray_dies_and_the_next_one_continues(tmp_path: Path) -> None:
    options = ("recipe.epochs=30", "recipe.batch_size=64", "--only", "resnet26_3")
    with Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path)}) as driver:
        driver.wait_for("_3 epoch")
        kill_ray("raylet", str(tmp_path))
        assert driver.finish() == os.EX_TEMPFAIL, driver.said
    assert driver.said.splitlines()[-1].endswith(AGAIN) and "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", options[:2], tmp_path / "runs"))
    assert [run.info.status for run in runs_of(grid_run)] == ["KILLED"]

    with Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path)}) as driver:
        assert driver.finish() == 0, driver.said
    assert re.search("resnet26_3 resumes (after epoch|at epoch)", driver.said)
    assert list(logged_epochs(grid_run).values()) == [[*range(30)]]


@pytest.mark.slow
def test_signal_to_all_processes_ends_the_run(tmp_path: Path) -> None:
    """As from `timeout`: Ray gets the signal, too, but the user does not want the run to continue."""
    options = ["recipe.epochs=200", "--only", "resnet26_3"]
    with Driver(SMALL_GRID, tmp_path / "runs", options, {MARK: str(tmp_path)}) as driver:
        driver.wait_for("_3 epoch")
        os.killpg(driver.process.pid, signal.SIGTERM)
        assert driver.finish() == 1
    assert driver.said.splitlines()[-1].endswith(AGAIN) and "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))
