"""The page of a grid: well-formed, with the right numbers, and without links to elsewhere."""

import base64
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from experiments.config.grid import GridRequest
from experiments.evaluation.robustness import PROTOCOLS
from experiments.report import data, plots
from experiments.report.data import GridReport, grid_report, table_rows
from experiments.report.page import ONE_SEED, render
from experiments.report.plots import CURVES
from experiments.report.write import write_page
from experiments.runner.grid_run import GridRun, known_results, open_grid_run
from experiments.runs.summary import Confusion
from experiments.tracking import Result
from tests.experiments.conftest import OpenGrid, Printed, San, WriteGrid
from tests.experiments.report.conftest import QUESTION, finished, read_page, rows_of_table, save_untrained, text_of

GRID_OF_PROTOCOL = """
    question: q
    table: {0}
    robustness: {0}
    base: {{recipe: {{epochs: 3}}}}
    rows:
      - {{id: resnet26, model: {{name: resnet26}}}}
      - {{id: san10_pairwise, model: {{name: san10_pairwise}}}}
"""
DASH = "\N{EN DASH}"


def test_page_of_a_grid(finished_grid: OpenGrid, tmp_path: Path, run_san: San) -> None:
    grid_run = finished_grid()
    first = grid_run.trials[0]
    results = known_results(grid_run)
    grid_run.tracker.add(results[first.key].run_id, {"robustness/none/top1": 90.0, "robustness/rotate90/top1": 40.0})
    for trial in grid_run.trials[:2]:  # both seeds of a row
        path = grid_run.workspace.checkpoints(trial) / "confusion.csv"
        path.parent.mkdir(parents=True)
        path.write_bytes(Confusion(("<b>cat</b>", "d\udcffg"), ((3, 1), (0, 4))).as_csv())
    (tmp_path / "mine.py").touch()
    options = ("--seeds", "2", "--runs", grid_run.workspace.runs, "--json", "--html", tmp_path / "page.html", "--import")
    run_san("report", tmp_path / "invented.yaml", *options, tmp_path / "mine.py")
    root = read_page(tmp_path / "page.html")
    text = text_of(root)

    assert [text_of(heading) for heading in root.iter("h1")] == [QUESTION]
    assert root.findtext("head/title") == f"invented: {QUESTION}"
    assert not list(root.iter("script"))
    assert all(table.findtext("caption") for table in root.iter("table"))
    assert all(heading.get("scope") for heading in root.iter("th"))
    ended = datetime.fromtimestamp(max(result.ended for result in results.values()), UTC)
    assert "invented.yaml --profile digits --seeds 2 --only=resnet26_3 --import=" in text
    assert "Up and to the left is better." in text and "Intervals without an end mark" not in text  # two seeds have none
    assert ONE_SEED not in text
    assert "7 of 10 trials finished" in text and f"last trial finished {ended:%Y-%m-%d %H:%M} UTC" in text

    rows = {row[0]: row[1:] for row in rows_of_table(root, "results")}
    assert rows["resnet26_3"] == ["76.0", "90.5 (90.0, 91.0)", "100.0", "13.7", "13.7", "2.4", "2.4"]
    assert rows["pairwise_5"][:2] == ["76.6", "94.0 1 of 2 seeds"]
    assert rows["patchwise_5"][:3] == ["78.7", "not finished", DASH]

    charts = root.findall(".//div[@class='charts']/img")
    assert len(charts) == 2 + 4 + 2  # plot and cost, ours and the paper's; curves
    assert charts[0].get("alt") == "ours, digits: top-1, % by side of the footprint, pixels"
    curves = base64.b64decode(charts[-1].get("src", "").removeprefix("data:image/svg+xml;base64,")).decode()
    assert [f"<!-- {row} -->" in curves for row in ("pairwise_5", "patchwise_3", "patchwise_5")] == [True, True, False]

    assert f"san run {tmp_path / 'invented.yaml'} --profile digits --seeds 2" in text
    trials = {row[0]: row[1:] for row in rows_of_table(root, "reproduce")}
    minutes = f"{60 * results[first.key].metrics['summary/training_hours']:.1f}"  # without interruptions
    assert trials[first.name][:4] == [first.key, results[first.key].run_id, "90.00", minutes]
    assert first.data_digest in text and "python 3" in text and " CPUs (" in text

    assert rows_of_table(root, "accuracy-by-class") == [
        ["<b>cat</b>", "75.0"],
        ["d?g", "100.0"],
        ["<b>cat</b>", "6", "2"],  # the sum over the seeds
        ["d?g", "0", "8"],
    ]
    turned = rows_of_table(root, "robustness-rotation")
    assert turned[turned.index(["cw90"]) :][1:3] == [
        ["resnet26_3", "40.0 1 of 2 seeds", "50.0", "not measured"],
        ["pairwise_3", "not measured", DASH, "not measured"],
    ]


