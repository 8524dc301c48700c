"""`san submit` with a real head that requires a token, and its error messages."""

from __future__ import annotations

import json
import re
import secrets
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from ray.job_submission import JobSubmissionClient

from cluster import ClusterError
from cluster.submit import JobServer, UnreachableError
from cuda_ext import build
from experiments.cli import submit
from experiments.errors import UserError
from experiments.grids.config import PROJECT_DIR
from experiments.runs.provenance import git_commit
from tests.cluster.heads import RAY, RAY_VARIABLES, clean_environment, ray_head
from tests.cluster.test_join import JOIN
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import PATIENCE
from tests.experiments.servers import free_port

GRID = """\
question: Does it run?
rows:
  - {id: only, model: {name: san10_pairwise, footprint: 3}, recipe: {batch_size: 128}}
"""
ODD_NAME = 'it\'s; $(touch gotcha) "x" -- `y`.yaml'


@dataclass(frozen=True)
class Head:
    """A Ray head: addresses of its job server and of its GCS, its token, and its folder."""

    address: str
    gcs: str
    token: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user with the token and without RAY_AUTH_MODE."""
        return clean_environment() | {
            "RAY_API_SERVER_ADDRESS": self.address,
            "RAY_AUTH_TOKEN": self.token,
            "PYTHONPATH": str(PROJECT_DIR),
        }


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A Ray head with a dashboard and token authentication."""
    token = secrets.token_hex(32)
    port, dashboard, agent = (free_port() for _ in range(3))
    options = ["--num-cpus=2", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    # Without RAY_LOGGER_LEVEL, Ray writes the environment of jobs to a log of the node.
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_LOGGER_LEVEL": "warning"}
    with ray_head(port, *options, f"--dashboard-agent-listen-port={agent}", environment=environment) as folder:
        wait_until(lambda: http_status(f"http://127.0.0.1:{dashboard}/api/version") != 0)
        yield Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", token, folder)


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)


def http_status(url: str, **headers: str) -> int:
    """The HTTP status of a response; 0 if there is none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture
def server(head: Head, monkeypatch: pytest.MonkeyPatch) -> JobServer:
    for name in RAY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)
    return JobServer(head.address)


San = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def san(head: Head, tmp_path: Path) -> San:
    """Runs `san` in a process, outside of the project's folder."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "experiments", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=head.environment, capture_output=True, text=True, timeout=PATIENCE)

    return call


def runs_of(database: Path) -> list[str]:
    """Status of each trial's run in a database."""
    with sqlite3.connect(database) as store:
        question = "SELECT status FROM runs JOIN tags USING (run_uuid) WHERE key = 'san.role' AND value = 'trial'"
        return [status for (status,) in store.execute(question)]


def commits_of(database: Path) -> set[str]:
    """The commits in the tags of the runs."""
    with sqlite3.connect(database) as store:
        return {commit for (commit,) in store.execute("SELECT value FROM tags WHERE key = 'san.git_commit'")}


