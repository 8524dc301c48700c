"""`san submit` with a real head that requires a token, and its error messages."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from cluster import ClusterError
from cluster.submit import JobServer
from experiments.config.config import PROJECT_DIR
from experiments.runs.provenance import git_commit
from tests.cluster.heads import RayHead, ray_head
from tests.cluster.processes import MARK, marked, wait_until_gone
from tests.cluster.test_join import run_script
from tests.experiments.cli.test_submit import GRID, ODD_NAME
from tests.experiments.drivers import LEFT_OUT, PATIENCE, clean_environment, wait_until

TOKEN = secrets.token_hex(32)
WITH_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    """A head that requires `TOKEN`."""
    # Without RAY_LOGGER_LEVEL, Ray writes the environment of jobs to a log of the node.
    environment = WITH_TOKEN | {"RAY_LOGGER_LEVEL": "warning"}
    with ray_head("--num-cpus=2", "--dashboard-host=127.0.0.1", environment=environment) as started:
        yield started


def of_user(head: RayHead) -> dict[str, str]:
    """The environment of a user with the token."""
    return clean_environment() | WITH_TOKEN | {"RAY_API_SERVER_ADDRESS": head.job_server, "PYTHONPATH": str(PROJECT_DIR)}


San = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def san(head: RayHead, tmp_path: Path) -> San:
    """Runs `san` in a process, outside of the project's folder, with the token and other variables."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "experiments", *arguments]
        environment = of_user(head) | variables
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)

    return call


def read(database: Path, question: str) -> list[str]:
    """The first column of a query to MLflow's database; nothing before MLflow has created its tables."""
    with sqlite3.connect(database) as store, suppress(sqlite3.OperationalError):
        return [value for (value, *_) in store.execute(question)]
    return []


STATES = "SELECT status FROM runs JOIN tags USING (run_uuid) WHERE key = 'san.role' AND value = 'trial'"
COMMITS = "SELECT value FROM tags WHERE key = 'san.git_commit'"
WITNESS = """
# Every process that trains imports this file: it writes what it finds where the secret must be, and where it must not be.
import hashlib, json, os
from pathlib import Path

secret, found = os.environ["MLFLOW_TRACKING_PASSWORD"], {}
for file in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        found[file.parent.name] = file.read_bytes().replace(bytes(1), b" ").decode()
    except OSError:  # the process has ended
        continue
own, commands = found[str(os.getpid())], [command for command in found.values() if secret in command]
record = {"process": own, "digest": hashlib.sha256(secret.encode()).hexdigest(), "commands": commands}
Path("FOLDER", f"witness-{os.getpid()}.json").write_text(json.dumps(record))
"""


def holds(path: Path, secret: str) -> bool:
    with suppress(FileNotFoundError):  # it was deleted in the meantime
        return secret.encode() in path.read_bytes()
    return False


@pytest.mark.slow
def test_submits_a_grid_and_keeps_secrets(head: RayHead, san: San, tmp_path: Path) -> None:
    secret, runs, seen = secrets.token_hex(16), tmp_path / "runs", tmp_path / "seen"
    seen.mkdir()
    (tmp_path / ODD_NAME).write_text(GRID + "imports: [witness.py]\n")
    (tmp_path / "witness.py").write_text(WITNESS.replace("FOLDER", str(seen)))
    arguments = ["submit", ODD_NAME, "--runs", str(runs), "--env", "MLFLOW_TRACKING_PASSWORD", "recipe.epochs=1"]
    first = san(*arguments, MLFLOW_TRACKING_PASSWORD=secret)
    output = first.stdout + first.stderr
    assert first.returncode == 0, output
    assert "1 trial, 1 to train" in output and "ray job stop it-s-touch-gotcha-x-y-digits-" in output
    records = [json.loads(path.read_text()) for path in seen.iterdir()]
    assert {record["digest"] for record in records} == {hashlib.sha256(secret.encode()).hexdigest()}
    assert any("ImplicitFunc" in record["process"] for record in records), "no trial's process has the variable"
    # Ray itself passes the environment of the job as an argument of the process that sets up a worker.
    commands = [command for record in records for command in record["commands"] if "setup_worker.py" not in command]
    assert commands == [] and secret not in output
    files = [path for folder in (runs, seen, head.folder) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if holds(path, secret)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ODD_NAME, "runs", "seen", "witness.py"])

    again = san(*arguments, MLFLOW_TRACKING_PASSWORD=secret)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 trial, 1 already finished, 0 to train" in again.stdout
    assert read(runs / "mlflow.db", STATES) == ["FINISHED"]
    assert set(read(runs / "mlflow.db", COMMITS)) == {git_commit()}, "the commit of the job's copy of the project"
    client = JobSubmissionClient(head.job_server, headers={"Authorization": f"Bearer {TOKEN}"})
    jobs = [job for job in client.list_jobs() if (job.submission_id or "").startswith("it-s")]
    # The name of the uploaded folder depends on its content, so Ray uploads it only once.
    assert len(jobs) == 2 and len({(job.runtime_env or {})["working_dir"] for job in jobs}) == 1
    assert all(TOKEN not in job.model_dump_json() for job in jobs)


