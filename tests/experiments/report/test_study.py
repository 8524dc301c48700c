"""The study: claims of the paper, verdicts, and the page."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats  # type: ignore[import-untyped, unused-ignore]

from experiments.config.config import GRIDS_DIR
from experiments.config.grid import GridRequest
from experiments.evaluation.robustness import ROBUSTNESS_METRICS
from experiments.paper.tables import PaperClaim, paper_claims, paper_rows
from experiments.report.interval import Interval, pooled
from experiments.report.study import Finding, Section, findings, spreads_of, write_study
from experiments.runner.grid_run import GridRun, open_grid_run
from experiments.tracking import Result


def opened(table: str, runs: Path) -> GridRun:
    return open_grid_run(GridRequest(GRIDS_DIR / f"{table}.yaml", "digits", (), runs, seeds=3))


def invented(grid_run: GridRun, tops: dict[str, list[float]]) -> Section:
    """The section of a grid run whose rows have finished with this top-1 for each seed."""
    others = {"val/top5": 99.0, "summary/images_per_second": 100.0}
    results = {
        trial.key: Result("run", True, {"val/top1": tops[trial.row][trial.seed]} | others)
        for trial in grid_run.trials
        if trial.seed < len(tops.get(trial.row, []))
    }
    return Section(grid_run, results)


def test_claims_agree_with_the_numbers_of_the_paper(tmp_path: Path) -> None:
    for table, claims in paper_claims().items():
        section = Section(opened(table, tmp_path), {})
        pairs = [(claim.better, claim.worse, claim.score) for claim in claims]
        assert len(set(pairs)) == len(pairs) == len({claim.claim for claim in claims}), table
        for finding in findings(section, spreads_of([section])):
            assert finding.paper_gap > 0 and finding.verdict == "open", finding
            assert finding.claim.claim.endswith(".") and "|" not in finding.claim.claim


def test_verdict_follows_from_the_interval() -> None:
    for gap, verdict in (
        (Interval(0.5, 0.4), "confirmed"),
        (Interval(-0.5, 0.4), "reversed"),
        (Interval(0.5, 0.5), "inconclusive"),
        (Interval(-0.5, 0.5), "inconclusive"),
        (Interval(0.1, 3.0), "inconclusive"),
        (Interval(0.0, 0.0), "inconclusive"),
        (None, "open"),
    ):
        assert Finding(PaperClaim("a", "b", "A is better."), 1.0, gap).verdict == verdict, gap


def test_findings_compare_the_seeds_of_two_rows(tmp_path: Path) -> None:
    tops = {"pairwise_none": [80.0, 81.0, 82.0], "pairwise_absolute": [78.0, 78.5, 79.0], "pairwise_relative": [90.0]}
    section = invented(opened("position", tmp_path), tops)
    assert {row: section.by_seed(row, "top1") for row in tops} == tops
    absolute, relative, drop = findings(section, spreads_of([section]))
    assert (absolute.claim.better, absolute.claim.worse) == ("pairwise_absolute", "pairwise_none")
    assert absolute.paper_gap == pytest.approx(74.7 - 72.3)
    assert absolute.gap is not None and absolute.gap.middle == pytest.approx(-2.5)
    assert absolute.verdict == "reversed"
    assert relative.gap is drop.gap is None  # one seed has no spread


def test_a_model_in_two_tables_counts_once_in_the_spread(tmp_path: Path) -> None:
    shared, other = [80.0, 81.0], [60.0, 64.0]
    mapping = invented(opened("mapping", tmp_path), {"pairwise_LRL": shared, "patchwise_L": other})
    footprint = invented(opened("footprint", tmp_path), {"pairwise_7": shared})
    for sections in ([mapping], [mapping, footprint]):
        assert spreads_of(sections)["top1", "san10_pairwise"] == pooled([shared])
    assert spreads_of([mapping])["top1", "san10_patchwise"] == pooled([other])


ROBUST = {
    "none/top1": (80.0, 70.0),
    "rotate90/top1": (40.0, 40.0),
    "rotate180/top1": (60.0, 45.0),
    "rotate270/top1": (40.0, 40.0),
    "upside_down/top1": (60.0, 45.0),
    "pgd-epsilon8-step2-n4/success": (90.0, 60.0),
    "pgd-epsilon8-step2-n4/top1": (1.0, 4.0),
}
"""Numbers of ResNet26 and of SAN10 pairwise with seed 0."""
STEP = 0.25
"""What seed 1 adds to top-1 without rotation and to the numbers of the attack. Equal spreads of two rows are two estimates."""


def measured(table: str, runs: Path) -> Section:
    grid_run, results = opened(table, runs), dict[str, Result]()
    grid_run = replace(grid_run, request=replace(grid_run.request, only=("resnet26", "san10_pairwise", "san10_patchwise")))
    for trial in grid_run.selected:
        if trial.row != "san10_patchwise" and trial.seed < 2:
            metrics, which = dict.fromkeys(ROBUSTNESS_METRICS, 0.0), int(trial.row == "san10_pairwise")
            for key, values in ROBUST.items():
                more = STEP * trial.seed if key.startswith(("none", "pgd")) else 0.0
                metrics[f"robustness/{key}"] = values[which] + more
            results[trial.key] = Result("", True, metrics)
    return Section(grid_run, results)


def test_orderings_of_robustness(tmp_path: Path) -> None:
    """Less is better for losses and for successful attacks; seeds vary in their losses, and each score has its own spread."""
    rotation, attack = measured("rotation", tmp_path), measured("attack", tmp_path)
    spreads = spreads_of([rotation, attack])
    drop, *others = findings(rotation, spreads)
    expected = stats.ttest_ind([80 - 50, 80.25 - 50], [70 - 42.5, 70.25 - 42.5], equal_var=False).confidence_interval()
    assert drop.gap is not None and (drop.gap.low, drop.gap.high) == pytest.approx((expected.low, expected.high))
    assert drop.verdict == "confirmed"
    assert drop.paper_gap == pytest.approx((73.6 - (49.1 + 50.6 + 49.2 + 50.5) / 4) - (74.9 - (51.8 + 54.7 + 51.7 + 54.7) / 4))
    assert [one.verdict for one in others] == ["open", "open"]
    gaps = {one.claim.score: (one.gap.middle, one.paper_gap) for one in findings(attack, spreads) if one.gap}
    assert gaps["n4_success"] == (30.0, pytest.approx(98.2 - 90.1))
    assert gaps["n4_top1"] == (3.0, pytest.approx(5.3 - 1.0))


def test_page_shows_robustness(tmp_path: Path) -> None:
    path, position = tmp_path / "study.md", invented(opened("position", tmp_path), {"pairwise_none": [80.0, 81.0]})
    files = write_study([position, measured("rotation", tmp_path), measured("attack", tmp_path)], path, 600, 360)
    assert [file.name for file in files] == ["study.md", "study-position.png"]
    page = path.read_text()
    assert "| resnet26 | 73.6 / 80.1 (80.0, 80.2) | 49.9 / 50.0 (50.0, 50.0) | 23.8 / 30.1 (30.0, 30.2) |" in page
    assert "| san10_patchwise | 77.1 / - | 24.5 / - | 46.4 / - | 85.8 / - | 9.6 / - |" in page
    words = " ".join(page.split())
    assert "7 of 9 trials and 5 of 9 networks in the tables of robustness are missing" in words
    assert "Not trained yet: pairwise_absolute, pairwise_relative." in words
    assert words.count("Not measured yet: san10_patchwise.") == 2
    assert "2 trials took" in words and "3 confirmed" in words


def test_page_has_every_table_and_finding(tmp_path: Path) -> None:
    chance, tables = random.Random(0), ("footprint", "position")
    rows = {table: [row for row in paper_rows(table) if row != "pairwise_11"] for table in tables}
    sections = [
        invented(opened(table, tmp_path / "runs"), {row: [chance.gauss(90, 1) for _ in range(3)] for row in rows[table]})
        for table in tables
    ]
    path = tmp_path / "docs" / "study.md"
    files = write_study(sections, path, train_images=600, val_images=360)
    assert files == [path, *(path.with_name(f"study-{table}.png") for table in tables)]
    assert all(file.stat().st_size > 1000 for file in files)
    page, found, spreads = path.read_text(), [], spreads_of(sections)
    for section in sections:
        assert f"## {section.table.capitalize()}\n\n{section.grid_run.grid.question}\n\n![" in page
        assert f"](study-{section.table}.png)" in page
        for finding in findings(section, spreads):
            found.append(finding.verdict)
            mark = " †" if finding.claim.source == "table" else ""
            assert f"| {finding.claim.claim}{mark} | {finding.verdict} | {finding.paper_gap:+.1f} | " in page
    words = " ".join(page.split())
    assert f"Of {len(found)}:" in words and "Not trained yet: pairwise_11." in words
    trials = {trial.key for section in sections for trial in section.grid_run.trials if trial.row != "pairwise_11"}
    hours = len(trials) * 600 * 18 / 100 / 3600
    assert f"{len(trials)} trials took {hours:.1f} hours" in words
    for verdict in ("confirmed", "reversed", "inconclusive"):
        assert f"{found.count(verdict)} {verdict}" in words


def test_page_without_results(tmp_path: Path) -> None:
    grid_run = opened("position", tmp_path)
    path = tmp_path / "study.md"
    assert write_study([invented(grid_run, {})], path, 600, 360) == [path]
    words = " ".join(path.read_text().split())
    assert "9 of 9 trials are missing;" in words and "3 open" in words
