"""`san submit` with a real head that requires a token, and its error messages."""

from __future__ import annotations

import re
import secrets
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from cluster import ClusterError
from cluster.submit import JobServer
from experiments.grids.config import PROJECT_DIR
from experiments.runs.provenance import git_commit
from tests.cluster.heads import ray_head
from tests.cluster.test_join import JOIN
from tests.experiments.cli.test_submit import GRID, ODD_NAME
from tests.experiments.drivers import LEFT_OUT, PATIENCE, clean_environment
from tests.experiments.servers import free_port


@dataclass(frozen=True)
class Head:
    """A Ray head: addresses of its job server and of its GCS, its token, and its folder."""

    address: str
    gcs: str
    token: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user with the token."""
        return clean_environment() | {
            "RAY_API_SERVER_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
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
        wait_until(lambda: responds(f"http://127.0.0.1:{dashboard}/api/version"))
        yield Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", token, folder)


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)


def responds(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:  # it asks for a token
        return True
    except OSError:
        return False
    return True


San = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def san(head: Head, tmp_path: Path) -> San:
    """Runs `san` in a process, outside of the project's folder."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "experiments", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=head.environment, capture_output=True, text=True, timeout=PATIENCE)

    return call


def tags_of(database: Path, name: str) -> list[str]:
    """The values of a tag of MLflow's runs."""
    with sqlite3.connect(database) as store:
        return [value for (value,) in store.execute("SELECT value FROM tags WHERE key = ?", (name,))]


def states_of(database: Path) -> list[str]:
    """Status of each trial's run in a database; none before MLflow has created its tables."""
    with sqlite3.connect(database) as store:
        if store.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('runs', 'tags')").fetchone() != (2,):
            return []
        question = "SELECT status FROM runs JOIN tags USING (run_uuid) WHERE key = 'san.role' AND value = 'trial'"
        return [status for (status,) in store.execute(question)]


def holders(secret: str, file: str) -> set[str]:
    """Names of processes with a secret in one of their files in /proc."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if secret.encode() in (folder / file).read_bytes():
                found.add((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def holds(path: Path, secret: str) -> bool:
    with suppress(FileNotFoundError):  # it was deleted in the meantime
        return secret.encode() in path.read_bytes()
    return False


@pytest.mark.slow
def test_submits_a_grid_and_keeps_secrets(head: Head, san: San, tmp_path: Path) -> None:
    (tmp_path / ODD_NAME).write_text(GRID)
    secret = secrets.token_hex(16)
    arguments = ["submit", ODD_NAME, "--runs", str(tmp_path / "runs"), "recipe.epochs=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments", *arguments, "--env", "MLFLOW_TRACKING_PASSWORD"],
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
    assert "1 trial, 1 to train" in output and "ray job stop it-s-touch-gotcha-x-y-digits-" in output
    assert any("ImplicitFunc" in name for name in environments), f"no trial's process has the variable, only {environments}"
    # Ray itself passes the environment of the job as an argument of the process that sets up a worker.
    assert [command for command in commands if "setup_worker.py" not in command] == [] and secret not in output
    files = [path for folder in (tmp_path / "runs", head.folder) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if holds(path, secret)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ODD_NAME, "runs"])

    again = san(*arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 trial, 1 already finished, 0 to train" in again.stdout
    database = tmp_path / "runs" / "mlflow.db"
    assert states_of(database) == ["FINISHED"]
    assert set(tags_of(database, "san.git_commit")) == {git_commit()}, "the commit of the job's copy of the project"
    client = JobSubmissionClient(head.address, headers={"Authorization": f"Bearer {head.token}"})
    jobs = [job for job in client.list_jobs() if (job.submission_id or "").startswith("it-s")]
    # The name of the uploaded folder depends on its content, so Ray uploads it only once.
    assert len(jobs) == 2 and len({(job.runtime_env or {})["working_dir"] for job in jobs}) == 1
    assert all(head.token not in job.model_dump_json() for job in jobs)


@pytest.mark.slow
def test_ray_job_stop_ends_the_trials(head: Head, san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.yaml").write_text(GRID)
    runs = tmp_path / "runs"
    arguments = ("submit", "long.yaml", "--runs", str(runs), "recipe.epochs=1000")
    mark = f"CELLS_MARK={tmp_path}"
    monkeypatch.setenv("CELLS_MARK", str(tmp_path))
    first = san(*arguments, "--no-wait", "--env", "CELLS_MARK")
    assert first.returncode == 0, first.stderr
    job = first.stdout.strip()
    (stop,) = re.findall("ray job stop .*", first.stderr)
    assert stop == f"ray job stop {job} --address {head.address}"

    wait_until(lambda: (runs / "mlflow.db").exists() and states_of(runs / "mlflow.db") == ["RUNNING"])
    assert any("ImplicitFunc" in name for name in holders(mark, "environ"))

    ray = [sys.executable, "-m", "ray.scripts.scripts", *stop.split()[1:]]
    stopped = subprocess.run(ray, env=head.environment, capture_output=True, text=True, timeout=PATIENCE)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_until(lambda: not holders(mark, "environ"))
    assert states_of(runs / "mlflow.db") == ["KILLED"]


@pytest.mark.slow
def test_exit_code_is_1_if_the_grid_fails(san: San, tmp_path: Path) -> None:
    (tmp_path / "wild.yaml").write_text(GRID)
    done = san("submit", "wild.yaml", "--runs", str(tmp_path / "runs"), "recipe.epochs=1", "recipe.lr=1e30")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not finished: only" in done.stdout and "exited with code 1" in done.stderr


@pytest.mark.slow
def test_explains_a_missing_token(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in LEFT_OUT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClusterError, match="rejected the token or requires one"):
        JobServer(head.address)


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "right"])
def test_remote_driver_needs_the_token(token: str | None, head: Head, tmp_path: Path) -> None:
    environment = clean_environment() | {"HOME": str(tmp_path), "PYTHONPATH": str(PROJECT_DIR)}
    if token is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token if token == "right" else token}
    command = [sys.executable, "-c", JOIN, head.gcs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    expected = "Resources(" if token == "right" else f"refused: cannot join a Ray cluster at '{head.gcs}'"
    assert done.stdout.strip().splitlines()[-1].startswith(expected)


@pytest.mark.parametrize(
    ("address", "variables", "message"),
    [
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
