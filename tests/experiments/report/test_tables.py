"""Tables as text, Markdown, LaTeX and CSV."""

import csv
import dataclasses
from pathlib import Path

import pytest

import san
from experiments.grids.request import GridRequest
from experiments.report.data import TableRow, table_rows
from experiments.report.tables import Table, csv_text, grid_table
from experiments.runner.grid_run import open_grid_run
from tests.experiments.conftest import OpenGrid, WriteGrid
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
