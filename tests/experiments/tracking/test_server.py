"""A tracking server that requires a password."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np
import pytest

from experiments.runner.grid_run import open_grid_run
from experiments.training.trainer import run_trial
from tests.experiments.conftest import SMALL_GRID, San
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import silent
from tests.experiments.servers import Server

pytestmark = pytest.mark.slow  # starts servers
OVERRIDES = ("recipe.epochs=3", "recipe.batch_size=128")


@dataclass(frozen=True)
class Guarded:
    """A server that requires a password."""

    server: Server
    password: str
    secrets: tuple[str, ...]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("server")
    ours, key = (secrets.token_hex(16) for _ in range(2))
    defaults = (Path(mlflow.__file__).parent / "server" / "auth" / "basic_auth.ini").read_text()
    config = folder / "auth.ini"
    config.write_text(defaults.replace("sqlite:///basic_auth.db", f"sqlite:///{folder / 'users.db'}"))
    environment = {"MLFLOW_FLASK_SERVER_SECRET_KEY": key, "MLFLOW_AUTH_CONFIG_PATH": str(config)}
    environment |= {"MLFLOW_AUTH_ADMIN_USERNAME": "admin", "MLFLOW_AUTH_ADMIN_PASSWORD": ours}
    shutil.copy(empty_database, folder / "mlflow.db")
    server = Server(folder, f"sqlite:///{folder / 'mlflow.db'}", "--app-name", "basic-auth", environment=environment)
    server.launch()
    try:
        server.wait()
        yield Guarded(server, ours, (ours, key))
    finally:
        server.kill()


def test_rejects_a_wrong_password(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_san: San) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", guarded.server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"not {guarded.password}")
    for command in (("run", SMALL_GRID), ("runs",)):
        code, _, err = run_san(*command, "--runs", tmp_path / "runs")
        assert code == 2
        assert f"{guarded.server.uri} rejected the user name and password" in err


def test_no_file_contains_a_secret(
    guarded: Guarded, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, runs = guarded.server.uri, tmp_path / "runs"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    grid_run = open_grid_run(SMALL_GRID, "digits", OVERRIDES, runs)
    grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
    trial, client = grid_run.trials[0], grid_run.tracker.client
    run_trial(grid_run.workspace, trial, silent)
    (result,) = grid_run.tracker.results().values()
    run = client.get_run(result.run_id)
    assert run.info.status == "FINISHED"
    (version,) = client.search_model_versions()
    model = mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}")
    assert model.predict(np.zeros((2, 3, 24, 24), np.float32)).shape == (2, 10)

    files = [path for folder in (tmp_path, guarded.server.folder) for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.txt", "server.log", "summary.csv"} <= {path.name for path in files}
    for secret in guarded.secrets:
        assert secret not in str((run.data.tags, run.data.params))
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_epochs_after_a_password_expired_are_sent_by_the_next_run(
    guarded: Guarded, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", guarded.server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    monkeypatch.setattr("experiments.training.trainer.OUTAGE_TIMEOUT", 1.0)
    grid_run = open_grid_run(SMALL_GRID, "digits", OVERRIDES, tmp_path / "runs")
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    trial, ended = grid_run.trials[2], []  # the other test does not train it on this server

    def expire(metrics: Mapping[str, float]) -> None:
        if "step" not in metrics:  # at the end of an epoch
            ended.append(metrics["epoch"])
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "expired")

    run_trial(grid_run.workspace, trial, expire)
    assert ended == [1, 2, 3]
    assert "rejected the user name and password" in grid_run.workspace.log(trial).read_text()
    for thread in [thread for thread in threading.enumerate() if thread.name == "metric-logger"]:
        thread.join(60)  # it must not send the rest with the new password
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", guarded.password)
    monkeypatch.setattr("experiments.training.trainer.OUTAGE_TIMEOUT", PATIENCE)
    found = grid_run.tracker.results().get(trial.key)
    assert found is None or not found.finished
    run_trial(grid_run.workspace, trial, silent)
    result = grid_run.tracker.results()[trial.key]
    assert result.finished
    assert [metric.step for metric in grid_run.tracker.client.get_metric_history(result.run_id, "val/top1")] == [0, 1, 2]
