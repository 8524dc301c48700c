"""Tables as text, Markdown, LaTeX and CSV, and a grid's trials as a DataFrame, from Python and from `san report --csv`."""

import csv
import dataclasses
import io
import math
from pathlib import Path

import pandas as pd
import pytest

import experiments
import san
from experiments.config.grid import GridRequest
from experiments.report.data import TableRow, table_rows
from experiments.report.tables import Table, csv_text, grid_table
from experiments.runner.grid_run import open_grid_run
from tests.experiments.conftest import SMALL_GRID, OpenGrid, Rejected, San, WriteGrid
from tests.experiments.report.conftest import tabled


def test_unfinished_rows_have_dashes(open_small_grid: OpenGrid) -> None:
    text = grid_table(tabled(open_small_grid(), {"resnet26_3": 97.25})).text()
    heading, _, pairwise, resnet, _ = text.splitlines()
    assert "difference" not in heading
    assert len({len(line) for line in text.splitlines()}) == 1
    assert pairwise.split() == ["pairwise_3", "75.3", "-", "-", "10.5", "10.5", "1.7", "1.7"]
    assert resnet.split() == ["resnet26_3", "76.0", "97.2", "99.0", "13.7", "13.7", "2.4", "2.4"]


def test_no_difference_is_written_as_minus_zero(open_small_grid: OpenGrid) -> None:
    rows = [dataclasses.replace(row, difference=-0.04) for row in tabled(open_small_grid(), {"resnet26_3": 97.25})]
    text = grid_table(rows).text()
    assert "+0.0" in text and "-0.0" not in text


SWEEP = """
    question: q
    base: {model: {name: resnet26}}
    product: {model.footprint: [3, 5], recipe.lr: [0.1, 0.2]}
"""


def test_swept_values_are_columns_and_the_x_axis(write_grid: WriteGrid, tmp_path: Path) -> None:
    grid_run = open_grid_run(GridRequest(write_grid(SWEEP), "digits", (), tmp_path))
    lines = tabled(grid_run, {"footprint3-lr0.1": 97.25})
    heading, _, first, *_ = grid_table(lines).text().splitlines()
    assert heading.split() == ["row", "footprint", "lr", "top-1", "top-5", "params", "M", "FLOPs", "M"]
    assert first.split()[:3] == ["footprint3-lr0.1", "3", "0.1"]
    first, second, *_ = csv.DictReader(csv_text(lines).splitlines())
    assert first.keys() >= {field.name for field in dataclasses.fields(TableRow) if field.name != "settings"}
    assert (first["model.footprint"], first["recipe.lr"], first["top1"], second["top1"]) == ("3", "0.1", "97.25", "")
    assert (grid_run.grid.plot and (grid_run.grid.plot.x, grid_run.grid.plot.series)) == ("model.footprint", "recipe.lr")


def test_grid_without_a_table_counts_the_trained_models(write_grid: WriteGrid, tmp_path: Path) -> None:
    grid_run = open_grid_run(GridRequest(write_grid(SWEEP), "digits", (), tmp_path))
    spec = grid_run.trials[0].config.model.spec()
    counts = san.complexity(spec.build(10), 24)
    (first, *_) = table_rows(grid_run, {})
    assert (first.params, first.flops, first.paper_top1) == (counts.params / 1e6, counts.flops_paper / 1e9, None)
    assert grid_table([first]).text().split()[-2:] == [f"{first.params:.3g}", f"{1000 * first.flops:.1f}"]


def test_top5_is_left_out_for_five_classes(write_grid: WriteGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_run = open_grid_run(GridRequest(write_grid(SWEEP), "digits", (), tmp_path))
    for classes, is_shown in ((5, False), (6, True)):
        monkeypatch.setattr("experiments.report.data.class_count", lambda trial, classes=classes: classes)
        assert ("top-5" in grid_table(tabled(grid_run, {"footprint3-lr0.1": 97.25})).text()) == is_shown


ROWS = [("row_a", "top-1, %"), (r"50 % & $x$ {#1} \a ~ ^", "97.2 ± 0.4")]


def test_markdown_aligns_words_left_and_numbers_right() -> None:
    lines = Table([("row", "top-1"), ("a", "97.2")]).markdown().splitlines()
    assert lines == ["| row | top-1 |", "| --- | ---: |", "| a | 97.2 |"]


def test_latex_escapes_special_characters() -> None:
    text = Table(ROWS).latex().splitlines()
    assert text[:3] == [r"\begin{tabular}{lr}", r"\toprule", r"row\_a & top-1, \% \\"]
    assert text[4].startswith(r"50 \% \& \$x\$ \{\#1\} \textbackslash a")


def test_latex_groups_paper_and_ours_under_one_heading() -> None:
    heading = ("row", "top-1 paper", "top-1 ours", "seeds", "top-5 ours")
    text = Table([heading, ("a", "1", "2", "3", "4")]).latex().splitlines()
    assert text[2:4] == [r" & \multicolumn{2}{c}{top-1} &  & top-5 \\", r"row & paper & ours & seeds & ours \\"]


def test_a_trial_is_a_row_with_settings_counts_and_metrics(
    finished_grid: OpenGrid, tmp_path: Path, run_san: San, rejected: Rejected
) -> None:
    grid_run = finished_grid()
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