def holders(secret: str, file: str) -> set[str]:
    """Names of processes with a secret in one of their files in /proc."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if secret.encode() in (folder / file).read_bytes():
                found.add((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


@pytest.mark.slow
def test_submits_a_grid_and_keeps_secrets(head: Head, san: San, tmp_path: Path) -> None:
    (tmp_path / ODD_NAME).write_text(GRID)
    secret = secrets.token_hex(16)
    arguments = [ODD_NAME, "--runs", str(tmp_path / "runs"), "recipe.epochs=1", "--env", "MLFLOW_TRACKING_PASSWORD"]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments", "submit", *arguments],
        cwd=tmp_path,
        env=head.environment | {"MLFLOW_TRACKING_PASSWORD": secret},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    environments: set[str] = set()
    commands: set[str] = set()
    while process.poll() is None:
        environments |= holders(secret, "environ")
        commands |= holders(secret, "cmdline")
        time.sleep(0.5)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.returncode == 0, output
    assert "1 cells, 1 to train" in output and "ray job stop it-s-touch-gotcha-x-y-digits-" in output
    assert re.search(r"\nonly +\d+\.\d", output)
    assert any("ImplicitFunc" in name for name in environments), f"no cell's process has the variable, only {environments}"
    # Ray itself passes the environment of the job as an argument of the process that sets up a worker.
    assert [command for command in commands if "setup_worker.py" not in command] == [] and secret not in output
    leaks = [
        path for path in (*(tmp_path / "runs").rglob("*"), *head.folder.rglob("*")) if path.is_file() and holds(path, secret)
    ]
    assert leaks == []
    assert "building the" not in "".join(path.read_text() for path in (tmp_path / "runs" / "logs").rglob("*") if path.is_file())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ODD_NAME, "runs"])

    second_run = san("submit", *arguments[:-2])
    assert second_run.returncode == 0, second_run.stdout + second_run.stderr
    assert "1 cells, 1 already finished, 0 to train" in second_run.stdout
    assert runs_of(tmp_path / "runs" / "mlflow.db") == ["FINISHED"]
    assert commits_of(tmp_path / "runs" / "mlflow.db") == {git_commit()}, "the commit of the job's copy of the project"
    client = JobSubmissionClient(head.address, headers={"Authorization": f"Bearer {head.token}"})
    first, second = [job for job in client.list_jobs() if (job.submission_id or "").startswith("it-s")]
    assert first.runtime_env and second.runtime_env
    # The name depends on the content, so Ray uploads the folder only once.
    assert first.runtime_env["working_dir"] == second.runtime_env["working_dir"]
    assert all(head.token not in job.model_dump_json() for job in (first, second))


def holds(path: Path, secret: str) -> bool:
    with suppress(FileNotFoundError):  # it was deleted in the meantime
        return secret.encode() in path.read_bytes()
    return False


@pytest.mark.slow
def test_ray_job_stop_ends_the_cells(head: Head, san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.yaml").write_text(GRID)
    runs = tmp_path / "runs"
    arguments = ("submit", "long.yaml", "--runs", str(runs), "recipe.epochs=1000")
    mark = f"CELLS_MARK={tmp_path}"
    monkeypatch.setenv("CELLS_MARK", str(tmp_path))
    first = san(*arguments, "--no-wait", "--env", "CELLS_MARK")
    assert first.returncode == 0, first.stderr
    job = first.stdout.strip()
    hints = re.findall("ray job .*", first.stderr)
    assert hints == [f"ray job {what} {job} --address {head.address}" for what in ("logs --follow", "stop")]

    wait_until(lambda: (runs / "mlflow.db").exists() and runs_of(runs / "mlflow.db") == ["RUNNING"])
    assert any("ImplicitFunc" in name for name in holders(mark, "environ"))
    second = san(*arguments)
    assert second.returncode == 2 and "another `san run` is training this grid" in second.stdout

    environment = head.environment | {"RAY_AUTH_MODE": "token"}
    ray = [sys.executable, "-m", "ray.scripts.scripts", *hints[1].split()[1:]]
    stopped = subprocess.run(ray, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_until(lambda: not holders(mark, "environ"))
    assert runs_of(runs / "mlflow.db") == ["KILLED"]


@pytest.mark.slow
def test_ray_job_submit_runs_a_grid(head: Head, tmp_path: Path) -> None:
    """The command of docs/guides/cluster.md."""
    runtime_env = json.dumps({"env_vars": {"SAN_RUNS": str(tmp_path / "runs")}})
    command = [
        RAY,
        *"job submit --working-dir . --runtime-env-json".split(),
        runtime_env,
        *"-- python -m experiments run".split(),
    ]
    command += [str(SMALL_GRID.relative_to(PROJECT_DIR)), "recipe.epochs=1", "recipe.batch_size=128"]
    environment = head.environment | {"RAY_AUTH_MODE": "token"}
    outputs: list[subprocess.CompletedProcess[str]] = []

    def submitted() -> bool:  # a head that has just started asks to try again later
        done = subprocess.run(command, cwd=PROJECT_DIR, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        outputs.append(done)
        return "try again later" not in outputs[-1].stderr

    wait_until(submitted)
    assert outputs[-1].returncode == 0, outputs[-1].stdout[-4000:] + outputs[-1].stderr[-2000:]
    assert re.search(r"patchwise_3 +77\.4 +\d+\.\d", outputs[-1].stdout)
    assert runs_of(tmp_path / "runs" / "mlflow.db") == ["FINISHED"] * 3


@pytest.mark.slow
def test_exit_code_is_1_if_the_grid_fails(san: San, tmp_path: Path) -> None:
    (tmp_path / "wild.yaml").write_text(GRID)
    done = san("submit", "wild.yaml", "--runs", str(tmp_path / "runs"), "recipe.epochs=1", "recipe.lr=1e30")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not finished: only; to resume, run `" in done.stdout
    assert "failed: the command exited with code 1" in done.stderr


@contextmanager
def proxy(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A port that forwards to another port, and a function that cuts all of its connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        target.close()

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    def cut() -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], cut
    listener.close()
    cut()


@pytest.mark.slow
def test_follows_a_log_to_its_end_after_a_lost_connection(head: Head, server: JobServer, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    code = "import time\nfor i in range(12):\n    print(f'line {i}', flush=True)\n    time.sleep(0.5)\nraise SystemExit(2)"
    server.submit("counting", ["python", "-c", code], tmp_path / "work", {})
    with proxy(int(head.address.rpartition(":")[2])) as (port, cut):
        pieces: list[str] = []

        def receive(piece: str) -> None:
            pieces.append(piece)
            if "line 3" in piece:
                cut()

        job = JobServer(f"http://127.0.0.1:{port}").follow("counting", receive)
    assert (job.state, job.exit_code, job.message) == ("failed", 2, "the command exited with code 2")
    assert [line for line in "".join(pieces).splitlines() if line.startswith("line")] == [f"line {i}" for i in range(12)]


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "requires a token; save the cluster's token to {home}/.ray/auth_token, or set RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "token"}, "requires a token; save"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "{token}"}, "RAY_AUTH_MODE=disabled sends none"),
        ({"RAY_AUTH_TOKEN": "0123456789"}, "rejected the token in RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN_PATH": "{home}/wrong"}, "rejected the token in {home}/wrong"),
        ({"RAY_AUTH_TOKEN": "tökén"}, "RAY_AUTH_TOKEN does not hold a valid token (one word in ASCII)"),
        ({"RAY_AUTH_TOKEN_PATH": "{home}/lines"}, "{home}/lines does not hold a valid token (one word in ASCII)"),
        ({"RAY_AUTH_TOKEN_PATH": "{home}/binary"}, "{home}/binary does not hold a valid token (one word in ASCII)"),
    ],
)
def test_explains_a_missing_or_wrong_token(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], sentence: str
) -> None:
    (tmp_path / "wrong").write_text("0123456789\n")
    (tmp_path / "lines").write_text("0123456789\n0123456789\n")
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in RAY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path, token=head.token))
    with pytest.raises(ClusterError) as caught:
        JobServer(head.address)
    assert sentence.format(home=tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "output"),
    [
        ({}, "refused: {gcs} requires a token; save"),
        ({"RAY_AUTH_TOKEN": "0123456789"}, "refused: {gcs} rejected the token in RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN": "{token}"}, "Resources("),
    ],
    ids=["none", "wrong", "right"],
)
def test_remote_driver_needs_the_token(head: Head, tmp_path: Path, variables: Mapping[str, str], output: str) -> None:
    environment = clean_environment() | {"HOME": str(tmp_path)}
    environment |= {name: value.format(token=head.token) for name, value in variables.items()}
    command = [sys.executable, "-c", JOIN, head.gcs]
    done = subprocess.run(
        command, cwd=PROJECT_DIR, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.strip().splitlines()[-1].startswith(output.format(gcs=head.gcs))


@contextmanager
def other_server(body: bytes) -> Iterator[str]:
    """A server that sends the same response to every request; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"<html>hello</html>", "answers, but is not the job server of a Ray head; check the host and the port"),
        (b"[1]", "answers, but is not the job server of a Ray head; check the host and the port"),
        (b'{"version": "4", "ray_version": "2.9.3"}', "runs Ray 2.9.3, but this machine has Ray"),
    ],
)
def test_explains_that_the_server_is_not_a_matching_ray_head(body: bytes, sentence: str) -> None:
    with other_server(body) as address, pytest.raises(ClusterError) as caught:
        JobServer(address)
    assert str(caught.value).startswith(f"{address} {sentence}")


