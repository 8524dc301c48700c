"""A tracking server that requires a password."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest

from experiments.config.grid import GridRequest
from experiments.runner.grid_run import open_grid_run
from experiments.training.trainer import run_trial
from tests.experiments.conftest import SMALL_GRID, Rejected
from tests.experiments.samples import SHORT, silent
from tests.experiments.servers import Server

pytestmark = pytest.mark.slow  # starts servers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
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
        yield server
    finally:
        server.kill()


@pytest.fixture
def password(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The right one, which this process uses."""
    password = server.environment["MLFLOW_AUTH_ADMIN_PASSWORD"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    return password


def test_rejects_a_wrong_password(
    server: Server, password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: Rejected
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"not {password}")
    for command in (("run", SMALL_GRID), ("runs",)):
        message = rejected(*command, "--runs", tmp_path / "runs")
        assert f"{server.uri} rejected the user name and password" in message


def test_no_file_contains_a_secret(server: Server, password: str, tmp_path: Path, process_group: None) -> None:
    runs = tmp_path / "runs"
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", SHORT, runs))
    grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
    trial, client = grid_run.trials[0], grid_run.tracker.client
    run_trial(grid_run.workspace, trial, silent)
    (result,) = grid_run.tracker.results().values()
    run = client.get_run(result.run_id)
    assert run.info.status == "FINISHED"
    (version,) = client.search_model_versions()
    model = mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}")
    assert model.predict(np.zeros((2, 3, 24, 24), np.float32)).shape == (2, 10)

    files = [path for folder in (tmp_path, server.folder) for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.txt", "server.log", "summary.csv"} <= {path.name for path in files}
    for secret in (password, server.environment["MLFLOW_FLASK_SERVER_SECRET_KEY"]):
        assert secret not in str((run.data.tags, run.data.params))
        assert not [path for path in files if secret.encode() in path.read_bytes()]
