"""Early stopping: how a stopped trial ends, and how it resumes."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.cli.run import run
from experiments.config.grid import GridRequest
from experiments.report.data import table_rows
from experiments.runner.grid_run import GridRun, known_results, open_grid_run
from experiments.runner.plan import plan, to_train
from experiments.tracking.listing import list_runs
from experiments.training.checkpoint import Checkpoint, last_of
from experiments.training.trainer import run_trial
from tests.experiments.conftest import OpenGrid, WriteGrid
from tests.experiments.processes import ended, reports, start
from tests.experiments.samples import EPOCH, finish_trial, silent

SHORT = ("recipe.epochs=3", "recipe.batch_size=50", "data.train_per_class=20")
GRID = """
    question: Which is best?
    base: {{model: {{name: san10_pairwise}}, recipe: {{epochs: 9}}}}
    rows: [{{id: good, model: {{footprint: 3}}}}, {{id: bad, model: {{footprint: 5}}}}, {{id: fair}}]
    {last}
"""
STOPPING = "early_stopping: {grace_epochs: 1, reduction: 3}"


def stop_after_two_epochs(key: str, top1: Sequence[float]) -> bool:
    assert all(0 <= value <= 100 for value in top1)
    return len(top1) < 2


@pytest.mark.slow
def test_stopped_trial_resumes_without_early_stopping(open_small_grid: OpenGrid, process_group: None) -> None:
    """A stopped trial of two workers has its run and checkpoints. One worker trains the rest without early stopping."""
    grid_run, world = open_small_grid(*SHORT, "resources.workers=2"), 2
    trial, workspace, tracker = grid_run.trials[1], grid_run.workspace, grid_run.tracker
    assert ended(start(workspace, trial, world, should_continue=stop_after_two_epochs)) == [0] * world

    result = tracker.results()[trial.key]
    assert (result.finished, result.stopped_at) == (False, 2)
    (listed,) = list_runs(workspace.tracking_uri, None)
    assert (listed.state, listed.epoch, listed.epochs) == ("stopped", 2, 3)
    for rank in range(world):
        last = reports(workspace, rank)[-1]
        assert (last["stopped"], last["epoch"], last["epochs"]) == (1, 2, 3)
    folder = workspace.checkpoints(trial)
    assert sorted(path.name for path in folder.glob("*.pt")) == [f"epoch-000{n}-step-0000000.pt" for n in (1, 2)]
    assert "stopped at epoch 2 of 3 by early stopping" in workspace.log(trial).read_text()

    run_trial(workspace, trial, silent)
    log = workspace.log(trial).read_text()
    assert "resuming from epoch-0002" in log
    assert "the number of workers changed from 2 to 1: BatchNorm resumes from the mean" in log
    assert Checkpoint.read(last_of(folder, 3)).workers == 1
    result = tracker.results()[trial.key]
    assert (result.finished, result.stopped_at) == (True, None)
    history = tracker.client.get_metric_history(result.run_id, "val/top1")
    assert sorted(metric.step for metric in history) == [0, 1, 2]


def test_only_the_grid_that_stopped_a_trial_leaves_it_so(write_grid: WriteGrid, runs: Path) -> None:
    """Early stopping is not part of a key, so all grids know the results of finished trials."""

    def open_it(last: str, name: str = "which.yaml") -> GridRun:
        return open_grid_run(GridRequest(write_grid(GRID.format(last=last), name), "digits", (), runs))

    grid_run = open_it(STOPPING)
    grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
    good, bad, _ = grid_run.trials
    finish_trial(grid_run, good, 60.0)
    stopped = grid_run.tracker.open(bad)
    stopped.log([replace(EPOCH, top1=20.0)])
    stopped.stop("which-digits", 1)
    planned = {trial.row: (trial.finished, trial.stopped_at) for trial in plan(grid_run)}
    assert planned == {"good": (True, None), "bad": (False, 1), "fair": (False, None)}
    assert [trial.row for trial, _ in to_train(grid_run, known_results(grid_run))] == ["fair"]
    lines = {line.id: (line.top1, line.note) for line in table_rows(grid_run, known_results(grid_run))}
    assert lines["good"] == (60.0, None)
    assert lines["bad"][0] is None and "stopped at epoch 1 of 9" in (lines["bad"][1] or "")
    for other in (open_it(STOPPING, "other.yaml"), open_it("")):
        assert {trial.row for trial, _ in to_train(other, known_results(other))} == {"bad", "fair"}


def test_grid_stops_the_trials_that_do_not_learn(
    write_grid: WriteGrid, runs: Path, process_group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trains two trials that learn, then two that do not."""
    path = write_grid("""
        question: Which learning rate?
        base: {model: {name: resnet26}, recipe: {epochs: 4, batch_size: 20}, data: {train_per_class: 24}}
        product: {recipe.lr: [0.1, 1e-9]}
        seeds: [0, 1]
        early_stopping: {grace_epochs: 2, reduction: 2}
    """)
    grid_run = open_grid_run(GridRequest(path, "digits", (), runs, serial=True))
    assert run(grid_run.request, None)
    said = capsys.readouterr().err
    stopped = re.findall(r"\] (\S+) stopped at epoch 2 of 4 by early stopping", said)
    assert {"lr1e-9", "lr1e-9-seed1"} <= set(stopped), said
    assert len(stopped) <= 3, said  # the second that learns stops if it is worse than the first
    assert f"stopped early: {', '.join(sorted(stopped))}" in said
    assert run(grid_run.request, None)
    again = f"4 trials, {4 - len(stopped)} already finished, {len(stopped)} already stopped early, 0 to train"
    assert again in capsys.readouterr().err
