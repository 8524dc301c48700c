"""Results as a CSV file."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.tracking import Result
from experiments.tracking.results_file import ResultsFile
from tests.experiments.conftest import OpenGrid

METRICS = {"val/top1": 71.25, "val/top5": 97.5, "val/loss": 1.0625, "train/loss": 1.125, "summary/images_per_second": 240.5}


def result(finished: bool = True) -> Result:
    return Result("run", finished, METRICS, seconds=93.0, ended=1_700_000_000.0)


def test_finished_trials_are_read_as_they_were_added(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    file, trials = ResultsFile(tmp_path / "kept.csv"), open_small_grid().trials
    assert file.read() == {}
    file.add(trials, {trials[0].key: result(), trials[1].key: result(finished=False)})
    file.add((*trials, *trials), {trials[0].key: result(), trials[1].key: result()})
    lines = file.path.read_text().splitlines()
    assert len(lines) == 3 and lines[1].startswith(f"{trials[0].key},{trials[0].grid}/{trials[0].name},")
    results = file.read()
    assert set(results) == {trials[0].key, trials[1].key}
    for one in results.values():
        assert (one.finished, one.metrics, one.seconds, one.ended) == (True, METRICS, 93.0, 1_700_000_000.0)


def test_other_columns_are_kept(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    """As in a file to which `tests.gpu.study` has added, and whose last newline an editor removed."""
    file, trials = ResultsFile(tmp_path / "kept.csv"), open_small_grid().trials
    file.add(trials[:1], {trials[0].key: result()})
    header, line = file.path.read_text().splitlines()
    file.path.write_text(f"{header},hardware\n{line},CPU")
    file.add(trials, {trials[1].key: result()})
    with open(file.path) as lines:
        assert [row["hardware"] for row in csv.DictReader(lines)] == ["CPU", ""]
    assert len(file.read()) == 2


def test_edited_file_is_named_with_its_line(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    file, trials = ResultsFile(tmp_path / "kept.csv"), open_small_grid().trials
    file.add(trials[:1], {trials[0].key: result()})
    header, line = file.path.read_text().splitlines()
    for edited in ("abc,def", line.rpartition(",")[0], line.replace("71.25", "nan")):
        file.path.write_text(f"{header}\n{line}\n{edited}\n")
        with pytest.raises(UserError, match=r"kept.csv:3: .* the columns key, .*; delete this line"):
            file.read()


def test_a_trial_is_kept_once_it_has_all_measurements(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    file, trials = ResultsFile(tmp_path / "kept.csv", ("robustness/a", "robustness/b")), open_small_grid().trials
    half, whole = METRICS | {"robustness/a": 1.5}, METRICS | {"robustness/a": 1.5, "robustness/b": 0.0}
    file.add(trials, {trials[0].key: replace(result(), metrics=half), trials[1].key: replace(result(), metrics=whole)})
    assert {key: one.metrics for key, one in file.read().items()} == {trials[1].key: whole}
    file.path.write_text(file.path.read_text().replace(",1.5,", ",,"))
    with pytest.raises(UserError, match=r"kept.csv:2: .*; delete this line"):
        file.read()


def test_other_files_are_refused_and_empty_ones_used(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    file, trials = ResultsFile(tmp_path / "kept.csv"), open_small_grid().trials
    for text in ("name,age\n", "\n"):
        file.path.write_text(text)
        with pytest.raises(UserError, match=r"kept.csv: .* the columns key, .*; choose another file"):
            file.add(trials, {trials[0].key: result()})
        assert file.path.read_text() == text
    file.path.write_text("")
    file.add(trials, {trials[0].key: result()})
    assert set(file.read()) == {trials[0].key}
