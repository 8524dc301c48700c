"""The metric logger: training does not wait for MLflow, which gets every epoch exactly once."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from experiments.runner.grid_run import GridRun, open_grid_run
from experiments.runner.plan import plan
from experiments.runs.summary import read_ended
from experiments.tracking import TrackerError
from experiments.tracking.listing import list_runs
from experiments.training import metric_logger
from experiments.training.trainer import run_trial
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import silent
from tests.experiments.servers import Server


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    shutil.copy(empty_database, tmp_path / "server.db")
    server = Server(tmp_path, f"sqlite:///{tmp_path / 'server.db'}")
    server.launch()
    server.wait()
    yield server
    server.kill()


def steps(grid_run: GridRun) -> list[tuple[str, list[int]]]:
    """Status and epochs of each run of the grid's trials."""
    experiment = grid_run.tracker.client.get_experiment_by_name(grid_run.name)
    assert experiment is not None
    runs = grid_run.tracker.client.search_runs([experiment.experiment_id], "tags.`san.role` = 'trial'")
    histories = [(run.info.status, grid_run.tracker.client.get_metric_history(run.info.run_id, "val/top1")) for run in runs]
    assert all([m.timestamp for m in history] == sorted(m.timestamp for m in history) for _, history in histories)
    return [(status, [metric.step for metric in history]) for status, history in histories]


@pytest.mark.slow
def test_outage_of_the_server_loses_no_epoch(
    server: Server, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed in epoch 2, back in epoch 4, and killed again in epoch 6 until after the end of the trial.

    Training must continue meanwhile: the server is restarted by this process at the end of an epoch.
    """
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setattr("experiments.training.trainer.OUTAGE_TIMEOUT", 1.0)
    monkeypatch.setattr(metric_logger, "PAUSE", 0.2)
    grid_run = open_grid_run(SMALL_GRID, "digits", ("recipe.epochs=8", "recipe.batch_size=128"), tmp_path / "runs")
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    trial = grid_run.trials[1]
    epochs: list[int] = []

    def disturb(metrics: Mapping[str, float]) -> None:
        if "step" in metrics:  # inside an epoch
            return
        epochs.append(int(metrics["epoch"]))
        if epochs[-1] in (2, 6):
            server.kill()
        if epochs[-1] == 4:
            server.launch()
            server.wait()
            limit = time.monotonic() + PATIENCE
            while steps(grid_run) != [("RUNNING", [0, 1, 2, 3])]:  # the missing epochs are sent again
                assert time.monotonic() < limit
                time.sleep(0.2)

    run_trial(grid_run.workspace, trial, disturb)
    assert epochs == list(range(1, 9))
    with pytest.raises(TrackerError, match="cannot use MLflow"):
        plan(grid_run)

    server.launch()
    server.wait()
    assert [status for status, _ in steps(grid_run)] == ["RUNNING"]
    assert [(run.state, run.epoch) for run in list_runs(server.uri, None)] == [("running", steps(grid_run)[0][1][-1] + 1)]
    assert grid_run.workspace.log(trial).read_text().count("cannot send results to MLflow, will retry: ") == 2
    again: list[Mapping[str, float]] = []
    run_trial(grid_run.workspace, trial, again.append)
    assert again == []  # nothing was trained
    assert steps(grid_run) == [("FINISHED", list(range(8)))]
    assert list(grid_run.tracker.results()) == [trial.key]
    with open(grid_run.workspace.checkpoints(trial) / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(8))
    history = grid_run.tracker.client.get_metric_history(grid_run.tracker.results()[trial.key].run_id, "val/top1")
    assert [metric.value for metric in history] == [float(row["top1"]) for row in rows]
    assert [metric.timestamp for metric in history] == list(
        read_ended(grid_run.workspace.store.read(grid_run.workspace.summary(trial))).values()
    )


@pytest.mark.parametrize("wanted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_system_metrics(
    wanted: bool, open_small_grid: Callable[..., GridRun], monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", str(wanted).lower())
    grid_run = open_small_grid("recipe.epochs=2", "recipe.batch_size=256")
    run_trial(grid_run.workspace, grid_run.trials[1], silent)
    metrics = grid_run.tracker.results()[grid_run.trials[1].key].metrics
    assert ("system/cpu_utilization_percentage" in metrics) == wanted
