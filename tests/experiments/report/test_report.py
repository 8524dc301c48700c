"""The table and the plot: paper | ours, missing numbers marked, nothing compared that cannot be."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.cli.plan import plan, plan_in_words
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.paper import counts_at_paper_setting, paper_rows
from experiments.report import figures, interval, table
from experiments.report import robustness as robust
from experiments.report.answer import show
from experiments.tracking import Result
from experiments.training.job import Job, open_job
from tests.experiments.grids.test_grid import GRIDS


def tabled(job: Job, tops: dict[str, float]) -> list[table.Line]:
    """The table of a job in which the named rows have finished with this top-1."""
    results = {
        trial.key: Result("run", True, {"val/top1": tops[trial.row], "val/top5": 99.0})
        for trial in job.trials
        if trial.row in tops
    }
    printed = paper_rows(job.grid.table) if job.grid.table else {}
    return table.lines(job.grid, job.trials, results, printed, counts_at_paper_setting(job.full_size))


COUNTED = [path for path in GRIDS if path.stem not in ("rotation", "attack")]
"""Grids whose tables print parameters and FLOPs."""


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.stem)
def test_counts_are_those_that_the_paper_prints(path: Path, tmp_path: Path) -> None:
    for line in tabled(open_job(path, "digits", (), tmp_path), {}):
        printed = "10.0 2.0" if line.id == "pairwise_phi_eq_psi" else f"{line.paper_params} {line.paper_flops}"
        assert f"{line.params:.1f} {line.flops:.1f}" == printed, line.id  # that one counts 2.046, where the paper has 2.1


def test_missing_cells_are_marked(open_small_job: Callable[..., Job]) -> None:
    text = table.as_text(tabled(open_small_job(), {"resnet26_3": 97.25}))
    heading, rule, pairwise, resnet, patchwise = text.splitlines()
    assert "difference" not in heading
    assert len({len(line) for line in (heading, rule, pairwise, resnet, patchwise)}) == 1
    assert pairwise.split() == ["pairwise_3", "75.3", "-", "-", "10.5", "10.5", "1.7", "1.7"]
    assert resnet.split() == ["resnet26_3", "76.0", "97.2", "99.0", "13.7", "13.7", "2.4", "2.4"]


def test_a_row_that_the_papers_table_lacks_is_told(
    write_grid: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f"  - {{id: {row}, model: {{name: resnet26}}}}" for row in ("resnet26_3", *"abcde"))
    job = open_job(write_grid(f"question: Which rows?\ntable: footprint\nrows:\n{rows}\n"), "digits", (), tmp_path)
    told = "table `footprint` (which lacks a, b, c and 2 more rows)"
    show(job, {})
    assert f"Which rows? Paper: ImageNet, {told}. Ours: " in capsys.readouterr().out
    assert f"compared with the paper's {told}" in plan_in_words(job, plan(job), None)


def test_the_difference_is_to_trainings_as_the_papers(small_grid: Path, folder_of_1000_classes: Path, tmp_path: Path) -> None:
    root = f"data.root={folder_of_1000_classes}"
    lines = tabled(open_job(small_grid, "imagenet", [root, "recipe.batch_size=128"], tmp_path), {"resnet26_3": 75.0})
    assert [line.difference for line in lines] == [None, pytest.approx(-1.0), None]
    assert " -1.0 |" in table.as_markdown(lines)


@pytest.mark.parametrize(
    "profile, overrides",
    [
        ("digits", ()),
        ("imagenet", ("data.source=synthetic",)),
        ("imagenet", ("data.root=data/digits", "recipe.batch_size=64")),
        ("imagenet", ("data.root={folder}", "data.train_per_class=1")),
        ("imagenet", ("data.root={folder}", "data.size=160")),
        ("imagenet", ("data.root={folder}", "recipe.epochs=10")),
    ],
)
def test_nothing_is_compared_that_was_not_trained_as_the_papers(
    profile: str, overrides: tuple[str, ...], small_grid: Path, folder_of_1000_classes: Path, tmp_path: Path
) -> None:
    open_job(small_grid, "digits", (), tmp_path)  # writes the digits where they are missing
    given = [override.format(folder=folder_of_1000_classes) for override in overrides]
    job = open_job(small_grid, profile, given, tmp_path)
    assert {line.difference for line in tabled(job, {"resnet26_3": 75.0})} == {None}
    first = PROTOCOLS["rotation"].conditions[0]
    metrics = {"val/top1": 1.0, "val/top5": 2.0} | first.metrics({"top1": 1.0, "top5": 2.0})
    ours = {trial.key: Result("run", True, metrics) for trial in job.trials}
    printed = {row.id: {f"{first.name}_top1": 77.0} for row in job.grid.rows}
    cells = robust.cells_of_grid(PROTOCOLS["rotation"], job.trials, ours, printed)
    assert {cell.difference for cell in cells} == {None} and any(cell.paper and cell.ours for cell in cells)


def test_csv_has_every_field(open_small_job: Callable[..., Job]) -> None:
    rows = list(csv.DictReader(table.as_csv(tabled(open_small_job(), {"resnet26_3": 97.25})).splitlines()))
    assert list(rows[0]) == [field.name for field in dataclasses.fields(table.Line)]
    assert [row["top1"] for row in rows] == ["", "97.25", ""]
    assert rows[0]["params"] == "10.531848"


def test_seeds_are_averaged(write_grid: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_grid("""
        question: Does chance matter?
        table: footprint
        seeds: [0, 1]
        rows: [{id: resnet26_3, model: {name: resnet26}}]
    """)
    job = open_job(path, "digits", (), tmp_path)
    first, second = job.trials
    results = {first.key: Result("a", True, {"val/top1": 90.0, "val/top5": 99.0})}
    results[second.key] = Result("b", False, {"val/top1": 20.0, "val/top5": 50.0})
    counts, paper = counts_at_paper_setting(job.full_size), paper_rows("footprint")
    (line,) = table.lines(job.grid, job.trials, results, paper, counts)
    assert (line.top1, line.top1_half_width, line.seeds) == (90.0, None, 1)  # an unfinished run does not count
    assert "seeds" not in table.as_text([line]) and "±" not in table.as_text([line])
    results[second.key] = Result("b", True, {"val/top1": 94.0, "val/top5": 99.0})
    (line,) = table.lines(job.grid, job.trials, results, paper, counts)
    assert (line.top1, line.seeds) == (92.0, 2)
    assert line.top1_half_width is None  # two seeds are shown as they are
    assert "| resnet26_3 | 76.0 | 92.0 (90.0, 94.0) | 2 |" in table.as_markdown([line])
    third = dataclasses.replace(job.trials[0], seed=2)
    results[third.key] = Result("c", True, {"val/top1": 98.0, "val/top5": 99.0})
    (line,) = table.lines(job.grid, [*job.trials, third], results, paper, counts)
    # Student's t at 97.5 % with 2 degrees of freedom is 4.303; the standard error is 4 / sqrt(3).
    assert line.top1_half_width == pytest.approx(4.302653 * 4 / 3**0.5, abs=1e-3)
    assert "| resnet26_3 | 76.0 | 94.0 ± 9.9 | 3 |" in table.as_markdown([line])
    assert "94.0 ± 9.9      3" in table.as_text([line])
    (row,) = csv.DictReader(table.as_csv([line]).splitlines())
    assert (float(row["top1_half_width"]), row["top1_by_seed"]) == (line.top1_half_width, "90.0 94.0 98.0")
    assert table.as_markdown([line], table.ACCURACY).splitlines()[0] == "| row | top-1 paper | top-1 ours | seeds |"


def test_the_interval_of_a_mean() -> None:
    assert interval.of_mean([]) is interval.of_mean([93.0]) is interval.of_mean([93.0, 95.0]) is None
    # Mean 92, variance 4, so a standard error of sqrt(4 / 3); t at 97.5 % with 2 degrees of freedom is 4.302653.
    found = interval.of_mean([90.0, 92.0, 94.0])
    assert found is not None
    assert (found.middle, found.half_width) == pytest.approx((92.0, 4.302653 * (4 / 3) ** 0.5))
    assert (found.low, found.high) == pytest.approx((87.0317, 96.9683), abs=1e-3)


def test_the_interval_of_a_difference() -> None:
    assert interval.of_difference([1.0, 2.0], [3.0]) is interval.of_difference([], [1.0, 2.0]) is None
    # Variances 1 and 4 of three values each: error sqrt(5 / 3), freedom (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50 / 17.
    found = interval.of_difference([91.0, 92.0, 93.0], [86.0, 88.0, 90.0])
    assert found is not None
    assert found.middle == pytest.approx(4.0)
    assert found.half_width == pytest.approx(3.2192 * (5 / 3) ** 0.5, abs=1e-3)
    assert interval.of_difference([92.0, 92.0], [91.0, 91.0]) is None  # no spread is no certainty


def test_a_grid_without_a_table_has_no_columns_of_the_paper(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    results = {job.trials[0].key: Result("run", True, {"val/top1": 97.25, "val/top5": 99.0})}
    lines = table.lines(job.grid, job.trials, results, {}, counts_at_paper_setting(job.full_size))
    assert {line.paper_top1 for line in lines} == {None}
    assert table.as_markdown(lines).splitlines()[0] == "| row | top-1 ours | top-5 ours | params M ours | FLOPs G ours |"


@pytest.mark.parametrize("is_plot", [True, False], ids=["plot", "rows"])
@pytest.mark.parametrize("has_paper", [True, False], ids=["beside the paper", "alone"])
@pytest.mark.parametrize("half_width", [None, 0.5], ids=["one seed", "seeds"])
def test_every_picture(
    is_plot: bool, has_paper: bool, half_width: float | None, open_small_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = open_small_job()
    lines = tabled(job, {"resnet26_3": 97.0, "pairwise_3": 96.0})
    lines = [dataclasses.replace(line, top1_half_width=half_width if line.top1 else None) for line in lines]
    if not has_paper:
        lines = [dataclasses.replace(line, paper_top1=None) for line in lines]
    path = tmp_path / "plot.png"
    figures.draw(job.grid.plot if is_plot else None, job.trials, lines, "Title", path)
    width, _ = png_size(path)
    assert path.stat().st_size > 10_000
    assert (width > 1000) == has_paper  # two panels


def test_a_picture_has_room_for_every_row(tmp_path: Path) -> None:
    heights = {}
    for name in ("position", "footprint"):
        (grid,) = (path for path in GRIDS if path.stem == name)
        job = open_job(grid, "digits", (), tmp_path)
        lines = tabled(job, {trial.row: 90.0 for trial in job.trials})
        figures.draw(None, job.trials, lines, "Title", tmp_path / f"{name}.png")
        _, heights[len(lines)] = png_size(tmp_path / f"{name}.png")
    assert heights[13] - heights[3] > 10 * 30


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the file's header."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def test_counts_follow_an_override(small_grid: Path, tmp_path: Path) -> None:
    plain, wide = (tabled(open_job(small_grid, "digits", o, tmp_path), {}) for o in ((), ("model.footprint=11",)))
    assert [f"{line.flops:.1f}" for line in plain] == ["1.7", "2.4", "1.6"]
    assert [f"{line.flops:.1f}" for line in wide][::2] == ["3.0", "2.3"]


def test_a_model_that_does_not_fit_the_papers_setting_has_no_counts(write_grid: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_grid("""
        question: Too large for the last stage?
        table: footprint
        rows: [{id: pairwise_3, model: {name: san10_pairwise, footprint: 15}}]
    """)
    (line,) = tabled(open_job(path, "digits", ("data.size=64", "data.resize=64"), tmp_path), {})
    assert (line.params, line.flops, line.paper_params) == (None, None, 10.5)
