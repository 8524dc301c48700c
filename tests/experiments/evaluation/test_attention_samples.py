"""The attention samples of a page: the selection of trials, and errors."""

from dataclasses import replace
from pathlib import Path

import yaml

from experiments.config.grid import GridRequest
from experiments.evaluation.attention_samples import attention_samples, best_of_each_kind
from experiments.runner.grid_run import open_grid_run
from experiments.tracking import Result
from experiments.training.checkpoint import Checkpoint
from tests.experiments.conftest import WriteGrid
from tests.experiments.report.conftest import GRID, save_untrained


def test_samples_the_best_trial_of_each_kind_of_attention(write_grid: WriteGrid, tmp_path: Path) -> None:
    """Later trials are better in this test."""
    rows: dict[str, dict[str, str]]
    for rows, chosen in (
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
    ):
        content = {"question": "q", "rows": [{"id": row, "model": model} for row, model in rows.items()]}
        grid_run = open_grid_run(GridRequest(write_grid(yaml.safe_dump(content)), "digits", (), tmp_path, seeds=2))
        finished = [(trial, Result("run", True, {"val/top1": 50.0 + place})) for place, trial in enumerate(grid_run.trials)]
        assert [(trial.row, trial.seed) for trial in best_of_each_kind(finished)] == [(row, 1) for row in chosen]


def with_an_unknown_field(path: Path) -> None:
    found = Checkpoint.read(path)
    path.write_bytes(replace(found, origin=replace(found.origin, record={**found.origin.record, "late": 1})).as_bytes())


def test_unreadable_checkpoint_becomes_an_error_message(write_grid: WriteGrid, tmp_path: Path) -> None:
    grid_run = open_grid_run(GridRequest(write_grid(GRID), "digits", (), tmp_path))
    trial = next(trial for trial in grid_run.trials if trial.row == "patchwise_3")
    path = save_untrained(grid_run, trial)
    for change, message in ((with_an_unknown_field, "late: "), (Path.unlink, "No such file")):
        change(path)
        (found,) = attention_samples(grid_run.workspace, [(trial, Result("run", True, {"val/top1": 95.0}))])
        assert found.attention is None and message in found.error and "\n" not in found.error
