"""`san runs` names what runs of the same name differ in."""

from __future__ import annotations

from collections.abc import Callable

from experiments.runner.grid_run import GridRun
from experiments.tracking.listing import list_runs
from san import Complexity
from tests.experiments.conftest import San

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
