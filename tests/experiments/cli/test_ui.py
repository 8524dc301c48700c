"""`san ui`: its port and address, and the pages of grids in MLflow."""

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
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from experiments.grids.config import PROJECT_DIR
from experiments.runner.job import Job
from tests.experiments.conftest import San
from tests.experiments.drivers import LEFT_OUT, PATIENCE
from tests.experiments.samples import finish_trial
from tests.experiments.servers import free_port


def occupied(port: int) -> socket.socket:
    """A socket that listens on the port, unless another process uses it already."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(OSError):
        listener.bind(("127.0.0.1", port))
        listener.listen()
    return listener


def responds(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def running(runs: Path, log: Path) -> Iterator[list[str]]:
    """The output of a running `san ui`, which Ctrl-C ends."""
    command = [sys.executable, "-m", "experiments", "ui", "--runs", str(runs)]
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        limit = time.monotonic() + PATIENCE
        while not (found := re.match(r"http://127\.0\.0\.1:\d+", log.read_text())) or not responds(found[0]):
            assert process.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.2)
        yield log.read_text().splitlines()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 0
    assert "Traceback" not in log.read_text() and not responds(found[0])


@pytest.mark.slow
def test_prints_the_pages_of_its_own_server_and_of_a_configured_one(
    open_small_job: Callable[..., Job], tmp_path: Path, run_san: San, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own server takes the next port if 5000 is in use. `test_server.py` has a server that checks passwords."""
    job = open_small_job()
    finish_trial(job, job.trials[0], 90.0)
    with closing(occupied(5000)), running(job.workspace.runs, tmp_path / "ui.log") as output:
        address = output[0].split()[0]
        assert 5000 < int(address.rpartition(":")[2]) < 5100
        (page,) = (line.split()[1] for line in output if line.startswith("small "))
        assert page.startswith(f"{address}/#/experiments/")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
        for uri in (address, f"{address}/"):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            code, out, err = run_san("ui")
            assert (code, err) == (0, "")
            first, second = out.splitlines()
            assert first.startswith(f"{uri}  ") and "ada" in first and "s3cret" not in out
            assert second.split() == ["small", page]
        code, _, err = run_san("ui", "--port", "5001")
        assert code == 2 and "--port 5001" in err and "MLFLOW_TRACKING_URI" in err


def test_rejects_a_port_in_use_and_a_server_without_answer(runs: Path, run_san: San, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with closing(occupied(port)):
        code, out, err = run_san("ui", "--port", port, "--runs", runs)
    assert (code, out) == (2, "") and f"port {port} is in use" in err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    code, out, err = run_san("ui")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"san: cannot use MLflow at http://127.0.0.1:{port}: ")
