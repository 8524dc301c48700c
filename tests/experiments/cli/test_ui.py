"""`san ui` starts MLflow's web interface on the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.grids.config import PROJECT_DIR
from experiments.runner.grid_run import GridRun
from tests.experiments.conftest import San
from tests.experiments.drivers import PATIENCE, clean_environment
from tests.experiments.samples import finish_trial
from tests.experiments.servers import free_port


def responds(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_serves_the_runs_until_it_is_interrupted(open_small_grid: Callable[..., GridRun], tmp_path: Path) -> None:
    grid_run, port, log = open_small_grid(), free_port(), tmp_path / "ui.log"
    finish_trial(grid_run, grid_run.trials[0], 90.0)
    command = [sys.executable, "-m", "experiments", "ui", "--runs", str(grid_run.workspace.runs), "--port", str(port)]
    environment = clean_environment()
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=environment, stdout=out, stderr=out, start_new_session=True)
    address, limit = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    while not responds(address):
        assert process.poll() is None and time.monotonic() < limit, log.read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 0
    text = log.read_text()
    assert text.startswith(address) and "Traceback" not in text and not responds(address)


def test_names_the_server_and_rejects_a_store_without_runs(
    runs: Path, tmp_path: Path, run_san: San, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run_san("ui", "--runs", tmp_path / "none")
    assert code == 2 and "no runs yet" in err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert run_san("ui", "--runs", runs) == (0, "http://server:5000  (the server in MLFLOW_TRACKING_URI)\n", "")
