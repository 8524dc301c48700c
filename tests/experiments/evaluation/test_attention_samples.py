"""The attention samples of a page: the selection of trials, and errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.evaluation.attention_samples import attention_samples, best_of_each_kind
from experiments.grids.request import GridRequest
from experiments.runner.grid_run import open_grid_run
from experiments.tracking import Result
from experiments.training.checkpoint import Checkpoint
from tests.experiments.conftest import WriteGrid
from tests.experiments.report.conftest import GRID, save_untrained


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ({"resnet26": {"name": "resnet26"}, "resnet38": {"name": "resnet38"}}, []),
        (
            {"deep": {"name": "san19_pairwise"}, "best": {"name": "san10_pairwise"}, "scalar": {"name": "san10_scalar"}},
            ["best", "scalar"],
        ),
        (
            {
                **{relation: {"name": "san10_pairwise", "relation": relation} for relation in ("dot", "hadamard", "summation")},
                **{relation: {"name": "san10_patchwise", "relation": relation} for relation in ("clique", "star")},
            },
            ["hadamard", "summation", "clique", "star"],
        ),
    ],
    ids=["convolutions", "depths", "relations"],
)
def test_samples_the_best_trial_of_each_kind_of_attention(
    rows: dict[str, dict[str, str]], chosen: list[str], write_grid: WriteGrid, tmp_path: Path
) -> None:
    """Later trials are better in this test."""
    content = {"question": "q", "rows": [{"id": row, "model": model} for row, model in rows.items()]}
    grid_run = open_grid_run(GridRequest(write_grid(yaml.safe_dump(content)), "digits", (), tmp_path, seeds=2))
    finished = [(trial, Result("run", True, {"val/top1": 50.0 + place})) for place, trial in enumerate(grid_run.trials)]
    assert [(trial.row, trial.seed) for trial in best_of_each_kind(finished)] == [(row, 1) for row in chosen]


def with_an_unknown_field(path: Path) -> None:
    found = Checkpoint.read(path)
    path.write_bytes(replace(found, origin=replace(found.origin, record={**found.origin.record, "late": 1})).as_bytes())


@pytest.mark.parametrize(("change", "message"), [(Path.unlink, "No such file"), (with_an_unknown_field, "late: ")])
def test_unreadable_checkpoint_becomes_an_error_message(
    change: Callable[[Path], None], message: str, write_grid: WriteGrid, tmp_path: Path
) -> None:
    grid_run = open_grid_run(GridRequest(write_grid(GRID), "digits", (), tmp_path))
    trial = next(trial for trial in grid_run.trials if trial.row == "patchwise_3")
    change(save_untrained(grid_run, trial))
    (found,) = attention_samples(grid_run.workspace, [(trial, Result("run", True, {"val/top1": 95.0}))])
    assert found.attention is None and message in found.error and "\n" not in found.error
