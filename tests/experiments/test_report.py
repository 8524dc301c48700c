"""The table and the plot: paper | ours, missing numbers marked, nothing compared that cannot be."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.report import figures, table
from experiments.report.paper import counts_at_paper_setting, paper_rows
from experiments.run import Job, open_job
from experiments.tracking import Result
from tests.experiments.test_grid import GRIDS


def tabled(job: Job, tops: dict[str, float], profile: str = "digits") -> list[table.Line]:
    """The table of a job in which the named rows have finished with this top-1."""
    trials = [dataclasses.replace(trial, profile=profile) for trial in job.trials]
    results = {
        trial.key: Result("run", True, {"val/top1": tops[trial.row], "val/top5": 99.0}) for trial in trials if trial.row in tops
    }
    return table.lines(job.grid, trials, results, paper_rows(job.grid.table), counts_at_paper_setting(job.full_size))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_counts_are_those_that_the_paper_prints(path: Path, tmp_path: Path) -> None:
    for line in tabled(open_job(path, "digits", (), tmp_path), {}):
        assert f"{line.params:.1f} {line.flops:.1f}" == f"{line.paper_params} {line.paper_flops}", line.id


def test_missing_cells_are_marked(open_small_job: Callable[..., Job]) -> None:
    text = table.as_text(tabled(open_small_job(), {"resnet26_3": 97.25}))
    heading, rule, pairwise, resnet, patchwise = text.splitlines()
    assert "difference" not in heading
    assert len({len(line) for line in (heading, rule, pairwise, resnet, patchwise)}) == 1
    assert pairwise.split() == ["pairwise_3", "75.3", "-", "-", "10.5", "10.5", "1.7", "1.7"]
    assert resnet.split() == ["resnet26_3", "76.0", "97.2", "99.0", "13.7", "13.7", "2.4", "2.4"]


def test_the_difference_needs_the_papers_data(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    assert tabled(job, {"resnet26_3": 75.0})[1].difference is None
    lines = tabled(job, {"resnet26_3": 75.0}, profile="imagenet")
    assert lines[1].difference == pytest.approx(-1.0)
    assert "difference" in table.as_markdown(lines)
    assert " -1.0 |" in table.as_markdown(lines)


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
    assert (line.top1, line.seeds) == (90.0, 1)  # an unfinished run does not count
    results[second.key] = Result("b", True, {"val/top1": 94.0, "val/top5": 99.0})
    (line,) = table.lines(job.grid, job.trials, results, paper, counts)
    assert (line.top1, line.seeds) == (92.0, 2)


def test_plot_is_a_picture(open_small_job: Callable[..., Job], tmp_path: Path) -> None:
    job = open_small_job()
    assert job.grid.plot is not None
    path = tmp_path / "plot.png"
    figures.draw(job.grid.plot, job.trials, tabled(job, {"resnet26_3": 97.0}), "Title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


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
