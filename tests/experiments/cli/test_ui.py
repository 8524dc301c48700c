"""`san ui`: its port and address, and the pages of a grid in MLflow."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.cli.run import run
from experiments.grids.config import PROJECT_DIR
from experiments.runner.job import Job, open_job
from tests.browser import browser
from tests.experiments.conftest import San
from tests.experiments.drivers import LEFT_OUT, PATIENCE
from tests.experiments.samples import finish_trial
from tests.experiments.servers import free_port

pytestmark = pytest.mark.slow  # starts servers

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
def finished(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Job:
    """A finished grid of two trials, and another grid with the same trials, each with its page in MLflow."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "runs").mkdir()
    shutil.copy(empty_database, folder / "runs" / "mlflow.db")
    (folder / "first.yaml").write_text(GRID)
    (folder / "again.yaml").write_text(GRID.replace("Does", "On which other data does"))
    first, again = (open_job(folder / f"{name}.yaml", "digits", (), folder / "runs") for name in ("first", "again"))
    first.tracker.prepare(first.grid, folder / "runs" / "artifacts")
    for number, trial in enumerate(first.trials):
        finish_trial(first, trial, 90.0 + number)
    assert run(first, None) and run(again, None)
    return first


@dataclass(frozen=True)
class Server:
    """A running `san ui`."""

    address: str
    output: tuple[str, ...]

    def page_address(self, grid: str) -> str:
        (page,) = (line.split()[1] for line in self.output if line.startswith(f"{grid} "))
        return page


@pytest.fixture(scope="module")
def server(finished: Job, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`san ui` while another program uses port 5000."""
    log = tmp_path_factory.mktemp("ui") / "ui.log"
    command = [sys.executable, "-m", "experiments", "ui", "--runs", str(finished.workspace.runs)]
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    with closing(occupied(5000)), open(log, "w") as out:
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            limit = time.monotonic() + PATIENCE
            while (found := re.search(r"^(http://127\.0\.0\.1:\d+)  ", log.read_text(), re.MULTILINE)) is None or not responds(
                found[1]
            ):
                assert process.poll() is None and time.monotonic() < limit, log.read_text()
                time.sleep(0.2)
            yield Server(found[1], tuple(log.read_text().splitlines()))
        finally:
            os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C in a terminal
            assert process.wait(timeout=PATIENCE) == 0
    assert "Traceback" not in log.read_text()
    assert not responds(found[1])


def occupied(port: int) -> socket.socket:
    """A socket that listens on the port, unless another process uses it already."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        assert port == 5000
    return listener


def responds(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture
def run_ui(finished: Job, run_san: San) -> San:
    """Runs `san ui` in this process."""
    return functools.partial(run_san, "ui", "--runs", finished.workspace.runs)


def test_uses_the_next_port_if_5000_is_in_use(server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    assert 5000 < port < 5100
    assert server.output[0] == f"{server.address}  (starting; press Ctrl-C to stop)"
    assert server.page_address("first").startswith(f"{server.address}/#/experiments/")


def test_rejects_a_port_that_is_in_use(run_ui: San) -> None:
    port = free_port()
    with closing(occupied(port)):
        assert run_ui("--port", str(port)) == (2, "", f"san: port {port} is in use; choose another with --port\n")


@pytest.mark.parametrize(("user", "hint"), [(None, ""), ("ada", "; log in as ada")], ids=["without users", "with users"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_prints_the_pages_of_the_configured_server(
    user: str | None,
    hint: str,
    slash: str,
    server: Server,
    run_ui: San,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`test_server.py` has a server that checks passwords."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address + slash)
    if user is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    monkeypatch.setattr(subprocess, "run", None)
    code, out, err = run_ui()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{server.address}{slash}  (the server in MLFLOW_TRACKING_URI{hint})",
        f"again  {server.page_address('again')}",
        f"first  {server.page_address('first')}",
    ]


def test_rejects_a_port_together_with_a_tracking_server(server: Server, run_ui: San, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    sentence = f"san: --port 5001: MLFLOW_TRACKING_URI already names a server, {server.address}; leave out --port\n"
    assert run_ui("--port", "5001") == (2, "", sentence)


def test_reports_a_server_that_cannot_be_reached(run_ui: San, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, out, err = run_ui()
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"san: cannot use MLflow at {uri}: ")


def test_mlflows_page_links_to_the_grid_that_trained_the_trials(finished: Job, server: Server, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.show(1280, dark=False)
        page.open(server.page_address("again"))
        link = "[...document.querySelectorAll('a')].find(a => a.innerText === 'first' && a.hash.includes('/runs?'))"
        page.wait_for(f"Boolean({link}) && document.body.innerText.includes('again-digits')")
        assert "Trials: 2 of 2 in first." in page.text()
        page.open(page.evaluate(f"{link}.href"))
        page.wait_for("document.body.innerText.includes('first-digits') && document.body.innerText.includes('pairwise_3')")
        foreign = [address for address in page.requests if not address.startswith((server.address, "blob:"))]
        assert foreign == []  # works without a network
