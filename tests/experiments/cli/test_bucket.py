"""Whole trials and grids whose runs are stored in a bucket."""

import functools
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from experiments.cli.commands import main
from experiments.config.grid import GridRequest
from experiments.runner.grid_run import open_grid_run
from experiments.runs.bucket import S3Store
from experiments.training.checkpoint import best_in
from tests.experiments.conftest import SMALL_GRID, WriteGrid
from tests.experiments.processes import Kill, ended, start
from tests.experiments.samples import ALWAYS, SHORT
from tests.experiments.servers import ObjectStore


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path) -> Iterator[S3Store]:
    """An empty bucket, and an MLflow database."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}", "SAN_SCRATCH": str(tmp_path / "scratch")}
    for name, value in (ObjectStore.KEYS | environment).items():
        monkeypatch.setenv(name, value)
    server = ObjectStore(tmp_path / "log")
    yield S3Store.parse(server.uri("prefix"))
    server.end()


def all_files(bucket: S3Store) -> dict[str, bytes]:
    """The files below the prefix of the store, and their content."""
    client = boto3.client("s3", endpoint_url=bucket.address.partition("endpoint_override=")[2])
    names = [item["Key"] for item in client.list_objects_v2(Bucket="runs", Prefix="prefix/")["Contents"]]
    files = [name for name in names if not name.endswith("/")]
    return {name.removeprefix("prefix/"): client.get_object(Bucket="runs", Key=name)["Body"].read() for name in files}


def on_node(folder: str) -> None:
    """Gives a worker its own scratch folder, as on another node."""
    os.environ.update(ObjectStore.KEYS)  # the process that forks workers may have started before this test
    os.environ["SAN_SCRATCH"] = f"{folder}-{os.environ['RANK']}"


@pytest.mark.slow
def test_killed_trial_resumes_on_another_node(
    bucket: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two workers has a separate scratch folder. `san evaluate` reads the result from the bucket."""
    world = 2
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", (*SHORT, *ALWAYS), bucket.address))
    grid_run.tracker.prepare(grid_run.grid, tmp_path / "artifacts")
    (trial,) = (trial for trial in grid_run.trials if trial.row == "resnet26_3")
    first, second = (functools.partial(on_node, str(tmp_path / node)) for node in ("first", "second"))
    assert ended(start(grid_run.workspace, trial, world, Kill("step", 7), body=first))[-1] == -9
    folder = grid_run.workspace.folder(trial)
    assert ended(start(grid_run.workspace, trial, world, body=second)) == [0] * world
    assert len(bucket.names("logs")) == 1  # of both workers, because the nodes of this test have the same name
    (log,) = (tmp_path / "second-0").rglob("*.log")
    # The second step of the epoch is not always saved before the kill.
    assert re.search(r"resuming from epoch-0001-step-000000[12]\.pt", log.read_text())
    assert not list((tmp_path / "second-0").rglob("epoch-*.pt")), "a checkpoint stays on the node"

    result, best = grid_run.tracker.results()[trial.key], best_in(bucket, folder)
    assert result.finished and best is not None
    for checkpoint in (trial.key, bucket.uri(folder), bucket.uri(f"{folder}/{best.name}")):
        monkeypatch.setattr(sys, "argv", ["san", "evaluate", checkpoint, "--runs", bucket.address, "--json"])
        main()
        output = json.loads(capsys.readouterr().out)
        assert output["checkpoint"] == bucket.uri(f"{folder}/{best.name}")
        # Two workers validated other batches, whose rounding may change the class of an image.
        assert output["top1"] == pytest.approx(best.history[-1].top1, abs=100 / output["images"])


@pytest.mark.slow
def test_grid_runs_without_a_shared_folder(
    bucket: S3Store,
    write_grid: WriteGrid,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All files are in the bucket, and no file contains the credentials."""
    grid = write_grid("{question: 'Does it run?', rows: [{id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}]}")
    overrides = ("recipe.batch_size=50", "data.train_per_class=20", "recipe.epochs=1")
    grid_run, title = (str(grid), *overrides), "+".join(("small-digits", *sorted(overrides)))
    secret = ObjectStore.KEYS["AWS_SECRET_ACCESS_KEY"]
    finished = "1 trial, 1 already finished"
    for command, expected in (
        (("run", *grid_run), "trained 1 trial in "),
        (("run", *grid_run), finished),
        (("report", *grid_run), f"plot: {bucket.uri(f'{title}/plot.png')}\n"),
        (("plan", *grid_run), "finished"),
        (("runs",), "1/1"),
    ):
        monkeypatch.setattr(sys, "argv", ["san", *command, "--runs", bucket.address])
        code = None
        try:
            main()
        except SystemExit as error:
            code = error.code
        output = "".join(capfd.readouterr())
        assert not code, output
        assert expected in output
        assert secret not in output
    files = all_files(bucket)
    assert {re.sub(r"[0-9a-f]{12}", "KEY", name) for name in files} == {
        *(f"checkpoints/KEY/{name}" for name in ("epoch-0001-step-0000000.pt", "summary.csv", "confusion.csv", "owner.json")),
        f"logs/pairwise_3-KEY-{socket.gethostname()}.log",
        *(f"{title}/{name}" for name in ("plot.png", "report.html", "table.csv", "table.md")),
    }
    assert "Accuracy by class" in files[f"{title}/report.html"].decode()  # the confusion matrix was read from the bucket
    assert not [name for name, content in files.items() if secret.encode() in content]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert not list((tmp_path / "scratch").rglob("epoch-*"))
