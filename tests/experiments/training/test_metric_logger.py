"""The metric logger: training does not wait for MLflow, which gets every epoch exactly once."""

import itertools
import logging
import threading
from collections.abc import Sequence, Set
from dataclasses import replace

import pytest

from experiments.runner.grid_run import GridRun
from experiments.runs.summary import Epoch
from experiments.tracking.tracker import NodeMonitor, TrialRun
from experiments.training import metric_logger
from experiments.training.metric_logger import AsyncMetricLogger
from san import Complexity
from tests.experiments.conftest import OpenGrid
from tests.experiments.drivers import PATIENCE, wait_until
from tests.experiments.samples import EPOCH, logged_epochs

HISTORY = tuple(replace(EPOCH, epoch=number, top1=10.0 * number, ended=1000 + number) for number in range(8))


def open_logger(grid_run: GridRun, resumed: bool = False) -> AsyncMetricLogger:
    """A logger of the grid's second trial."""
    return AsyncMetricLogger(grid_run.workspace.tracking_uri, grid_run.trials[1], Complexity(1, 2, 3, ()), {}, 100, resumed)


def runs_are(grid_run: GridRun, *expected: tuple[str, int]) -> bool:
    """Whether the trials' runs have these states and numbers of epochs."""
    return [(status, epochs) for (_, _, status), epochs in logged_epochs(grid_run).items()] == [
        (status, [*range(count)]) for status, count in expected
    ]


def test_outage_of_mlflow_loses_no_epoch(
    open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is away in epochs 3 and 4, and from epoch 7 until after the end of the trial."""
    log, is_away, has_refused = TrialRun.log, threading.Event(), threading.Event()
    errors = itertools.cycle([ConnectionError, RuntimeError])

    def request(run: TrialRun, history: Sequence[Epoch], logged: Set[int] | None) -> Set[int]:
        if is_away.is_set():
            has_refused.set()
            raise next(errors)
        return log(run, history, logged)

    monkeypatch.setattr(TrialRun, "log", request)
    monkeypatch.setattr(metric_logger, "PAUSE", 0.05)
    grid_run = open_small_grid()
    logger = open_logger(grid_run)
    with caplog.at_level(logging.WARNING, "experiments"):
        for count in range(1, 9):
            if count in (3, 7):
                has_refused.clear()
                is_away.set()
            logger.log(HISTORY[:count])
            if count == 4:
                assert has_refused.wait(PATIENCE)
                is_away.clear()
                wait_until(lambda: runs_are(grid_run, ("RUNNING", 4)))  # the missing epochs are sent again
        assert has_refused.wait(PATIENCE)
        logger.finish(None, None, 0.1)
    assert caplog.text.count("cannot send results to MLflow, will retry: ") == 2
    assert [status for _, _, status in logged_epochs(grid_run)] == ["RUNNING"]

    is_away.clear()
    open_logger(grid_run, resumed=True).close(PATIENCE)
    again = open_logger(grid_run, resumed=True)
    again.log(HISTORY)
    again.finish(None, None, PATIENCE)
    assert runs_are(grid_run, ("FINISHED", 8))
    history = grid_run.tracker.client.get_metric_history(grid_run.tracker.results()[grid_run.trials[1].key].run_id, "val/top1")
    assert [(metric.value, metric.timestamp) for metric in history] == [(epoch.top1, epoch.ended) for epoch in HISTORY]


@pytest.mark.parametrize("wanted", [True, False])
def test_system_metrics(wanted: bool, open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", str(wanted).lower())
    grid_run, name = open_small_grid(), "system/cpu_utilization_percentage"
    key = grid_run.trials[1].key
    logger = open_logger(grid_run)
    logger.log(HISTORY[:1])
    if wanted:
        wait_until(lambda: key in (found := grid_run.tracker.results()) and name in found[key].metrics)
    logger.finish(None, None, PATIENCE)
    assert (logger._monitor is not None) == wanted
    assert (name in grid_run.tracker.results()[key].metrics) == wanted == NodeMonitor.is_wanted()
