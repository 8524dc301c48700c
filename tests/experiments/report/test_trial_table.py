"""A grid's trials as a DataFrame, from Python and from `san report --csv`."""

import io
import math
from pathlib import Path

import pandas as pd
import pytest

import experiments
import san
from experiments.errors import UserError
from tests.experiments.conftest import SMALL_GRID, OpenGrid, Rejected, San


def test_a_trial_is_a_row_with_settings_counts_and_metrics(
    finished_job: OpenGrid, tmp_path: Path, run_san: San, rejected: Rejected
) -> None:
    grid_run = finished_job()
    table = experiments.load_results(tmp_path / "invented.yaml", runs=tmp_path / "runs", seeds=2)
    trials = grid_run.trials
    assert list(table["key"]) == [trial.key for trial in trials]
    assert list(table["trial"]) == [trial.name for trial in trials]
    assert [(row.row, row.seed) for row in table.itertuples()] == [(trial.row, trial.seed) for trial in trials]
    one = table.set_index("trial").loc
    assert one["pairwise_3", "model.footprint"] == 3 and one["pairwise_5", "model.footprint"] == 5
    assert math.isnan(one["resnet26_3", "model.r1"])  # a ResNet has none
    assert one["pairwise_3", "recipe.lr_used"] == trials[0].config.recipe.lr_used
    counts = san.complexity(trials[0].config.model.spec().build(10), trials[0].config.data.size)
    names = ["params", "flops_paper", "flops_actual"]  # not those of the invented run
    assert list(table[names].iloc[0]) == [counts.params, counts.flops_paper, counts.flops_actual]
    finished = dict(table.dropna(subset="val/top1").set_index("trial")["val/top1"])
    assert finished == {
        **{"resnet26_3": 90.0, "resnet26_3-seed1": 91.0, "pairwise_3": 92.0, "pairwise_3-seed1": 93.0},
        **{"pairwise_5": 94.0, "patchwise_3": 95.0, "patchwise_3-seed1": 96.0},
    }
    assert not table.columns.duplicated().any()
    assert table.groupby("data.mean").size().item() == len(table)

    report = ("report", tmp_path / "invented.yaml", "--runs", tmp_path / "runs", "--seeds", "2")
    _, out, _ = run_san(*report, "--csv", "-")
    printed = pd.read_csv(io.StringIO(out))
    assert list(printed.columns) == list(table.columns)
    pd.testing.assert_series_equal(printed["val/top1"], table["val/top1"])
    _, out, err = run_san(*report, "--csv", tmp_path / "trials.csv")
    assert "top-1 paper" in out and f"trials: {tmp_path / 'trials.csv'}" in err
    assert pd.read_csv(tmp_path / "trials.csv").equals(printed)
    assert f"{tmp_path}: cannot write the trials (Is a directory)" in rejected(*report, "--csv", tmp_path)


def test_a_grid_without_results_has_the_columns(tmp_path: Path) -> None:
    table = experiments.load_results(str(SMALL_GRID), "recipe.epochs=3", runs=tmp_path / "none")
    assert list(table["recipe.epochs"]) == [3, 3, 3]
    assert table[["val/top1", "val/top5", "val/loss", "train/loss"]].isna().all(axis=None)
    assert not (tmp_path / "none").exists()


def test_a_trial_that_is_not_finished_has_no_metrics(open_small_grid: OpenGrid) -> None:
    grid_run = open_small_grid()
    run = grid_run.tracker.open(grid_run.trials[0])
    run.add({"val/top1": 50.0})
    for finish, expected in ((lambda: None, []), (run.finish, [50.0])):
        finish()
        assert list(experiments.load_results(SMALL_GRID, runs=grid_run.workspace.runs)["val/top1"].dropna()) == expected


def test_grids_of_the_project_are_known_by_name(tmp_path: Path) -> None:
    assert len(experiments.load_results("footprint", runs=tmp_path)) == 13
    with pytest.raises(UserError, match="did you mean `footprint`"):
        experiments.load_results("footprnt")