@pytest.mark.parametrize(
    ("address", "variables", "sentence"),
    [
        (None, {}, "the address of the job server is missing; give --address http://head:8265 or set RAY_API_SERVER_ADDRESS"),
        (None, {"RAY_ADDRESS": "head:6379"}, "the address of the job server is missing"),
        (None, {"RAY_ADDRESS": "http://127.0.0.1:9"}, "nothing answers at http://127.0.0.1:9"),
        ("http://127.0.0.1:9", {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:10"}, "nothing answers at http://127.0.0.1:9"),
        ("http://127.0.0.1:many", {}, "nothing answers at http://127.0.0.1:many"),
        ("http://[::1", {}, "'http://[::1' is not the address of a job server"),
        ("head:6379", {}, "'head:6379' is not the address of a job server; expected http://HOST:PORT"),
    ],
)
def test_explains_a_wrong_address(
    address: str | None, variables: Mapping[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in RAY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError) as caught:
        JobServer(address)
    assert str(caught.value).startswith(sentence) and not isinstance(caught.value, UnreachableError)


def test_uploads_only_the_packages_and_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / ODD_NAME).write_text(GRID)
    size = submit.stage(tmp_path / ODD_NAME, "digits", tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {*submit.PACKAGES, *submit.FILES, "job"}
    assert yaml.safe_load((tmp_path / "copy" / "job" / ODD_NAME).read_text()) == yaml.safe_load(GRID)
    junk = [
        path for path in (tmp_path / "copy").rglob("*") if path.name.startswith(".") or path.suffix in (".pyc", ".so", ".jpg")
    ]
    assert junk == [] and size < 3e6
    # Kernels that the node has built for another copy are reused.
    name = build.digest()
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "copy" / "cuda_ext")
    assert build.digest() == name


def test_finds_errors_before_uploading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = tmp_path / "small.yaml"
    grid.write_text(GRID)
    with pytest.raises(UserError, match="epoch"):
        submit.check(grid, "digits", ["recipe.epoch=1"], None)
    with pytest.raises(UserError, match="--runs runs: a relative path"):
        submit.check(grid, "digits", [], "runs")
    with pytest.raises(UserError, match=r"data\.root=data/imagenet: a relative path"):
        submit.check(grid, "imagenet", [], None)
    with pytest.raises(UserError, match=r"recipe\.init=weights\.pt: a relative path"):
        submit.check(grid, "digits", ["recipe.init=weights.pt"], None)
    submit.check(grid, "imagenet", ["data.root=/images"], "/runs")
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(
        UserError, match="--env NOT_SET: not set in this environment; export the variable first, or leave out this option"
    ):
        submit.environment(["NOT_SET"])
    with pytest.raises(UserError, match=r"--env PASSWORD=\.\.\.: give only the name") as caught:
        submit.environment(["PASSWORD=hunter2"])
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ada:hunter2@mlflow.example.org")
    with pytest.raises(UserError, match="contains a password, which would be printed and stored"):
        submit.environment([])
    for uri in ("sqlite:///runs/mlflow.db", "runs/mlflow.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(
            UserError, match=f"MLFLOW_TRACKING_URI={uri}: a relative path, whose folder Ray deletes after the job"
        ):
            submit.environment([])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////srv/san/runs/mlflow.db")
    assert submit.environment([])["MLFLOW_TRACKING_URI"] == "sqlite:////srv/san/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    assert submit.environment([]) == {"MLFLOW_TRACKING_URI": "https://mlflow.example.org", "SAN_GIT_COMMIT": git_commit()}


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("small.yaml", "small-digits-"),
        (ODD_NAME, "it-s-touch-gotcha-x-y-digits-"),
        ("-x.yaml", "x-digits-"),
        ("é.yaml", "digits-"),
    ],
)
def test_job_ids_have_only_plain_characters(name: str, beginning: str) -> None:
    made = submit.new_id(Path(name), "digits")
    assert made.startswith(beginning) and len(made) == len(beginning) + 8


def test_job_has_a_copy_of_a_profile_file(tmp_path: Path) -> None:
    """With the values of the profile that it extends."""
    (tmp_path / "small.yaml").write_text(GRID)
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: folder\ndata: {root: /images}\n")
    submit.stage(tmp_path / "small.yaml", str(profile), tmp_path / "copy")
    command = submit.run_command(tmp_path / "small.yaml", str(profile), [], None, None)
    copied = yaml.safe_load((tmp_path / "copy" / command[command.index("--profile") + 1]).read_text())
    assert (copied["data"]["root"], copied["data"]["size"]) == ("/images", 64)
