"""The page of a grid in a browser: content, colors, widths, printing, no network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from mlflow.entities import Metric

from experiments.cli.show import write_page
from experiments.evaluation.attention import in_words, look, open_image
from experiments.evaluation.evaluate import open_checkpoint
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.grid import ProtocolName
from experiments.report import data
from experiments.report.build import rows_of
from experiments.report.charts import CURVES
from experiments.report.data import GridReport, shown_rows
from experiments.report.page import commands_for_row, page
from experiments.runner.job import Job, known_results, open_job
from experiments.runs.summary import Confusion
from experiments.tracking import Result
from tests.browser import Browser, browser
from tests.experiments.conftest import San
from tests.experiments.report.conftest import QUESTION, save_untrained
from tests.experiments.report.page_checks import faults

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


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def cells(page: Browser, row: str, table: str = "section[aria-labelledby=results]") -> list[str]:
    """The texts of a row of a table, without its heading."""
    found = f"[...document.querySelectorAll('{table} tbody tr')].find(r => r.cells[0].innerText === '{row}')"
    return list(page.evaluate(f"[...{found}.cells].slice(1).map(c => c.innerText)"))


@pytest.mark.slow
def test_page_in_a_browser(finished_job: Callable[..., Job], shown: Browser, tmp_path: Path, run_san: San) -> None:
    """The content does not depend on color or a network. Screenshots are in the test's folder."""
    job = finished_job()
    best = next(trial for trial in job.trials if trial.row == "pairwise_5")
    file = save_untrained(job, best)
    options = ("--seeds", "2", "--runs", job.workspace.runs, "--json", "--html", tmp_path / "page.html")
    _, _, err = run_san("report", tmp_path / "invented.yaml", *options)
    assert f"report: {tmp_path / 'page.html'}\n" in err
    assert (tmp_path / "page.html").stat().st_size < 250_000
    for width in (1280, 400, 320):
        for dark in (False, True):
            shown.show(width, dark)
            shown.open((tmp_path / "page.html").as_uri())
            assert shown.complaints == []
            assert shown.requests == []
            shown.screenshot(tmp_path / f"page-{width}-{'dark' if dark else 'light'}.png")
            assert faults(shown, width) == {}

    assert shown.evaluate("document.documentElement.lang") == "en"
    assert shown.evaluate("document.querySelector('h1').innerText") == QUESTION
    assert shown.evaluate("document.title") == f"invented: {QUESTION}"
    assert shown.evaluate("document.querySelectorAll('script, h1 b').length") == 0
    ended = max(result.ended for result in known_results(job).values())
    assert (
        f"7 of 10 trials finished\nlast trial finished {datetime.fromtimestamp(ended, UTC):%Y-%m-%d %H:%M} UTC" in shown.text()
    )

    assert cells(shown, "resnet26_3") == ["76.0", "90.5 (90.0, 91.0)", "100.0", "13.7", "13.7", "2.4", "2.4"]
    assert cells(shown, "pairwise_5")[:2] == ["76.6", "94.0 1 of 2 seeds"]
    assert cells(shown, "patchwise_5")[:3] == ["78.7", "not finished", "not finished"]

    charts = shown.evaluate("[...document.querySelectorAll('svg.chart')].map(s => s.getAttribute('aria-label'))")
    assert len(charts) == 2 + 4 + 2 * 3 + 1  # plot and cost, ours and the paper's; curves of 3 families; attention
    assert charts[0].startswith(
        "Top-1 accuracy against side of the footprint, pixels, ours, digits. resnet26: resnet26_3: 90.5 %"
    )
    curves = "[...document.querySelectorAll('[aria-labelledby=training-curves] svg.chart"
    lines = shown.evaluate(f"{curves} .line path')].map(p => p.getAttribute('d').match(/L/g).length)")
    assert lines == [2] * 2 * 4
    assert shown.evaluate(f"{curves}')].map(c => [...c.querySelectorAll('text')].map(t => t.textContent).slice(0, 4))") == (
        [["1", "2", "3", "epoch"]] * 6
    )
    marks = shown.evaluate("new Set([...document.querySelectorAll('.mark defs path')].map(m => m.getAttribute('d'))).size")
    assert marks >= 3  # families differ without color

    opened = open_checkpoint(file)
    attention = look(opened, open_image(opened, "180"))
    pictures = "[...document.querySelectorAll('[aria-labelledby=attention-weights] svg')]"
    assert shown.evaluate(f"{pictures}.map(s => s.ariaLabel)") == [in_words(attention)]
    words = shown.evaluate(f"[...{pictures}[0].querySelectorAll('text')].map(t => t.textContent)")
    assert [word for word in words if word.startswith("channel")] == [f"channel {number}" for number in range(4)]
    assert shown.evaluate("[...document.querySelectorAll('image')].every(i => i.getBBox().width > 0)")
    looks = shown.evaluate("document.querySelector('section[aria-labelledby=attention-weights]').innerText")
    assert "pairwise_5: pairwise attention, subtraction" in looks and f"{attention.between:.0f} % of the variance" in looks
    assert "patchwise_3-seed1\n\nNo picture: " in looks and "epoch-0003-step-0000000.pt: cannot read this file" in looks

    reproduce = "section[aria-labelledby=reproduce]"
    assert f"san run {tmp_path / 'invented.yaml'} --profile digits --seeds 2" in shown.text()
    first = job.trials[0]
    assert cells(shown, first.name, reproduce)[:2] == [first.key, known_results(job)[first.key].run_id]
    facts = shown.evaluate(f"document.querySelector('{reproduce} dl').innerText")
    assert first.data_digest in facts and "python 3" in facts and "torch " in facts and " CPUs (" in facts
    assert "Robustness" not in shown.text()


