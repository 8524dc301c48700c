"""`san ui` starts MLflow's web interface on the store."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config.config import PROJECT_DIR
from tests.experiments.conftest import OpenGrid, Rejected, San
from tests.experiments.drivers import PATIENCE, clean_environment, wait_until
from tests.experiments.samples import finish_trial
from tests.experiments.servers import port_in, responds


@pytest.mark.slow
def test_serves_the_runs_until_it_is_interrupted(open_small_grid: OpenGrid, rejected: Rejected, tmp_path: Path) -> None:
    grid_run, log = open_small_grid(), tmp_path / "ui.log"
    finish_trial(grid_run, grid_run.trials[0], 90.0)
    command = [sys.executable, "-m", "experiments", "ui", "--runs", str(grid_run.workspace.runs), "--port", "0"]
    environment = clean_environment()
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port_in(log, process)}"
        wait_until(lambda: responds(f"{address}/health"), process, log)
        assert "cannot be used" in rejected("ui", "--runs", grid_run.workspace.runs, "--port", address.rpartition(":")[2])
    finally:
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 0
    text = log.read_text()
    assert "Traceback" not in text and not responds(f"{address}/health")


def test_names_the_server_of_the_store(runs: Path, run_san: San, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert run_san("ui", "--runs", runs) == (0, "http://server:5000  (the server in MLFLOW_TRACKING_URI)\n", "")
