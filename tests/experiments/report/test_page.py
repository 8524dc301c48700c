"""The page of a grid and MLflow's page of it, as a reader's browser shows them: content, colours, widths, no network."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Metric

from experiments.cli import main
from experiments.evaluation.evaluate import open_checkpoint
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.grid import ProtocolName, Trial
from experiments.report.answer import show, table_of, write_page
from experiments.report.attention import Attention, in_words
from experiments.report.chart import round_ticks
from experiments.report.looks import look_at_cells, of_each_kind
from experiments.report.page import CURVES, Answer, content, page, shown_rows
from experiments.report.page.charts import short_names
from experiments.report.page.reproduce import row_alone
from experiments.report.show import look, open_image
from experiments.report.text import latex
from experiments.report.tiles import LEVELS, NEGATIVE, tiles
from experiments.tracking import Result
from experiments.training.checkpoint import Checkpoint, Origin
from experiments.training.job import Job, known_results, open_job
from experiments.training.metrics import RunningEpoch
from san import Complexity
from tests.browser import Browser, browser
from tests.experiments.report.looks import faults
from tests.experiments.samples import EPOCH

QUESTION = "Is 5 < 7 & 'so' <script>document.title = 'hacked'</script><b>on</b>?"
GRID = f"""
    question: "{QUESTION}"
    table: footprint
    plot: {{x: model.footprint, series: model.name, label: "side of the footprint, pixels"}}
    base: {{recipe: {{epochs: 3}}}}
    rows:
      - {{id: resnet26_3, model: {{name: resnet26, footprint: 3}}}}
      - {{id: pairwise_3, model: {{name: san10_pairwise, footprint: 3}}}}
      - {{id: pairwise_5, model: {{name: san10_pairwise, footprint: 5}}}}
      - {{id: patchwise_3, model: {{name: san10_patchwise, footprint: 3}}}}
      - {{id: patchwise_5, model: {{name: san10_patchwise, footprint: 5}}}}