def test_large_grids_show_only_the_best_rows(
    write_grid: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes explain which rows have curves, labels and commands."""
    monkeypatch.setattr(data, "MOST_ROWS", 3)
    rows = [{"id": f"row{number}", "model": {"name": "resnet26"}, "recipe": {"lr": 0.1 + number}} for number in range(6)]
    job = open_job(write_grid(yaml.safe_dump({"question": "q", "rows": rows})), "digits", (), tmp_path)
    tops = (50.0, 90.0, 70.0, None, 80.0, 60.0)
    results = {
        trial.key: Result("run", True, {"val/top1": top1, "val/top5": 99.0})
        for trial, top1 in zip(job.trials, tops, strict=True)
        if top1
    }
    lines = rows_of(job, results)
    kept = ["row1", "row2", "row4"]
    assert shown_rows(lines) == kept
    curves = {key: {metric: [(0, 1.0), (1, 2.0)] for metric in CURVES} for key in results}
    report = GridReport(job.grid, job.name, "", job.command, (), job.trials, results, lines, curves, "sqlite:///", (), ())
    text = page(report)
    for element in ("labels, where there is room", "curves", "a command on this page"):
        assert f"Only the best 3 of the 6 rows, by top-1, have {element}." in text
    assert re.findall("<summary>(.*?)</summary>", text) == kept
    assert re.findall('<g class="label"><text.*?>(.*?)</text>', text) == 2 * ["1", "2", "4"]
    assert "with the best top-1 have" not in page(replace(report, rows=lines[:3]))


@pytest.mark.slow
def test_shows_tracked_robustness_of_other_grids(finished_job: Callable[..., Job], shown: Browser, tmp_path: Path) -> None:
    job = finished_job()
    run_id = known_results(job)[job.trials[0].key].run_id
    job.tracker.add(run_id, {"robustness/none/top1": 90.0, "robustness/rotate90/top1": 40.0})
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.open((tmp_path / "page.html").as_uri())
    section = "[...document.querySelectorAll('[aria-labelledby=robustness-rotation] tbody')]"
    turned = shown.evaluate(f"[...{section}[1].rows].map(r => [...r.cells].map(c => c.innerText))")
    assert turned[:3] == [
        ["cw90"],
        ["resnet26_3", "40.0 1 of 2 seeds", "50.0", "not measured"],
        ["pairwise_3", "not measured", "\N{EN DASH}", "not measured"],
    ]
    assert shown.evaluate("document.querySelectorAll('[aria-labelledby=robustness-attack]').length") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol, names, measured, missing",
    [
        (
            "rotation",
            ["none", "cw90", "cw180", "cw270", "upside_down"],
            {
                "none": ["73.6", "90.0", DASH, DASH, "91.7", "90.0", DASH, DASH],
                "cw90": ["49.1", "80.0", "24.5", "10.0", "72.7", "80.0", "19.0", "10.0"],
                "cw270": ["49.2", "not measured", "24.4", DASH, "72.8", "not measured", "18.9", DASH],
            },
            ["54.7", "not measured", "20.2", DASH, "78.5", "not measured", "13.6", DASH],
        ),
        (
            "attack",
            ["clean", "n2", "n4"],
            {
                "clean": [DASH, DASH, "73.6", "90.0", DASH, DASH],
                "n2": ["49.0", "80.0", "26.6", "80.0", "47.0", "10.0"],
                "n4": ["98.2", "not measured", "1.0", "not measured", "72.6", DASH],
            },
            ["90.1", "not measured", "5.3", "not measured", "69.6", DASH],
        ),
    ],
)
def test_protocol_table_and_charts(
    protocol: ProtocolName,
    names: list[str],
    measured: dict[str, list[str]],
    missing: list[str],
    finished_job: Callable[..., Job],
    shown: Browser,
    tmp_path: Path,
) -> None:
    """Two conditions are measured, for one of two seeds of one of two rows."""
    job = finished_job(grid=GRID_OF_PROTOCOL.format(protocol))
    run_id = known_results(job)[job.trials[0].key].run_id
    for condition, value in zip(PROTOCOLS[protocol].conditions[:2], (90.0, 80.0), strict=True):
        metrics = condition.metrics(dict.fromkeys(condition.numbers, value))
        job.tracker.client.log_batch(run_id, [Metric(name, number, 0, 0) for name, number in metrics.items()])
    write_page(job, known_results(job), tmp_path / "page.html")
    for width in (1280, 400):
        shown.show(width, dark=False)
        shown.open((tmp_path / "page.html").as_uri())
        shown.screenshot(tmp_path / f"page-{width}.png")
        assert shown.complaints == [] and faults(shown, width) == {}
    headings = shown.evaluate("[...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings[:3] == ["Results", "Accuracy that remains", "Accuracy on clean images"]
    assert "Robustness" not in headings
    rows = shown.evaluate(
        "[...document.querySelectorAll('[aria-labelledby=results] tbody')].map(b => [...b.rows].map(r => [...r.cells].map("
        "c => c.innerText)))"
    )
    assert [heading for [[heading], *_] in rows] == names
    for [[condition], *lines] in rows:
        assert [line[0] for line in lines] == ["resnet26", "san10_pairwise"]
        if condition in measured:
            assert [text.removesuffix(" 1 of 2 seeds") for text in lines[0][1:]] == measured[condition]
    assert rows[2][2][1:] == missing
    assert "90.0 1 of 2 seeds" in rows[0][1]


@pytest.mark.slow
def test_two_seeds_are_listed_instead_of_an_interval(finished_job: Callable[..., Job], shown: Browser, tmp_path: Path) -> None:
    """The seeds have different accuracies but the same drop."""
    job = finished_job(grid=GRID_OF_PROTOCOL.format("rotation"))
    results = known_results(job)
    for trial in job.trials[:2]:
        for condition, value in zip(PROTOCOLS["rotation"].conditions[:2], (90.0, 80.0), strict=True):
            metrics = condition.metrics(dict.fromkeys(condition.numbers, value - trial.seed))
            job.tracker.add(results[trial.key].run_id, metrics)
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.open((tmp_path / "page.html").as_uri())
    turned = "[...document.querySelectorAll('[aria-labelledby=results] tbody')][1].rows[1].cells"
    assert shown.evaluate(f"[...{turned}].map(c => c.innerText)")[1:5] == ["49.1", "79.5 (80.0, 79.0)", "24.5", "10.0"]
    assert "The interval of a drop" not in shown.text()
    labels = shown.evaluate(
        "[...document.querySelectorAll('[aria-labelledby=accuracy-that-remains] svg.chart')].map(c => c.ariaLabel)"
    )
    assert labels[0] == ("Top-1 under cw90 against top-1 on clean images, ours, digits. resnet: resnet26: 79.5 % of 89.5 %.")
    assert labels[1].startswith(
        "Top-1 under cw90 against top-1 on clean images, paper, ImageNet. resnet: resnet26: 49.1 % of 73.6 %."
    )
    assert len(labels) == 5  # ours under one condition, the paper's under four


@pytest.mark.slow
def test_printed_page_is_light_and_not_cut_off(finished_job: Callable[..., Job], shown: Browser, tmp_path: Path) -> None:
    """Also if the reader prefers dark pages."""
    job = finished_job()
    rotation = {
        metric: 40.0 for condition in PROTOCOLS["rotation"].conditions for metric in map(condition.metric, condition.numbers)
    }
    job.tracker.add(known_results(job)[job.trials[0].key].run_id, rotation)
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.show(718, dark=True)  # the width of A4
    shown.open((tmp_path / "page.html").as_uri())
    cut = "[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth - b.clientWidth, b.scrollHeight - b.clientHeight])"
    assert max(wide for wide, _ in shown.evaluate(cut)) > 100
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    shown.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    try:
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert set(map(tuple, shown.evaluate(cut))) == {(0, 0)}
        assert shown.evaluate("document.documentElement.scrollWidth") <= 718
    finally:
        shown.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
def test_shows_a_difference_if_the_training_matches_the_paper(
    finished_job: Callable[..., Job], folder_of_1000_classes: Path, shown: Browser, tmp_path: Path
) -> None:
    job = finished_job(f"data.root={folder_of_1000_classes}", "recipe.epochs=100", profile="imagenet")
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.open((tmp_path / "page.html").as_uri())
    assert cells(shown, "resnet26_3")[:3] == ["76.0", "90.5 (90.0, 91.0)", "+14.5"]
    assert "other images" not in shown.text()


def test_links_runs_on_a_server(finished_job: Callable[..., Job], tmp_path: Path) -> None:
    job = finished_job()
    results = known_results(job)
    workspace = replace(job.workspace, tracking_uri="https://runs.example.org/")
    tracker = job.tracker
    path = tmp_path / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "tracker", property(lambda job: tracker))
        write_page(replace(job, workspace=workspace), results, path)
    result = results[job.trials[0].key]
    place = f"https://runs.example.org/#/experiments/{result.experiment_id}/runs/{result.run_id}"
    assert f'<a href="{place}"><code>{result.run_id}</code></a>' in path.read_text()


def test_commands_for_a_row_train_the_same_trials(finished_job: Callable[..., Job], tmp_path: Path) -> None:
    job = finished_job("recipe.lr=0.05")
    for row in ("pairwise_5", "resnet26_3"):
        found = re.fullmatch(
            r"cat > (\S+) <<'END'\n(.*)END\n(.*)",
            commands_for_row(job.grid, row, job.trials, job.overrides, job.profile),
            re.DOTALL,
        )
        assert found is not None
        file, text, command = found.groups()
        assert command == f"san run {file} --profile digits recipe.lr=0.05"
        (tmp_path / file).write_text(text)
        alone = open_job(tmp_path / file, "digits", job.overrides, tmp_path / "runs")
        assert [trial.key for trial in alone.trials] == [trial.key for trial in job.trials if trial.row == row]
        assert alone.grid.question == QUESTION


def test_commands_for_a_row_keep_the_protocol(tmp_path: Path) -> None:
    (tmp_path / "turned.yaml").write_text("{question: q, robustness: rotation, rows: [{id: one, model: {name: resnet26}}]}")
    job = open_job(tmp_path / "turned.yaml", "digits", (), tmp_path / "runs")
    text = commands_for_row(job.grid, "one", job.trials, (), "digits").partition("<<'END'\n")[2].partition("END\n")[0]
    (tmp_path / "one.yaml").write_text(text)
    assert open_job(tmp_path / "one.yaml", "digits", (), tmp_path / "runs").grid.robustness == "rotation"


@pytest.mark.slow
def test_shows_accuracy_by_class_and_confusion_matrices(
    finished_job: Callable[..., Job], shown: Browser, tmp_path: Path
) -> None:
    job = finished_job()
    for trial in job.trials[:2]:  # both seeds of a row
        path = job.workspace.checkpoints(trial) / "confusion.csv"
        path.parent.mkdir(parents=True)
        path.write_bytes(Confusion(("<b>cat</b>", "dog"), ((3, 1), (0, 4))).as_csv())
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.open((tmp_path / "page.html").as_uri())
    section = "[aria-labelledby=accuracy-by-class]"
    assert cells(shown, "<b>cat</b>", section) == ["75.0"]
    assert cells(shown, "dog", section) == ["100.0"]
    matrix = f"[...document.querySelectorAll('{section} details tr')].map(r => [...r.cells].map(c => c.textContent.trim()))"
    assert shown.evaluate(matrix) == [["class", "<b>cat</b>", "dog"], ["<b>cat</b>", "6", "2"], ["dog", "0", "8"]]
    for width in (1280, 400):
        shown.show(width, False)
        assert faults(shown, width) == {}
