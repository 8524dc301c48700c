"""`san runs` names what runs of the same name differ in; `san delete` deletes runs, checkpoints and logs of trials."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from mlflow.exceptions import MlflowException

from experiments.config.grid import Trial
from experiments.runner.grid_run import GridRun, known_results, open_grid_run
from experiments.runs.claims import claimed_trials
from experiments.tracking.listing import list_runs
from san import Complexity
from tests.experiments.conftest import OpenGrid, Printed, Rejected, San
from tests.experiments.samples import finish_trial

COUNTS = Complexity(1, 2, 3, ())


def test_runs_of_the_same_name_are_listed_with_their_differences(open_small_grid: Callable[..., GridRun], run_san: San) -> None:
    grid_run, longer = open_small_grid(), open_small_grid("recipe.epochs=5", "recipe.lr=0.3")
    first, again = grid_run.trials[0], longer.trials[0]
    for trial in (first, again, grid_run.trials[1]):
        grid_run.tracker.open(trial).describe(trial, COUNTS)
    grid_run.tracker.open(longer.trials[1])  # killed before it logged its settings
    listed = {run.key: run.differs for run in list_runs(grid_run.workspace.tracking_uri, None)}
    assert listed == {
        first.key: "recipe.epochs=18 recipe.lr=0.1",
        again.key: "recipe.epochs=5 recipe.lr=0.3",
        grid_run.trials[1].key: "",
        longer.trials[1].key: "",
    }
    _, out, _ = run_san("runs", "--runs", grid_run.workspace.runs)
    assert f"{again.key}  small-digits {again.name} recipe.epochs=5 recipe.lr=0.3\n" in out


def trained(grid_run: GridRun, trial: Trial) -> list[Path]:
    """A finished trial; returns its files."""
    finish_trial(grid_run, trial, 50.0)
    files = [grid_run.workspace.checkpoints(trial) / "epoch-0001-step-0000000.pt", grid_run.workspace.log(trial)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    return files


def test_deletes_one_trial_and_nothing_else(open_small_grid: OpenGrid, rejected: Rejected, printed: Printed) -> None:
    grid_run = open_small_grid()
    first, second = grid_run.trials[:2]
    files, kept = trained(grid_run, first), trained(grid_run, second)
    client, experiment = grid_run.tracker.client, known_results(grid_run)[first.key].experiment_id
    for trial in (first, second):
        client.create_logged_model(experiment, trial.row, tags={"san.trial": trial.key})
    assert "add --yes" in rejected("delete", first.key, "--runs", grid_run.workspace.runs)
    assert known_results(grid_run).keys() == {first.key, second.key}
    assert printed("delete", first.key, "--yes", "--runs", grid_run.workspace.runs) == "deleted 1 trial\n"
    assert known_results(grid_run).keys() == {second.key}
    assert [model.name for model in client.search_logged_models([experiment])] == [second.row]
    assert not any(file.exists() for file in files)
    assert all(file.exists() for file in kept)


def test_all_runs_of_a_deleted_trial_are_listed(open_small_grid: OpenGrid, run_san: San, tmp_path: Path) -> None:
    """Also those of other grids, which share its key and its checkpoints."""
    grid_run = open_small_grid()
    path = shutil.copy(grid_run.request.grid, tmp_path / "other.yaml")
    other = open_grid_run(replace(grid_run.request, grid=Path(path)))
    other.tracker.prepare(other.grid, grid_run.workspace.artifacts)
    trained(other, other.trials[0])
    grid_run.tracker.open(grid_run.trials[0])
    _, _, err = run_san("delete", "small", "--runs", grid_run.workspace.runs)
    assert "other-digits" in err


def test_trial_is_kept_if_its_files_cannot_be_deleted(open_small_grid: OpenGrid, rejected: Rejected) -> None:
    """So that the same command can be given again, and the next `san run` does not continue what remains."""
    grid_run = open_small_grid()
    trial = grid_run.trials[0]
    checkpoint, _ = trained(grid_run, trial)
    with patch("shutil.rmtree"), patch.object(Path, "unlink", side_effect=PermissionError(13, "Permission denied")):
        message = rejected("delete", trial.key, "--yes", "--runs", grid_run.workspace.runs)
    assert f"{checkpoint.name}: cannot delete (Permission denied)" in message
    assert trial.key in known_results(grid_run)


def test_files_are_kept_if_the_runs_cannot_be_deleted(open_small_grid: OpenGrid, rejected: Rejected) -> None:
    grid_run = open_small_grid()
    files = trained(grid_run, grid_run.trials[0])
    with patch("mlflow.tracking.MlflowClient.delete_run", side_effect=MlflowException("no permission")):
        assert "no permission" in rejected("delete", "small", "--yes", "--runs", grid_run.workspace.runs)
    assert all(file.exists() for file in files)


def test_deletes_all_trials_of_a_grid(open_small_grid: OpenGrid, printed: Printed) -> None:
    grid_run = open_small_grid()
    for trial in grid_run.trials:
        trained(grid_run, trial)
    assert printed("delete", "small", "--yes", "--runs", grid_run.workspace.runs) == "deleted 3 trials\n"
    assert known_results(grid_run) == {}


def test_refuses_trials_that_are_trained_or_wait(open_small_grid: OpenGrid, rejected: Rejected) -> None:
    grid_run = open_small_grid()
    trial = grid_run.trials[0]
    files = trained(grid_run, trial)
    with claimed_trials(grid_run.workspace.store, "small-digits", {trial.key: trial}):
        message = rejected("delete", trial.key, "--yes", "--runs", grid_run.workspace.runs)
    assert f"trial {trial.key} is being trained or waits" in message
    assert all(file.exists() for file in files)
    assert trial.key in known_results(grid_run)


def test_rejects_an_unknown_name(open_small_grid: OpenGrid, rejected: Rejected, tmp_path: Path) -> None:
    for runs in (open_small_grid().workspace.runs, tmp_path / "mistyped"):
        assert "nothing: no trial or grid with this name" in rejected("delete", "nothing", "--yes", "--runs", runs)
    assert not (tmp_path / "mistyped").exists()
