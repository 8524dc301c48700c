"""`san ui`: where it serves, what it tells, and what MLflow's pages show of a grid that `san run` has trained."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from experiments.cli import main
from experiments.cli.run import run
from experiments.grids.config import PROJECT_DIR
from experiments.training.job import Job, open_job
from tests.browser import Browser, browser
from tests.experiments.drivers import LEFT_OUT, Driver
from tests.experiments.servers import free_port

GRID = """
question: Does attention beat convolution on digits?
table: footprint
plot: {x: model.footprint, series: model.name, label: "side of the footprint, pixels"}
base: {recipe: {epochs: 2, batch_size: 60}, data: {train_per_class: 30}}
rows:
  - {id: resnet26_3, model: {name: resnet26, footprint: 3}}
  - {id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two small cells that `san run` has trained, and another grid that only has them."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "asked.yaml").write_text(GRID)
    driver = Driver(folder / "asked.yaml", folder / "runs", ())
    assert driver.finish() == 0, driver.said
    (folder / "again.yaml").write_text(GRID.replace("Does", "On what else does"))
    assert run(open_job(folder / "again.yaml", "digits", (), folder / "runs"), None)
    return open_job(folder / "asked.yaml", "digits", (), folder / "runs")


@dataclass(frozen=True)
class Served:
    """A `san ui` at work."""

    address: str
    said: tuple[str, ...]

    def page_of(self, grid: str) -> str:
        (page,) = (line.split()[1] for line in self.said if line.startswith(f"{grid} "))
        return page


@pytest.fixture(scope="module")
def served(finished: Job, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`san ui` on them, while somebody else has port 5000."""
    log = tmp_path_factory.mktemp("ui") / "ui.log"
    command = [sys.executable, "-m", "experiments", "ui", "--runs", str(finished.workspace.runs)]
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    with closing(taken(5000)), open(log, "w") as out:
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            limit = time.monotonic() + 90
            while (found := re.search(r"^(http://127\.0\.0\.1:\d+)  ", log.read_text(), re.MULTILINE)) is None or not answers(
                found[1]
            ):
                assert process.poll() is None and time.monotonic() < limit, log.read_text()
                time.sleep(0.2)
            yield Served(found[1], tuple(log.read_text().splitlines()))
        finally:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C
            assert process.wait(timeout=30) == 0
    assert "Traceback" not in log.read_text()
    assert not answers(found[1])


def taken(port: int) -> socket.socket:
    """A socket that listens at the port, or one that does nothing where another process has it already."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        assert port == 5000
    return listener


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture
def said(
    finished: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`san ui` on the trained cells, in this process: exit code, what it prints and what it complains of."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["san", "ui", "--runs", str(finished.workspace.runs), *arguments])
        try:
            main()
            code = 0
        except SystemExit as exit:
            code = int(str(exit.code))
        return code, *capsys.readouterr()

    return call


def test_takes_the_next_port_where_5000_is_taken(served: Served) -> None:
    port = int(served.address.rpartition(":")[2])
    assert 5000 < port < 5100
    assert served.said[0] == f"{served.address}  (starting; press Ctrl-C to stop)"
    assert served.page_of("asked").startswith(f"{served.address}/#/experiments/")


def test_rejects_a_port_that_is_taken(said: Callable[..., tuple[int, str, str]]) -> None:
    port = free_port()
    with closing(taken(port)):
        assert said("--port", str(port)) == (2, "", f"san: port {port} is in use; choose another with --port\n")


@pytest.mark.parametrize(("user", "how"), [(None, ""), ("ada", "; log in as ada")], ids=["without users", "with users"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_tells_the_pages_of_a_server_and_starts_none(
    user: str | None,
    how: str,
    slash: str,
    served: Served,
    said: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is the one of the other tests; one that does ask for passwords is in `test_server.py`."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.address + slash)
    if user is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    monkeypatch.setattr(subprocess, "run", None)
    code, out, err = said()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{served.address}{slash}  (the server in MLFLOW_TRACKING_URI{how})",
        f"again  {served.page_of('again')}",
        f"asked  {served.page_of('asked')}",
    ]


def test_rejects_a_port_for_a_server(
    served: Served, said: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.address)
    sentence = f"san: --port 5001: MLFLOW_TRACKING_URI already names a server, {served.address}; leave out --port\n"
    assert said("--port", "5001") == (2, "", sentence)


def test_rejects_a_server_that_is_away(said: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, out, err = said()
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"san: cannot use MLflow at {uri}: ")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


HEADINGS = """
[...document.querySelectorAll('.ag-header-cell')].filter(h => h.innerText.trim())
  .map(h => [h.getBoundingClientRect(), h.innerText.trim()]).filter(([box]) => box.right <= innerWidth)
  .sort(([a], [b]) => a.left - b.left).map(([_, text]) => text)
"""
LINES = """
[...document.querySelectorAll('.js-plotly-plot')].slice(0, 3)
  .map(chart => [...chart.querySelectorAll('.scatterlayer .trace')].map(line => line.querySelectorAll('.point').length))
"""


BOX_OF_FRAME = (
    "(({left, top, right, bottom}) => [left, top, right, bottom])(document.querySelector('iframe').getBoundingClientRect())"
)


def contrast(picture: Path, box: list[float]) -> int:
    """Between the lightest and the darkest grey there, of 255."""
    with Image.open(picture) as opened:
        darkest, lightest = opened.convert("L").crop([round(side) for side in box]).getextrema()
    return lightest - darkest


def press(page: Browser, component: str) -> None:
    page.wait_for(f"Boolean(document.querySelector('[data-component-id=\"{component}\"]'))")
    page.evaluate(f"document.querySelector('[data-component-id=\"{component}\"]').click()")


def column(page: Browser, name: str) -> list[str]:
    """What the table of runs shows in a column, from above."""
    cells = f"[...document.querySelectorAll('.ag-row [col-id=\"{name}\"]')]"
    return list(
        page.evaluate(
            f"{cells}.map(c => [c.getBoundingClientRect().top, c]).sort(([a], [b]) => a - b).map(([_, c]) => c.innerText)"
        )
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_mlflows_pages_in_a_browser(theme: str, finished: Job, served: Served, shown: Browser, tmp_path: Path) -> None:
    """Of a grid, its charts, a cell, and the grid's own run, at two widths; screenshots lie in the test's folder.

    As on a first visit, when MLflow looks which colours the reader prefers; its assistant, which opens by itself, is closed.
    """
    dark = theme == "dark"
    results = finished.tracker.results()
    best = {trial.row: results[trial.key].metrics["val/top1"] for trial in finished.trials}
    ranked = sorted(best, key=lambda row: -best[row])

    def pictures(name: str, there: str, in_frame: str = "") -> None:
        for width in (1280, 400):
            shown.show(width, dark)
            time.sleep(0.5)  # the page follows the window, and may ask for its parts again
            shown.wait_for(f"document.body.innerText.includes('{there}')")
            shown.wait_until(lambda: in_frame in shown.text_of_frame(), f"{in_frame} in a frame")
            time.sleep(0.3)
            path = tmp_path / f"mlflow-{name}-{width}-{theme}.png"
            shown.screenshot(path)
            assert there in shown.text()  # the picture is not of a page that loads anew
            if in_frame:
                assert contrast(path, shown.evaluate(BOX_OF_FRAME)) > 150  # of ink and ground; what is there before has 120
            asked = [address for address in shown.requests if not address.startswith((served.address, "blob:"))]
            assert asked == []  # nothing of any network

    shown.show(1280, dark)
    shown.open(f"{served.address}/version")
    shown.evaluate("localStorage.clear()")
    shown.open(served.page_of("asked"))
    shown.wait_for("document.body.innerText.includes('pairwise_3') && document.body.innerText.includes('Does attention')")
    press(shown, "mlflow.assistant.chat_panel.close")
    press(shown, "mlflow.experiment.metadata_editor.expand_button")
    shown.wait_for(f"({HEADINGS}).includes('val/loss')")
    headings = shown.evaluate(HEADINGS)
    assert headings[:8] == ["Run Name", "Created", "val/top1", "epoch", "val/top5", "model.name", "val/loss", "train/loss"]
    assert [name.split()[-1] for name in column(shown, "attributes.`Run Name`")] == [*ranked, "asked-digits"]
    assert [float(top1) for top1 in column(shown, "metrics.`val/top1`")[:2]] == [pytest.approx(best[row]) for row in ranked]
    table = "[...document.querySelectorAll('table')].find(t => t.innerText.includes('top-1 paper'))"
    shown.wait_for(f"Boolean({table})")
    row = f"[...{table}.rows].find(r => r.cells[0].innerText.trim() === 'pairwise_3')"
    assert shown.evaluate(f"[...{row}.cells].slice(1, 3).map(c => c.innerText.trim())") == ["75.3", f"{best['pairwise_3']:.1f}"]
    assert shown.evaluate(f"{table}.getBoundingClientRect().right <= innerWidth")
    ink = shown.evaluate("getComputedStyle(document.querySelector('.ag-cell')).color.match(/[0-9]+/g).slice(0, 3).map(Number)")
    assert (sum(ink) > 382) == dark
    press(shown, "mlflow_header.toggle_sidebar_button")
    pictures("experiment", "Group by")

    shown.show(1280, dark)
    shown.open(f"{served.page_of('asked')}&compareRunsMode=CHART")
    two_epochs = "l => l.filter(points => points === 2).length === 2"  # of either cell; the grid's own run has none
    shown.wait_for(f"({LINES}).length === 3 && ({LINES}).every({two_epochs})")
    assert re.search(r"val\s+\(3\)[\s\S]+train\s+\(\d\)[\s\S]+summary\s+\(7\)", shown.text())
    pictures("charts", "Group by")

    run = results[finished.trials[1].key]
    runs = f"{served.address}/#/experiments/{run.experiment_id}/runs"
    shown.show(1280, dark)
    shown.open(f"{runs}/{run.run_id}")
    shown.wait_for("document.body.innerText.includes('san.trial')")
    for wanted in ("pairwise_3", finished.trials[1].key, "san run asked", "asked-digits-pairwise_3", "digits (", "Finished"):
        assert wanted in shown.text()
    pictures("cell", "san.trial")

    (parent,) = finished.tracker.client.search_runs([run.experiment_id], "tags.`san.role` = 'grid'")
    shown.show(1280, dark)
    shown.open(f"{runs}/{parent.info.run_id}/artifacts/report.html")
    shown.wait_for("document.querySelector('iframe')?.getBoundingClientRect().height > 100")
    assert {"plot.png", "report.html", "table.csv", "table.md"} <= set(shown.text().split())
    pictures("report", "table.csv", "Does attention beat convolution on digits?")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_mlflows_page_leads_to_cells_that_another_grid_has_trained(
    theme: str, finished: Job, served: Served, shown: Browser, tmp_path: Path
) -> None:
    """By a link in the one line of the description that is seen at first; a screenshot lies in the test's folder."""
    shown.show(1280, theme == "dark")
    shown.open(f"{served.address}/version")
    shown.evaluate("localStorage.clear()")
    shown.open(served.page_of("again"))
    link = "[...document.querySelectorAll('a')].find(a => a.innerText === 'asked' && a.hash.includes('/runs?'))"
    shown.wait_for(f"Boolean({link}) && document.body.innerText.includes('again-digits')")
    assert "Cells: 2 of 2 in asked." in shown.text()
    assert "pairwise_3" not in column(shown, "attributes.`Run Name`")
    press(shown, "mlflow.assistant.chat_panel.close")
    middle = f"(b => [(b.left + b.right) / 2, (b.top + b.bottom) / 2])({link}.getBoundingClientRect())"
    shown.wait_for(f"document.elementFromPoint(...{middle}) === {link}")
    shown.screenshot(tmp_path / f"mlflow-elsewhere-1280-{theme}.png")
    shown.open(shown.evaluate(f"{link}.href"))  # as MLflow does on a click, in a new tab
    shown.wait_for("document.body.innerText.includes('asked-digits') && document.body.innerText.includes('pairwise_3')")
    shown.wait_for(f"({HEADINGS})[2] === 'val/top1'")