"""
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
TOPS = {
    "resnet26": 90.0,
    "san10_pairwise": 92.0,
    "resnet26_3": 90.0,
    "pairwise_3": 92.0,
    "pairwise_5": 94.0,
    "patchwise_3": 95.0,
}


@pytest.fixture
def answered(write_grid: Callable[[str, str], Path], tmp_path: Path, empty_database: Path) -> Callable[..., Job]:
    """A grid of five rows and two seeds, of which four rows are finished, one of them with one seed alone."""

    def make(*overrides: str, grid: str = GRID, profile: str = "digits") -> Job:
        runs = tmp_path / "runs"
        runs.mkdir()
        shutil.copy(empty_database, runs / "mlflow.db")
        job = open_job(write_grid(grid, "asked.yaml"), profile, overrides, runs, seeds=2)
        job.tracker.prepare(job.grid, runs / "artifacts")
        for trial in job.trials:
            if trial.row not in TOPS or (trial.row, trial.seed) == ("pairwise_5", 1):
                continue
            tracked = job.tracker.open(trial)
            tracked.describe(trial, Complexity(1, 2, 3, ()))
            top1 = TOPS[trial.row] + trial.seed
            epochs = [replace(EPOCH, epoch=i, top1=top1 - 10 * (2 - i), train_loss=2.0 - 0.5 * i) for i in range(3)]
            tracked.log(epochs, {i: 1000 * i for i in range(3)})
            tracked.finish()
        return job

    return make


def save_untrained(job: Job, trial: Trial) -> Path:
    """A checkpoint after the last epoch of a network that never saw an image."""
    torch.manual_seed(0)
    config = trial.config
    engine = {"model": config.model.spec().build(10).state_dict(), "average": None, "workers": [{"buffers": [{}]}]}
    digits = tuple(map(str, range(10)))
    origin = Origin(trial.grid, trial.profile, trial.row, trial.seed, trial.record, trial.data_digest, digits)
    history = tuple(replace(EPOCH, epoch=number) for number in range(config.recipe.epochs))
    checkpoint = Checkpoint(trial.key, origin, history, RunningEpoch(len(history), 0.1), engine)
    path = job.workspace.checkpoints(trial) / checkpoint.name
    path.parent.mkdir(parents=True)
    path.write_bytes(checkpoint.as_bytes())
    return path


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def cells(page: Browser, row: str, table: str = "section[aria-labelledby=results]") -> list[str]:
    """What a row of a table shows, without its heading."""
    found = f"[...document.querySelectorAll('{table} tbody tr')].find(r => r.cells[0].innerText === '{row}')"
    return list(page.evaluate(f"[...{found}.cells].slice(1).map(c => c.innerText)"))


def test_the_page_in_a_browser(
    answered: Callable[..., Job],
    shown: Browser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Content, without color or a network; screenshots lie in the test's folder."""
    job = answered()
    best = next(trial for trial in job.trials if trial.row == "pairwise_5")
    file = save_untrained(job, best)
    asked = ["san", "report", str(tmp_path / "asked.yaml"), "--seeds", "2", "--runs", str(job.workspace.runs), "--json"]
    monkeypatch.setattr(sys, "argv", [*asked, "--html", str(tmp_path / "page.html")])
    main()
    assert f"report: {tmp_path / 'page.html'}\n" in capsys.readouterr().err
    assert (tmp_path / "page.html").stat().st_size < 150_000
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
    assert shown.evaluate("document.title") == f"asked: {QUESTION}"
    assert shown.evaluate("document.querySelectorAll('script, h1 b').length") == 0
    ended = max(result.ended for result in known_results(job).values())
    assert f"7 of 10 cells finished\nlast cell finished {datetime.fromtimestamp(ended, UTC):%Y-%m-%d %H:%M} UTC" in shown.text()

    assert cells(shown, "resnet26_3") == ["76.0", "90.5 (90.0, 91.0)", "100.0", "13.7", "13.7", "2.4", "2.4"]
    assert cells(shown, "pairwise_5")[:2] == ["76.6", "94.0 1 of 2 seeds"]
    assert cells(shown, "patchwise_5")[:3] == ["78.7", "not finished", "not finished"]

    charts = shown.evaluate("[...document.querySelectorAll('svg.chart')].map(s => s.getAttribute('aria-label'))")
    assert len(charts) == 2 + 4 + 2 * 3  # the grid's own and the cost, ours and the paper's; accuracy and loss of 3 families
    assert charts[0].startswith(
        "Top-1 accuracy against side of the footprint, pixels, ours, digits. resnet26: resnet26_3: 90.5 %"
    )
    assert shown.evaluate("document.querySelectorAll('svg.chart path.curve').length") == 2 * 4
    ends = "[...document.querySelectorAll('svg.chart path.curve')].map(p => (p.getAttribute('d').match(/L/g) || []).length)"
    assert set(shown.evaluate(ends)) == {2}
    epochs = "[...document.querySelectorAll('[aria-labelledby=training-curves] svg.chart')].at(-1).querySelectorAll('.tick')"
    assert shown.evaluate(f"[...{epochs}].map(t => t.textContent)")[-3:] == ["1", "2", "3"]
    marks = shown.evaluate("new Set([...document.querySelectorAll('.panel .mark')].map(m => m.getAttribute('d'))).size")
    assert marks >= 3  # families are told apart without colour

    opened = open_checkpoint(file)
    seen = look(opened, open_image(opened, "180"))
    (told,) = shown.evaluate("[...document.querySelectorAll('.tiles')].map(t => t.getAttribute('aria-label'))")
    assert told == in_words(seen)
    assert shown.evaluate("[...document.querySelectorAll('.tile')].map(t => t.innerText)")[-4:] == [
        f"channel {number}" for number in range(4)
    ]
    assert shown.evaluate("[...document.querySelectorAll('image')].every(i => i.getBBox().width > 0)")
    looks = shown.evaluate("document.querySelector('section[aria-labelledby=attention-weights]').innerText")
    assert "pairwise_5: pairwise attention, subtraction" in looks and f"{seen.between:.0f} % of the variance" in looks
    assert "patchwise_3-seed1\n\nNo picture: " in looks and "epoch-0003-step-0000000.pt: cannot read this file" in looks

    reproduce = "section[aria-labelledby=reproduce]"
    assert f"san run {tmp_path / 'asked.yaml'} --profile digits --seeds 2" in shown.text()
    first = job.trials[0]
    assert cells(shown, first.name, reproduce)[:2] == [first.key, known_results(job)[first.key].run_id]
    facts = shown.evaluate(f"document.querySelector('{reproduce} dl').innerText")
    assert first.data_digest in facts and "python 3" in facts and "torch " in facts and " CPUs (" in facts
    assert "Robustness" not in shown.text()


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
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
    ],
    ids=["convolutions", "depths", "relations"],
)
def test_the_best_of_each_kind_of_attention(
    rows: dict[str, dict[str, str]], chosen: list[str], write_grid: Callable[[str], Path], tmp_path: Path
) -> None:
    """Later cells are better here."""
    content = {"question": "q", "rows": [{"id": row, "model": model} for row, model in rows.items()]}
    job = open_job(write_grid(yaml.safe_dump(content)), "digits", (), tmp_path, seeds=2)
    finished = [(trial, Result("run", True, {"val/top1": 50.0 + place})) for place, trial in enumerate(job.trials)]
    assert [(trial.row, trial.seed) for trial in of_each_kind(finished)] == [(row, 1) for row in chosen]


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_two_classes(path: Path) -> None:
    found = Checkpoint.read(path)
    path.write_bytes(replace(found, origin=replace(found.origin, classes=("cat", "dog"))).as_bytes())