def test_command_draws_the_attention_of_the_best_row(finished_grid: OpenGrid, tmp_path: Path, printed: Printed) -> None:
    """The page itself needs no checkpoint."""
    grid_run, page = finished_grid(), tmp_path / "page.html"
    (tmp_path / "mine.py").touch()
    grid_run = replace(grid_run, request=replace(grid_run.request, imports=(str(tmp_path / "mine.py"),)))
    write_page(grid_report(grid_run, known_results(grid_run)), page)
    command = read_page(page).findtext(".//section[@id='attention-weights']//code")
    best = next(trial for trial in grid_run.trials if trial.row == "patchwise_3")
    assert command == f"san attention {best.key} 0 --import={tmp_path / 'mine.py'} --runs {grid_run.workspace.runs}"
    save_untrained(grid_run, best)
    assert "patchwise" in printed(*shlex.split(command)[1:], "--out", tmp_path / "attention.png")


def test_row_that_was_stopped_early_shows_its_last_epoch(finished_grid: OpenGrid) -> None:
    grid_run = finished_grid()
    stopped = {grid_run.trials[-1].key: Result("run", False, {}, stopped_at=1)}
    assert "stopped at epoch 1 of 3 by early stopping" in render(grid_report(grid_run, known_results(grid_run) | stopped))


def test_large_grids_show_only_the_best_rows(write_grid: WriteGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes explain which rows have curves and commands."""
    monkeypatch.setattr(data, "MOST_ROWS", 3)
    rows = [{"id": f"row{number}", "model": {"name": "resnet26"}, "recipe": {"lr": 0.1 + number}} for number in range(6)]
    grid_run = open_grid_run(GridRequest(write_grid(yaml.safe_dump({"question": "q", "rows": rows})), "digits", (), tmp_path))
    results = finished(grid_run, {"row0": 50.0, "row1": 90.0, "row2": 70.0, "row4": 80.0, "row5": 60.0})
    lines = table_rows(grid_run, results)
    kept = ["row1", "row2", "row4"]
    curves = {key: {metric: [(0, 1.0), (1, 2.0)] for metric in CURVES} for key in results}
    report = GridReport(grid_run, results, lines, (), curves)
    assert report.shown_rows == kept
    text = render(report)
    assert text.count("Only the best 3 of the 6 rows") == 2  # have curves and commands
    assert ONE_SEED in text
    assert re.findall("<summary>(.*?)</summary>", text) == kept
    assert "Attention weights" not in text  # these networks have none
    monkeypatch.setattr(plots, "MOST_SERIES", 2)  # the curves of the third best row are folded
    assert "More rows: row2<" in render(report)
    assert "Only the best" not in render(replace(report, rows=lines[:3]))


def test_protocol_table(finished_grid: OpenGrid, tmp_path: Path) -> None:
    """Two conditions are measured, for one of two seeds of the first row."""
    grid_run = finished_grid(grid=GRID_OF_PROTOCOL.format("attack"))
    run_id = known_results(grid_run)[grid_run.trials[0].key].run_id
    for condition, value in zip(PROTOCOLS["attack"].conditions[:2], (90.0, 80.0), strict=True):
        grid_run.tracker.add(run_id, condition.metrics(dict.fromkeys(condition.numbers, value)))
    write_page(grid_report(grid_run, known_results(grid_run)), tmp_path / "page.html")
    root = read_page(tmp_path / "page.html")
    headings = [text_of(heading) for heading in root.iter("h2")]
    assert headings[:2] == ["Results", "Accuracy on clean images"]
    rows = rows_of_table(root, "results")
    assert [row[0] for row in rows] == [row for name in ("clean", "n2", "n4") for row in (name, "resnet26", "san10_pairwise")]
    assert "90.0 1 of 2 seeds" in rows[1]
    measured = ["49.0", "80.0", "26.6", "80.0", "47.0", "10.0"]
    assert [text.removesuffix(" 1 of 2 seeds") for text in rows[4][1:]] == measured
    assert ["98.2", "not measured", "1.0", "not measured", "72.6", DASH] in [row[1:] for row in rows[6:]]


def test_links_runs_on_a_server(finished_grid: OpenGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = "{question: q, base: {recipe: {epochs: 3}}, rows: [{id: resnet26, model: {name: resnet26}}]}"
    grid_run, path = finished_grid(grid=grid), tmp_path / "page.html"
    results, tracker = known_results(grid_run), grid_run.tracker
    result = results[grid_run.trials[0].key]
    monkeypatch.setattr(GridRun, "tracker", property(lambda grid_run: tracker))
    workspace = replace(grid_run.workspace, tracking_uri="https://runs.example.org/")
    write_page(grid_report(replace(grid_run, workspace=workspace), results), path)
    place = f"https://runs.example.org/#/experiments/{result.experiment_id}/runs/{result.run_id}"
    assert f'<a href="{place}"><code>{result.run_id}</code></a>' in path.read_text()
