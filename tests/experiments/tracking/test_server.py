"""A tracking server with basic authentication and PostgreSQL, to which several trials write at once."""

from __future__ import annotations

import csv
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from experiments.grids.config import PROJECT_DIR
from experiments.runner.job import open_job
from experiments.runs.summary import Epoch
from experiments.training.trainer import run_trial
from tests.experiments.conftest import SMALL_GRID, San
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import silent
from tests.experiments.servers import POOL, Server, commands, postgres

pytestmark = pytest.mark.slow  # starts servers
OVERRIDES = ("recipe.epochs=3", "recipe.batch_size=128")
TRAIN = """
import sys
from pathlib import Path
from experiments.runner.job import open_job
from experiments.training.trainer import run_trial
job = open_job(Path(sys.argv[1]), "digits", sys.argv[4:], Path(sys.argv[2]))
run_trial(job.workspace, job.trials[int(sys.argv[3])], lambda metrics: None)
"""


@dataclass(frozen=True)
class Guarded:
    """A server that requires a password."""

    server: Server
    password: str
    secrets: tuple[str, ...]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("server")
    ours, database, key = (secrets.token_hex(16) for _ in range(3))
    defaults = (Path(mlflow.__file__).parent / "server" / "auth" / "basic_auth.ini").read_text()
    config = folder / "auth.ini"
    config.write_text(defaults.replace("sqlite:///basic_auth.db", f"sqlite:///{folder / 'users.db'}"))
    environment = {
        **POOL,
        "PGPASSWORD": database,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": key,
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
    }
    environment |= {**POOL, "MLFLOW_AUTH_ADMIN_USERNAME": "admin", "MLFLOW_AUTH_ADMIN_PASSWORD": ours}
    with postgres(database) as uri:
        server = Server(folder, uri, "--app-name", "basic-auth", environment=environment)
        server.launch()
        try:
            server.wait()
            yield Guarded(server, ours, (ours, database, key))
        finally:
            server.kill()


@pytest.mark.parametrize("command", [("run", SMALL_GRID), ("ui",)], ids=["run", "ui"])
def test_rejects_a_wrong_password(
    command: tuple[object, ...], guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_san: San
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", guarded.server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"not {guarded.password}")
    code, _, err = run_san(*command, "--runs", tmp_path / "runs")
    assert (code, err) == (
        2,
        f"san: MLflow at {guarded.server.uri} rejected the user name and password; check MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN\n",
    )


def test_two_trials_write_at_once_and_no_file_contains_a_secret(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_san: San
) -> None:
    uri, runs = guarded.server.uri, tmp_path / "runs"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    job = open_job(SMALL_GRID, "digits", OVERRIDES, runs)
    job.tracker.check()
    job.tracker.prepare(job.grid, runs / "artifacts")
    shown, page = run_san("ui", "--runs", runs)[1].splitlines()
    assert shown == f"{uri}  (the server in MLFLOW_TRACKING_URI; log in as admin)"
    assert page.startswith(f"small  {uri}/#/experiments/")
    group = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    environment = {key: value for key, value in os.environ.items() if key not in group}
    cells = range(2)
    with open(tmp_path / "cells.log", "w") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", TRAIN, str(SMALL_GRID), str(runs), str(cell), *OVERRIDES],
                cwd=PROJECT_DIR,
                env=environment,
                stdout=log,
                stderr=log,
            )
            for cell in cells
        ]
    seen = ""
    while any(process.poll() is None for process in processes):
        seen += commands()
        time.sleep(0.5)
    output = (tmp_path / "cells.log").read_text()
    assert [process.returncode for process in processes] == [0, 0], output

    results, client = job.tracker.results(), job.tracker.client
    assert results.keys() == {job.trials[cell].key for cell in cells}
    for trial in (job.trials[cell] for cell in cells):
        run = client.get_run(results[trial.key].run_id)
        assert run.info.status == "FINISHED"
        assert run.data.params["model.name"] == trial.config.model.name
        with open(job.workspace.checkpoints(trial) / "summary.csv", newline="") as file:
            rows = [{key: value for key, value in row.items() if key != "ended"} for row in csv.DictReader(file)]
        epochs = [Epoch(int(row.pop("epoch")), **{key: float(value) for key, value in row.items()}) for row in rows]
        assert len(epochs) == 3
        for name in epochs[0].metrics():
            history = client.get_metric_history(run.info.run_id, name)
            assert {metric.step: metric.value for metric in history} == {e.epoch: e.metrics()[name] for e in epochs}
            assert len(history) == 3

    registered = {version.tags["san.trial"]: version for version in client.search_model_versions()}
    assert registered.keys() == results.keys()
    for version in registered.values():
        model = mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}")
        assert model.predict(np.zeros((2, 3, 24, 24), np.float32)).shape == (2, 10)

    assert f"--port {guarded.server.port}" in seen  # checks that `commands` works
    files = [path for folder in (tmp_path, guarded.server.folder) for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.txt", "server.log", "summary.csv"} <= {path.name for path in files}
    stored = [str((run.data.tags, run.data.params)) for run in client.search_runs([run.info.experiment_id])]
    for secret in guarded.secrets:
        assert secret not in seen + output + "".join(stored)
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_server_answers_more_requests_than_the_default_pool_has_connections(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pool of 15, MLflow's default, each request holds one connection and waits for a second one until it fails."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(PATIENCE)))
    client, threads = MlflowClient(guarded.server.uri), 25
    runs = [client.create_run("0").info.run_id for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        for step in range(2):
            list(pool.map(lambda run, step=step: client.log_batch(run, [Metric("top1", 50.0, 0, step)]), runs))
    for run in runs:
        assert len(client.get_metric_history(run, "top1")) == 2


def test_epochs_after_a_password_expired_are_sent_by_the_next_run(
    guarded: Guarded, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", guarded.server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    monkeypatch.setattr("experiments.training.trainer.PATIENCE", 1.0)
    job = open_job(SMALL_GRID, "digits", OVERRIDES, tmp_path / "runs")
    job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    trial, ended = job.trials[2], []  # the other tests of this file do not train it on this server

    def expire(metrics: Mapping[str, float]) -> None:
        if "step" not in metrics:  # at the end of an epoch
            ended.append(metrics["epoch"])
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "expired")

    run_trial(job.workspace, trial, expire)
    assert ended == [1, 2, 3]
    assert "rejected the user name and password" in job.workspace.log(trial).read_text()
    for thread in [thread for thread in threading.enumerate() if thread.name == "metric-logger"]:
        thread.join(60)  # it must not send the rest with the new password
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    monkeypatch.setattr("experiments.training.trainer.PATIENCE", PATIENCE)
    found = job.tracker.results().get(trial.key)
    assert found is None or not found.finished
    run_trial(job.workspace, trial, silent)
    result = job.tracker.results()[trial.key]
    assert result.finished
    assert [metric.step for metric in job.tracker.client.get_metric_history(result.run_id, "val/top1")] == [0, 1, 2]
