"""`san submit` with a real head that requires a token, and its error messages."""

from __future__ import annotations

import json
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
import yaml
from ray.job_submission import JobSubmissionClient

from cluster import ClusterError
from cluster.submit import JobServer
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
    assert "1 trials, 1 to train" in output and "ray job stop it-s-touch-gotcha-x-y-digits-" in output
    assert re.search(r"\nonly +\d+\.\d", output)
    assert any("ImplicitFunc" in name for name in environments), f"no trial's process has the variable, only {environments}"
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
    assert "1 trials, 1 already finished, 0 to train" in second_run.stdout
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
def test_ray_job_stop_ends_the_trials(head: Head, san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    ray = [sys.executable, "-m", "ray.scripts.scripts", *hints[1].split()[1:]]
    stopped = subprocess.run(ray, env=head.environment, capture_output=True, text=True, timeout=PATIENCE)
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
    outputs: list[subprocess.CompletedProcess[str]] = []

    def submitted() -> bool:  # a head that has just started asks to try again later
        done = subprocess.run(command, cwd=PROJECT_DIR, env=head.environment, capture_output=True, text=True, timeout=PATIENCE)
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


def test_explains_a_missing_token(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in RAY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClusterError, match="rejected the token or requires one; set RAY_AUTH_MODE=token"):
        JobServer(head.address)


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "0123456789", "right"])
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
        (None, {}, "'' is not the address of a job server; give --address"),
        (None, {"RAY_ADDRESS": "head:6379"}, "'head:6379' is not the address of a job server"),
        (None, {"RAY_ADDRESS": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
        ("http://127.0.0.1:9", {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:10"}, "http://127.0.0.1:9 does not answer"),
    ],
)
def test_explains_a_wrong_address(
    address: str | None, variables: Mapping[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in RAY_VARIABLES:
        monkeypatch.setenv(name, variables.get(name, ""))
    with pytest.raises(ClusterError) as caught:
        JobServer(address)
    assert str(caught.value).startswith(message)


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