@pytest.mark.slow
def test_ray_job_stop_ends_the_trials(head: RayHead, san: San, tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(GRID)
    runs = tmp_path / "runs"
    arguments = ("submit", "long.yaml", "--runs", str(runs), "--no-wait", "--env", MARK, "recipe.epochs=1000")
    first = san(*arguments, **{MARK: str(tmp_path)})
    assert first.returncode == 0, first.stderr
    (stop,) = re.findall("ray job stop .*", first.stderr)
    assert stop == f"ray job stop {first.stdout.strip()} --address {head.job_server}"

    wait_until(lambda: (runs / "mlflow.db").exists() and read(runs / "mlflow.db", STATES) == ["RUNNING"])
    assert marked(str(tmp_path))

    ray = [sys.executable, "-m", "ray.scripts.scripts", *stop.split()[1:]]
    stopped = subprocess.run(ray, env=of_user(head), capture_output=True, text=True, timeout=PATIENCE)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_until_gone(str(tmp_path))
    assert read(runs / "mlflow.db", STATES) == ["KILLED"]


@pytest.mark.slow
def test_exit_code_is_that_of_the_job(san: San, tmp_path: Path) -> None:
    (tmp_path / "lost.yaml").write_text(GRID)
    done = san("submit", "lost.yaml", "--runs", str(tmp_path / "runs"), "data.source=folder", "data.root=/nowhere")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "/nowhere" in done.stdout and "exited with code 2" in done.stderr


JOIN = """
import sys
from cluster import ClusterError
from cluster.session import session
try:
    with session(*sys.argv[1:]) as resources:
        print(repr(resources))
except ClusterError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_cluster_needs_the_token(head: RayHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in LEFT_OUT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClusterError, match="rejected the token or requires one"):
        JobServer(head.job_server)
    without = {"HOME": str(tmp_path), "PYTHONPATH": str(PROJECT_DIR)}
    assert run_script(JOIN, head.address, **without).startswith(f"refused: cannot join a Ray cluster at '{head.address}'")
    assert run_script(JOIN, head.address, **without, **WITH_TOKEN).startswith("Resources(")


@pytest.mark.parametrize(
    ("address", "variables", "message"),
    [
        (None, {}, "no address of a job server; give --address"),
        (None, {"RAY_ADDRESS": "head:6379"}, "'head:6379' is not the address of a job server"),
        (None, {"RAY_ADDRESS": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
        ("http://127.0.0.1:9", {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:10"}, "http://127.0.0.1:9 does not answer"),
    ],
)
def test_explains_a_wrong_address(
    address: str | None, variables: Mapping[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LEFT_OUT:
        monkeypatch.setenv(name, variables.get(name, ""))
    with pytest.raises(ClusterError) as caught:
        JobServer(address)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("answer", [None, b"<html>", b"[]", b'{"major": "1"}'])
def test_explains_a_server_that_is_no_job_server(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer is None:
                ended.wait()
            else:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

    for name in LEFT_OUT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("cluster.submit.SECONDS_TO_ANSWER", PATIENCE if answer else 0.1)
    ended = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(ClusterError, match="does not answer like a job server"):
                JobServer(f"http://127.0.0.1:{server.server_port}")
        finally:
            ended.set()
            server.shutdown()