def of_a_field_of_later(path: Path) -> None:
    found = Checkpoint.read(path)
    path.write_bytes(replace(found, origin=replace(found.origin, record={**found.origin.record, "late": 1})).as_bytes())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Path.unlink, "epoch-0003-step-0000000.pt: cannot read this file (No such file or directory)"),
        (damaged, "epoch-0003-step-0000000.pt: not a file written by torch.save, or damaged"),
        (of_two_classes, "size mismatch"),
        (of_a_field_of_later, "late: "),
    ],
    ids=["gone", "damaged", "another network", "of another version"],
)
def test_a_cell_that_cannot_be_looked_at_is_a_sentence(
    change: Callable[[Path], None], told: str, write_grid: Callable[[str], Path], tmp_path: Path
) -> None:
    job = open_job(write_grid(GRID), "digits", (), tmp_path)
    trial = next(trial for trial in job.trials if trial.row == "patchwise_3")
    change(save_untrained(job, trial))
    (found,) = look_at_cells(job.workspace, [(trial, Result("run", True, {"val/top1": 95.0}))])
    assert isinstance(found.seen, str) and told in found.seen and "\n" not in found.seen


@given(st.integers(0, 2**32 - 1), st.sampled_from(["pairwise", "patchwise"]), st.integers(0, 5), st.integers(0, 5))
def test_tiles_are_of_the_weights(seed: int, kind: str, row: int, column: int) -> None:
    random = np.random.default_rng(seed)
    weight_GKn = random.normal(size=(3, 25, 1)).astype(np.float32)
    weight_GKn = weight_GKn if kind == "patchwise" else np.abs(weight_GKn)
    image = np.zeros((12, 12, 3), np.float32)
    seen = Attention("net", "a.png", "a 7", "layer", kind, 5, image, 2, ((row, column),), weight_GKn, 50.0, 50.0)
    drawn = re.findall(r'<div class="tile ">(.*?)</div>', tiles(seen, "name"))
    assert len(drawn) == 2 + 3  # mean, spread, channels
    limit = np.abs(weight_GKn).max()
    for picture, weight_K in zip(drawn[2:], weight_GKn[:, :, 0], strict=True):
        found = np.zeros((5, 5))
        for colour, opacity, path in re.findall(r'<path class="(\w+)" fill-opacity="(.*?)" d="(.*?)"/>', picture):
            for x, y, hole in re.findall(r"M(\d) (\d)h1v1h-1z(m\S+z)?", path):
                assert (colour == NEGATIVE) == bool(hole)
                found[int(y), int(x)] = -float(opacity) if hole else float(opacity)
        wanted = weight_K.reshape(5, 5) / limit
        wanted = wanted if kind == "patchwise" else np.sqrt(wanted)
        np.testing.assert_allclose(found, wanted, atol=0.5 / LEVELS + 0.001)
        inside = 2 <= row <= 3 and 2 <= column <= 3
        assert ('class="edge"' in picture) != inside


