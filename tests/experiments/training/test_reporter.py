"""Reports of a trial's progress."""

from dataclasses import replace

import pytest
import torch

from experiments.runs.store import LocalStore
from experiments.training import reporter
from experiments.training.checkpoint import best_in
from experiments.training.reporter import Throttle
from tests.experiments.conftest import OpenGrid
from tests.experiments.processes import ended, reports, start, weights
from tests.experiments.runner.test_progress import Clock
from tests.experiments.samples import without_times


def test_short_epochs_are_reported_only_at_their_end() -> None:
    clock = Clock()
    throttle = Throttle(10, clock)
    assert throttle.is_due(is_last_step=False)  # the first step
    throttle.step_done()
    for seconds, is_last_step, due in ((9, False, False), (0, True, False), (2, False, True), (0, True, True)):
        clock.now += seconds
        assert throttle.is_due(is_last_step) == due
    throttle.epoch_done()
    assert not throttle.is_due(is_last_step=False)
    clock.now += 8
    throttle.step_done()
    clock.now += 4  # the validation after a long epoch may take long too
    assert throttle.is_due(is_last_step=True)
    assert not throttle.is_due(is_last_step=False)


def always() -> None:
    reporter.SECONDS_BETWEEN_REPORTS = 0.0


def never() -> None:
    reporter.SECONDS_BETWEEN_REPORTS = float("inf")


@pytest.mark.slow
def test_reports_do_not_change_the_result(open_small_grid: OpenGrid) -> None:
    """Three epochs of four steps each, with a check and a report after each step, or almost none."""
    grid_run = open_small_grid(
        "recipe.epochs=3", "recipe.batch_size=50", "data.train_per_class=20", "checkpointing.check_every_n_steps=1"
    )
    often = next(trial for trial in grid_run.trials if trial.row == "resnet26_3")
    checkpointing = often.config.checkpointing.model_copy(update={"check_every_n_steps": 20})
    seldom = replace(often, config=often.config.model_copy(update={"checkpointing": checkpointing}))
    assert seldom.key == often.key
    quiet = replace(grid_run.workspace, store=LocalStore(grid_run.workspace.runs / "quiet"))
    assert ended(start(grid_run.workspace, often, 2, body=always)) == [0, 0]
    assert ended(start(quiet, seldom, 2, body=never)) == [0, 0]
    for rank in (0, 1):
        sent = [(report["epoch"], report.get("step")) for report in reports(grid_run.workspace, rank)]
        assert sent == [(epoch + (step is None), step) for epoch in range(3) for step in (1, 2, 3, 4, None)]
        few = [(report["epoch"], report.get("step")) for report in reports(quiet, rank)]
        assert few == [(0, 1), (1, None), (2, None), (3, None)]
        other = weights(quiet, rank)
        for name, value in weights(grid_run.workspace, rank).items():
            assert torch.equal(value, other[name]), name
    first, second = (best_in(workspace.store, workspace.folder(often)) for workspace in (grid_run.workspace, quiet))
    assert first is not None and second is not None
    assert without_times(first.history) == without_times(second.history)
