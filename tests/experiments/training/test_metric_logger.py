"""The metric logger: training does not wait for MLflow, which gets every epoch exactly once."""

import threading
import time
from collections.abc import Mapping, Sequence, Set

import pytest

from experiments.runner.grid_run import GridRun
from experiments.runs.summary import Epoch
from experiments.tracking.tracker import TrialRun
from experiments.training import metric_logger
from experiments.training.checkpoint import Checkpoint
from experiments.training.trainer import run_trial
from tests.experiments.conftest import OpenGrid
from tests.experiments.samples import logged_epochs, silent


def steps(grid_run: GridRun) -> list[tuple[str, list[int]]]:
    """Status and epochs of each run of the grid's trials."""
    return [(status, epochs) for (_, _, status), epochs in logged_epochs(grid_run).items()]


def test_outage_of_mlflow_loses_no_epoch(
    open_small_grid: OpenGrid, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away in epochs 3 and 4, and from epoch 7 until after the end of the trial. Training continues meanwhile."""
    log, is_away = TrialRun.log, threading.Event()

    def request(run: TrialRun, history: Sequence[Epoch], logged: Set[int] | None) -> Set[int]:
        if is_away.is_set():
            raise ConnectionError
        return log(run, history, logged)

    monkeypatch.setattr(TrialRun, "log", request)
    monkeypatch.setattr("experiments.training.trainer.OUTAGE_TIMEOUT", 1.0)
    monkeypatch.setattr(metric_logger, "PAUSE", 0.05)
    grid_run = open_small_grid("recipe.epochs=8", "recipe.batch_size=100", "data.train_per_class=20")
    trial = grid_run.trials[1]
    epochs: list[float] = []

    def disturb(metrics: Mapping[str, float]) -> None:
        if "step" in metrics:  # inside an epoch
            return
        epochs.append(metrics["epoch"])
        if epochs[-1] in (2, 6):
            is_away.set()
        if epochs[-1] == 4:
            is_away.clear()
            limit = time.monotonic() + 120
            while steps(grid_run) != [("RUNNING", [0, 1, 2, 3])]:  # the missing epochs are sent again
                assert time.monotonic() < limit
                time.sleep(0.1)

    run_trial(grid_run.workspace, trial, disturb)
    assert epochs == list(range(1, 9))
    assert [status for status, _ in steps(grid_run)] == ["RUNNING"]
    assert grid_run.workspace.log(trial).read_text().count("cannot send results to MLflow, will retry: ") == 2

    is_away.clear()
    again: list[Mapping[str, float]] = []
    run_trial(grid_run.workspace, trial, again.append)
    assert again == []  # nothing was trained
    assert steps(grid_run) == [("FINISHED", list(range(8)))]
    saved = Checkpoint.of_bytes(max(grid_run.workspace.checkpoints(trial).glob("*.pt")).read_bytes()).history
    history = grid_run.tracker.client.get_metric_history(grid_run.tracker.results()[trial.key].run_id, "val/top1")
    assert [(metric.value, metric.timestamp) for metric in history] == [(epoch.top1, epoch.ended) for epoch in saved]


@pytest.mark.parametrize("wanted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_system_metrics(wanted: bool, open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch, process_group: None) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", str(wanted).lower())
    grid_run = open_small_grid("recipe.epochs=2", "recipe.batch_size=256")
    run_trial(grid_run.workspace, grid_run.trials[1], silent)
    metrics = grid_run.tracker.results()[grid_run.trials[1].key].metrics
    assert ("system/cpu_utilization_percentage" in metrics) == wanted