def test_the_best_rows_are_shown_of_many(
    write_grid: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sentence at curves, labels and commands."""
    monkeypatch.setattr(content, "MOST_ROWS", 3)
    rows = [{"id": f"row{number}", "model": {"name": "resnet26"}, "recipe": {"lr": 0.1 + number}} for number in range(6)]
    job = open_job(write_grid(yaml.safe_dump({"question": "q", "rows": rows})), "digits", (), tmp_path)
    tops = (50.0, 90.0, 70.0, None, 80.0, 60.0)
    results = {
        trial.key: Result("run", True, {"val/top1": top1, "val/top5": 99.0})
        for trial, top1 in zip(job.trials, tops, strict=True)
        if top1
    }
    lines = table_of(job, results)
    kept = ["row1", "row2", "row4"]
    assert shown_rows(lines) == kept
    curves = {key: {metric: [(0, 1.0), (1, 2.0)] for metric in CURVES} for key in results}
    answer = Answer(job.grid, job.name, "", job.command, (), job.trials, results, lines, curves, "sqlite:///", (), ())
    text = page(answer)
    for what in ("labels, where there is room", "curves", "a command on this page"):
        assert f"Only the best 3 of the 6 rows, by top-1, have {what}." in text
    assert re.findall("<summary>(.*?)</summary>", text) == kept
    assert re.findall('<text class="label".*?>(.*?)</text>', text) == 2 * ["1", "2", "4"]
    assert "with the best top-1 have" not in page(replace(answer, lines=lines[:3]))


def test_what_the_tracker_has_of_robustness_is_shown(answered: Callable[..., Job], shown: Browser, tmp_path: Path) -> None:
    job = answered()
    run_id = known_results(job)[job.trials[0].key].run_id
    attacked = "robustness/pgd-epsilon8-step4-n2"
    values = {f"{attacked}/success": 12.5, "robustness/fog/top1": 60.0, "robustness/rotate90/top1": 40.0}
    job.tracker.client.log_batch(run_id, [Metric(name, value, 0, 0) for name, value in values.items()])
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.open((tmp_path / "page.html").as_uri())
    assert cells(shown, "resnet26_3", "section[aria-labelledby=robustness]") == [
        "40.0 \N{MINUS SIGN}50.0",
        "12.5",
        "60.0 \N{MINUS SIGN}30.0",
    ]
    assert cells(shown, "pairwise_3", "section[aria-labelledby=robustness]") == ["not measured"]
    heads = shown.evaluate("[...document.querySelectorAll('[aria-labelledby=robustness] thead th')].map(h => h.innerText)")
    assert heads == ["row", "cw90\ntop-1, %", "n2\nsuccess, %", "fog\ntop-1, %"]


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
def test_the_answer_of_a_protocol_is_its_table(
    protocol: ProtocolName,
    names: list[str],
    measured: dict[str, list[str]],
    missing: list[str],
    answered: Callable[..., Job],
    shown: Browser,
    tmp_path: Path,
) -> None:
    """Condition by condition; two of them are measured, of one of two seeds of one of two rows."""
    job = answered(grid=GRID_OF_PROTOCOL.format(protocol))
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


def test_two_seeds_are_shown_instead_of_an_interval(answered: Callable[..., Job], shown: Browser, tmp_path: Path) -> None:
    """Both seeds lose as much, at accuracies that differ."""
    job = answered(grid=GRID_OF_PROTOCOL.format("rotation"))
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
    told = shown.evaluate(
        "[...document.querySelectorAll('[aria-labelledby=accuracy-that-remains] svg.chart')].map(c => c.ariaLabel)"
    )
    assert told[0] == ("Top-1 under cw90 against top-1 on clean images, ours, digits. resnet: resnet26: 79.5 % of 89.5 %.")
    assert told[1].startswith(
        "Top-1 under cw90 against top-1 on clean images, paper, ImageNet. resnet: resnet26: 49.1 % of 73.6 %."
    )
    assert len(told) == 5  # ours under one condition, the paper's under four


def test_the_page_on_paper(answered: Callable[..., Job], shown: Browser, tmp_path: Path) -> None:
    """Black on white for a reader of dark pages too, and nothing is cut off."""
    job = answered()
    measured = {f"robustness/condition{number}/top1": 40.0 for number in range(14)}  # as many as rotation and attack have
    job.tracker.add(known_results(job)[job.trials[0].key].run_id, measured)
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.show(718, dark=True)  # of A4
    shown.open((tmp_path / "page.html").as_uri())
    cut = "[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth - b.clientWidth, b.scrollHeight - b.clientHeight])"
    assert max(wide for wide, _ in shown.evaluate(cut)) > 100
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    shown.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    try:
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert shown.evaluate(cut) == 3 * [[0, 0]]
        assert shown.evaluate("document.documentElement.scrollWidth") <= 718
    finally:
        shown.call("Emulation.setEmulatedMedia", media="")


def test_the_difference_is_to_trainings_as_the_papers(
    answered: Callable[..., Job], folder_of_1000_classes: Path, shown: Browser, tmp_path: Path
) -> None:
    job = answered(f"data.root={folder_of_1000_classes}", "recipe.epochs=100", profile="imagenet")
    write_page(job, known_results(job), tmp_path / "page.html")
    shown.open((tmp_path / "page.html").as_uri())
    assert cells(shown, "resnet26_3")[:3] == ["76.0", "90.5 (90.0, 91.0)", "+14.5"]
    assert "other images" not in shown.text()


def test_a_server_is_linked(answered: Callable[..., Job], tmp_path: Path) -> None:
    job = answered()
    results = known_results(job)
    asked = replace(job.workspace, tracking_uri="https://runs.example.org/")
    tracker = job.tracker
    path = tmp_path / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "tracker", property(lambda job: tracker))
        write_page(replace(job, workspace=asked), results, path)
    result = results[job.trials[0].key]
    place = f"https://runs.example.org/#/experiments/{result.experiment_id}/runs/{result.run_id}"
    assert f'<a href="{place}"><code>{result.run_id}</code></a>' in path.read_text()


def test_a_row_alone_is_the_same_cells(answered: Callable[..., Job], tmp_path: Path) -> None:
    job = answered("recipe.lr=0.05")
    for row in ("pairwise_5", "resnet26_3"):
        found = re.fullmatch(
            r"cat > (\S+) <<'END'\n(.*)END\n(.*)", row_alone(job.grid, row, job.trials, job.overrides), re.DOTALL
        )
        assert found is not None
        file, text, command = found.groups()
        assert command == f"san run {file} --profile digits recipe.lr=0.05"
        (tmp_path / file).write_text(text)
        alone = open_job(tmp_path / file, "digits", job.overrides, tmp_path / "runs")
        assert [trial.key for trial in alone.trials] == [trial.key for trial in job.trials if trial.row == row]
        assert alone.grid.question == QUESTION


def test_a_row_alone_is_measured_too(tmp_path: Path) -> None:
    (tmp_path / "turned.yaml").write_text("{question: q, robustness: rotation, rows: [{id: one, model: {name: resnet26}}]}")
    job = open_job(tmp_path / "turned.yaml", "digits", (), tmp_path / "runs")
    text = row_alone(job.grid, "one", job.trials, ()).partition("<<'END'\n")[2].partition("END\n")[0]
    (tmp_path / "one.yaml").write_text(text)
    assert open_job(tmp_path / "one.yaml", "digits", (), tmp_path / "runs").grid.robustness == "rotation"


def test_the_page_lies_with_the_parent_run(answered: Callable[..., Job], tmp_path: Path) -> None:
    job = answered()
    files, complete = show(job, known_results(job))
    job.tracker.log_report(files, complete)
    experiment = job.tracker.client.get_experiment_by_name("asked")
    assert experiment is not None
    (parent,) = job.tracker.client.search_runs([experiment.experiment_id], "tags.`san.role` = 'grid'")
    kept = {artifact.path for artifact in job.tracker.client.list_artifacts(parent.info.run_id)}
    assert kept == {"table.md", "table.csv", "plot.png", "report.html"}


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        (["san10_pairwise", "san15_pairwise", "san19_pairwise"], ["10", "15", "19"]),
        (["pairwise_3", "pairwise_11"], ["3", "11"]),
        (["pairwise_phi_eq_psi", "pairwise_distinct"], ["phi_eq_psi", "distinct"]),
        (["resnet26"], ["resnet26"]),
        (["a", "a_b"], ["a", "b"]),
    ],
)
def test_short_names_tell_rows_apart(ids: list[str], short: list[str]) -> None:
    assert list(short_names(ids).values()) == short


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_round_and_lie_within(low: float, room: float) -> None:
    ticks = round_ticks(low, low + room)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-6 * room <= tick <= low + room + 1e-6 * room for tick in ticks)
    steps = {round((b - a) / 10 ** math.floor(math.log10(b - a) + 1e-6), 3) for a, b in pairwise(ticks)}
    assert len(steps) <= 1 and steps <= {1.0, 2.0, 2.5, 5.0}


ROWS = [("row_a", "top-1, %"), (r"50 % & $x$ {#1} \a ~ ^", "97.2 ± 0.4")]


def test_latex_escapes() -> None:
    text = latex(ROWS).splitlines()
    assert text[1:4] == [r"\begin{tabular}{lr}", r"\toprule", r"row\_a & top-1, \% \\"]
    hard = r"50 \% \& \$x\$ \{\#1\} \textbackslash{}a \textasciitilde{} \textasciicircum{} & 97.2 $\pm$ 0.4 \\"
    assert text[5:] == [hard, r"\bottomrule", r"\end{tabular}"]


def test_latex_has_minus_and_dash_and_breaks_long_cells() -> None:
    told = "stopped at epoch 6 of 18 by early stopping"
    text = latex([("row", "difference", "drop", "note"), ("a-1", "-1.5", "-", told)]).splitlines()
    assert text[1] == r"\begin{tabular}{lrrp{4cm}}"
    assert text[5] == rf"a-1 & $-$1.5 & -- & {told} \\"


def test_latex_tells_once_what_paper_and_ours_are_of() -> None:
    heading = ("row", "top-1 paper", "top-1 ours", "seeds", "top-5 ours")
    text = latex([heading, ("a", "1", "2", "3", "4")]).splitlines()
    assert text[3:6] == [
        r" & \multicolumn{2}{c}{top-1} &  & \multicolumn{1}{c}{top-5} \\",
        r"\cmidrule(lr){2-3}\cmidrule(lr){5-5}",
        r"row & paper & ours & seeds & ours \\",
    ]
    assert latex([("row", "top-1 ours"), ("a", "2")]).splitlines()[3] == r"row & top-1 ours \\"


@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["C", "Z"])), min_size=3, max_size=3), min_size=1))
def test_latex_is_balanced(rows: list[list[str]]) -> None:
    """As many columns in each row as are declared, and every brace closed, whatever is in a cell."""
    body = latex(rows).splitlines()[3:-2]
    assert len(body) == len(rows) + 1 and body.pop(1) == r"\midrule"
    for line in body:
        bare = re.sub(r"\\text\w+\{\}|\\[&%$#_{}]", "", line.removesuffix(r" \\"))
        assert bare.count("&") == 2
        assert not set(bare.replace(r"$\pm$", "").replace("$-$", "")) & set(r"\%$#_{}~^")


def test_latex_compiles(tmp_path: Path) -> None:
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("LaTeX is missing: no pdflatex on PATH (Debian's package texlive-latex-recommended)")
    told = "seed 0 stopped at epoch 6 of 18 by early stopping"
    paired = [("row", "top-1 paper", "top-1 ours", "difference", "note"), ("a", "75.1", "75.0 ± 0.1", "-0.1", told)]
    tables = f"{latex(ROWS)}\n\n{latex(paired)}"
    body = "\n".join([r"\documentclass{article}\usepackage{booktabs}\begin{document}", tables, r"\end{document}"])
    (tmp_path / "table.tex").write_text(body)
    subprocess.run([program, "-halt-on-error", "table.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_rejects_what_cannot_be_reported(
    answered: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered()
    asked = ["san", "report", str(tmp_path / "asked.yaml"), "--runs", str(tmp_path / "runs")]

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [*asked, *arguments])
        with pytest.raises(SystemExit, match="2"):
            main()
        out, err = capsys.readouterr()
        assert out == ""
        return err

    nowhere = tmp_path / "nowhere" / "page.html"
    assert f"san: {nowhere}: cannot write the page (No such file or directory); choose another file" in said(
        "--html", str(nowhere)
    )
    assert "(Is a directory); choose another file" in said("--html", str(tmp_path))
    for form in (["--format", "latex"], ["--html", str(tmp_path / "page.html")]):
        err = said("recipe.lr=0.01", *form)
        assert "san: no finished cell of grid asked with profile digits in sqlite:///" in err
        assert "train the grid with `san run " in err and f"recipe.lr=0.01 --runs {tmp_path / 'runs'}`, or choose" in err
    assert not (tmp_path / "page.html").exists()
    assert "'word' is not one of 'text', 'markdown', 'latex', 'csv'" in said("--format", "word")
    assert "two output formats: `--json` and `--format csv`; give only one of these options" in said(
        "--format", "csv", "--json"
    )


@pytest.mark.parametrize(
    ("form", "start"),
    [("markdown", "| row | top-1 paper |"), ("latex", "% needs"), ("csv", "id,paper_top1,top1")],
)
def test_the_table_in_every_form(
    form: str,
    start: str,
    answered: Callable[..., Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answered()
    asked = ["san", "report", str(tmp_path / "asked.yaml"), "--seeds", "2", "--runs", str(tmp_path / "runs"), "--format", form]
    monkeypatch.setattr(sys, "argv", asked)
    main()
    out = capsys.readouterr().out
    assert out.startswith(start)
    assert "pairwise" in out
    assert not (tmp_path / "runs" / "asked-digits").exists()
