"""The main path with every real part: `san run`, Ray, DALI, DeepSpeed, kernels, MLflow and the table."""

import csv
import functools
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import Placement, available_cpus
from cluster.sweep import sweep
from experiments.grids.grid import Trial
from experiments.grids.request import GridRequest
from experiments.runner.grid_run import open_grid_run
from experiments.runs.workspace import Workspace
from experiments.training.trainer import run_trial
from tests.cluster.functions import Memory
from tests.cluster.test_supervision import AGENTS, MARK, wait_until_gone
from tests.experiments.conftest import SMALL_GRID, WriteGrid
from tests.experiments.drivers import Driver
from tests.experiments.samples import logged_epochs

OVERRIDES = ("recipe.epochs=3", "recipe.batch_size=64")


@pytest.fixture
def start(tmp_path: Path, empty_database: Path) -> Iterator[Callable[[], Driver]]:
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs" / "mlflow.db")  # creating one takes seconds
    with ExitStack() as drivers:
        yield lambda: drivers.enter_context(Driver(SMALL_GRID, tmp_path / "runs", OVERRIDES, {MARK: str(tmp_path)}))


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["Ctrl-C", "kill"])
def test_grid_resumes(is_killed: bool, start: Callable[[], Driver], tmp_path: Path) -> None:
    first = start()
    first.wait_for("resnet26_3 starts")
    first.wait_for("patchwise_3 starts")  # two trials at the same time
    first.wait_for("finished in")
    if is_killed:
        os.kill(first.process.pid, signal.SIGKILL)
        first.finish()
    else:
        os.killpg(first.process.pid, signal.SIGINT)
        assert first.finish() == 1
        assert "the same `san run` continues it" in first.said
        assert "Traceback" not in first.said and "grpc" not in first.said.lower()
    wait_until_gone(str(tmp_path), AGENTS if is_killed else ())

    last = start()
    assert last.finish() == 0, last.said
    assert re.search(r"3 trials, [12] already finished", last.said)
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", OVERRIDES, tmp_path / "runs"))
    epochs = logged_epochs(grid_run)
    assert sorted(row for row, _, _ in epochs) == ["pairwise_3", "patchwise_3", "resnet26_3"]
    assert all(steps == [0, 1, 2] for steps in epochs.values()), epochs
    assert all(result.finished for result in grid_run.tracker.results().values())

    assert last.said.count("top-1 paper") == 1
    folder = tmp_path / "runs" / "small-digits+recipe.epochs=3+recipe.batch_size=64"
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["id"] for row in rows] == ["pairwise_3", "resnet26_3", "patchwise_3"]
    assert [f"{float(row['params']):.1f} {float(row['flops']):.1f}" for row in rows] == ["10.5 1.7", "13.7 2.4", "10.7 1.6"]
    assert all(float(row["top1"]) > 15 for row in rows)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


THREE_SETTINGS = """
question: Does the result of a trial depend on the trials before it?
base: {recipe: {epochs: 1, batch_size: 64}, data: {train_per_class: 30}}
rows:
  - {id: pairwise, model: {name: san10_pairwise, footprint: 3}, recipe: {precision: bfloat16, mixup_alpha: 0.2}}
  - {id: resnet26, model: {name: resnet26}, recipe: {grad_accum_steps: 2}}
  - {id: patchwise, model: {name: san10_patchwise, footprint: 3}, recipe: {ema_decay: 0.9}}
"""


def train_and_save(workspace: Workspace, trial: Trial, report: Callable[[Mapping[str, float]], None]) -> None:
    """Trains a trial and saves its weights and the ID of its process."""
    state = run_trial(workspace, trial, report).state_dict()
    torch.save({"state": state, "pid": os.getpid()}, workspace.runs / f"{trial.row}.pt")


@pytest.mark.slow
def test_result_does_not_depend_on_earlier_trials_of_the_process(
    write_grid: WriteGrid, tmp_path: Path, empty_database: Path
) -> None:
    saved: list[dict[str, Any]] = []
    for name, step in (("forwards", 1), ("backwards", -1)):
        (tmp_path / name).mkdir()
        shutil.copy(empty_database, tmp_path / name / "mlflow.db")
        grid_run = open_grid_run(GridRequest(write_grid(THREE_SETTINGS), "digits", (), tmp_path / name))
        grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
        trials = {trial.key: trial for trial in grid_run.trials[::step]}
        one_at_a_time = Placement(cpus=available_cpus())
        train = functools.partial(train_and_save, grid_run.workspace)
        outcomes = sweep(train, trials, one_at_a_time, storage=tmp_path / name, observer=Memory(), retries=0)
        assert [outcome.error for outcome in outcomes.values()] == [None] * 3, outcomes
        saved.append({trial.row: torch.load(tmp_path / name / f"{trial.row}.pt") for trial in grid_run.trials})
    for trials_of_a_sweep in saved:
        assert len({trial["pid"] for trial in trials_of_a_sweep.values()}) == 1
    for row, trial in saved[0].items():
        for weights, value in trial["state"].items():
            assert torch.equal(value, saved[1][row]["state"][weights]), (row, weights)
