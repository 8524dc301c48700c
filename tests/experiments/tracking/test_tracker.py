"""The tracker: one parent run per grid, and one run per trial, however often it is started."""

import io
import json
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlflow.data
import pytest
from mlflow.exceptions import MlflowException

from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.runner.grid_run import open_grid_run
from experiments.runner.plan import plan
from experiments.runs.workspace import require_no_secret
from experiments.tracking import TrackerError, client
from experiments.tracking.tracker import Tracker
from san import Complexity
from tests.experiments.conftest import SMALL_GRID, OpenGrid, Printed, Rejected
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import EPOCH, runs_of

COUNTS = Complexity(1, 2, 3, ())


def test_trial_started_twice_has_one_run(open_small_grid: OpenGrid) -> None:
    """With each epoch once."""
    grid_run = open_small_grid()
    tracker, trial = grid_run.tracker, grid_run.trials[0]
    history = [replace(EPOCH, epoch=number, top1=50.0 + 5 * number, ended=1_000 + number) for number in range(3)]
    first = tracker.open(trial)
    first.describe(trial, COUNTS)
    first.log(history[:1])
    second = grid_run.tracker.open(trial)
    second.describe(trial, COUNTS)
    logged = second.log(history[:2])
    assert second.log(history, logged) == {0, 1, 2}
    second.finish()
    assert first.run_id == second.run_id
    params = tracker.client.get_run(first.run_id).data.params
    assert (params["model.name"], params["model.footprint"], params["model.r1"]) == ("san10_pairwise", "3", "16")
    kept = tracker.client.get_metric_history(first.run_id, "val/top1")
    assert [(metric.value, metric.timestamp) for metric in kept] == [(50.0, 1_000), (55.0, 1_001), (60.0, 1_002)]
    assert list(tracker.results()) == [trial.key]
    assert tracker.results()[trial.key].finished
    assert tracker.results()[trial.key].metrics["val/top1"] == 60.0


def test_preparing_twice_creates_one_parent_run(open_small_grid: OpenGrid) -> None:
    grid_run = open_small_grid()
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    parents = runs_of(grid_run, "grid")
    assert [run.data.tags["mlflow.runName"] for run in parents] == ["small-digits"]
    assert parents[0].data.tags["mlflow.note.content"].startswith(grid_run.grid.question)
    child = grid_run.tracker.open(grid_run.trials[0])
    tags = grid_run.tracker.client.get_run(child.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parents[0].info.run_id
    grid_run.tracker.interrupted([])
    assert runs_of(grid_run, "grid")[0].info.status == "KILLED"
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    assert runs_of(grid_run, "grid")[0].info.status == "RUNNING"


def test_finished_trials_are_found_by_all_grids(open_small_grid: OpenGrid) -> None:
    grid_run = open_small_grid()
    finished, begun, failed = (grid_run.tracker.open(trial) for trial in grid_run.trials)
    finished.log([EPOCH])
    finished.finish()
    failed.finish("the loss is not finite")
    for grid, profile in (("small", "imagenet"), ("other", "digits")):
        elsewhere = Tracker(grid_run.workspace.tracking_uri, grid, profile).results()
        assert {key: result.run_id for key, result in elsewhere.items()} == {grid_run.trials[0].key: finished.run_id}
        assert elsewhere[grid_run.trials[0].key].metrics["val/top1"] == EPOCH.top1
    assert [grid_run.tracker.results()[trial.key].finished for trial in grid_run.trials] == [True, False, False]
    assert grid_run.tracker.open(grid_run.trials[2]).run_id == failed.run_id
    begun.finish()
    assert Tracker(grid_run.workspace.tracking_uri, "other", "digits").results().keys() == {
        trial.key for trial in grid_run.trials[:2]
    }


def test_runs_are_listed(open_small_grid: OpenGrid, printed: Printed, rejected: Rejected) -> None:
    grid_run = open_small_grid()
    runs = [grid_run.tracker.open(trial) for trial in grid_run.trials]
    runs[0].describe(grid_run.trials[0], COUNTS)
    runs[0].log([EPOCH])
    runs[1].finish()
    runs[2].finish("the loss is not finite")
    store = ("--runs", grid_run.workspace.runs)
    listed = {run["name"]: run for run in json.loads(printed("runs", "--json", *store))}
    assert {name: (run["state"], run["epoch"], run["top1"], run["error"]) for name, run in listed.items()} == {
        "pairwise_3": ("running", 1, 50.0, None),
        "resnet26_3": ("finished", None, None, None),
        "patchwise_3": ("failed", None, None, "the loss is not finite"),
    }
    assert all(0 <= run["age"] < PATIENCE for run in listed.values())
    key = grid_run.trials[0].key
    out = printed("runs", "small", *store)
    assert re.search(rf"^running +1/18 +50\.0 % +\d+ s  {key}  small-digits pairwise_3$", out, re.MULTILINE)
    assert "has no runs of grid 'other'; list the runs of all grids with `san runs`" in rejected("runs", "other", *store)


def test_runs_of_different_grids_do_not_mix(open_small_grid: OpenGrid) -> None:
    grid_run = open_small_grid()
    other = Tracker(grid_run.workspace.tracking_uri, "other", "digits")
    other.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    trial = grid_run.trials[0]
    theirs, ours = other.open(trial), grid_run.tracker.open(trial)
    assert theirs.run_id != ours.run_id
    for tracker, run in ((other, theirs), (grid_run.tracker, ours)):
        assert tracker.results()[trial.key].run_id == run.run_id  # neither is finished, so each tracker returns its own
    theirs.finish()
    grid_run.tracker.interrupted([trial])
    assert grid_run.tracker.results()[trial.key].run_id == theirs.run_id  # the finished one is preferred
    assert [grid_run.tracker.client.get_run(run.run_id).info.status for run in (theirs, ours)] == ["FINISHED", "KILLED"]
    assert grid_run.tracker.open(trial).run_id == ours.run_id
    ours.finish()
    for tracker, run in ((other, theirs), (grid_run.tracker, ours)):
        assert tracker.results()[trial.key].run_id == run.run_id  # both are finished, so each tracker returns its own


def test_results_come_from_every_page(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 1)
    grid_run = open_small_grid()
    for trial in grid_run.trials:
        grid_run.tracker.open(trial).finish()
    assert len(grid_run.tracker.results()) == len(Tracker(grid_run.workspace.tracking_uri, "other", "digits").results()) == 3


def test_environment_variable_selects_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}")
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", (), tmp_path / "runs"))
    assert [trial.finished for trial in plan(grid_run)] == [False] * 3
    assert not elsewhere.exists()
    shutil.copy(empty_database, elsewhere)
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    grid_run.tracker.open(grid_run.trials[1]).finish()
    assert [trial.finished for trial in plan(grid_run)] == [True, False, False]
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def test_resumed_trial_continues_the_run_of_its_checkpoints(open_small_grid: OpenGrid) -> None:
    """The run may belong to another grid, but not to another trial, and it must not be deleted."""
    grid_run = open_small_grid()
    other = Tracker(grid_run.workspace.tracking_uri, "other", "digits")
    other.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    trial, second = grid_run.trials[:2]
    begun = grid_run.tracker.open(trial)
    other.interrupted([trial])
    assert grid_run.tracker.client.get_run(begun.run_id).info.status == "KILLED"
    assert other.open(trial, resumed=True).run_id == begun.run_id
    other.failed(trial, "no disk")
    assert grid_run.tracker.client.get_run(begun.run_id).data.tags["san.error"] == "no disk"
    assert other.open(second, resumed=True).run_id != begun.run_id
    grid_run.tracker.client.delete_run(begun.run_id)
    new = other.open(trial, resumed=True)
    assert new.run_id != begun.run_id


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9", "http://127.0.0.1:port", "foo://bar", "file:///nowhere/mlruns", "sqlite:///{}/broken.db"]
)
def test_rejects_an_unusable_store(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.db").write_bytes(b"not a database" * 100)
    uri = address.format(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", (), tmp_path / "runs"))
    with pytest.raises(TrackerError, match=rf"cannot use MLflow at {uri}: .*; check MLFLOW_TRACKING_URI and --runs"):
        plan(grid_run)


def test_says_for_what_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SECONDS_TO_NOTICE", 0.0)
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with client.usable("http://slow:5000"):
        while "\n" not in said.getvalue():
            time.sleep(0.01)
    assert said.getvalue() == "waiting for MLflow at http://slow:5000\n"


def test_says_how_to_restore_a_deleted_experiment(open_small_grid: OpenGrid) -> None:
    grid_run = open_small_grid()
    client = grid_run.tracker.client
    client.delete_experiment(client.get_experiment_by_name(grid_run.name).experiment_id)
    for use in (open_small_grid, lambda: plan(grid_run)):
        with pytest.raises(TrackerError, match=r"'small' was deleted in MLflow; .* mlflow experiments restore -x \d+`"):
            use()


def test_command_rejects_a_password_in_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: Rejected) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:s3cret@server:5000")
    message = rejected("run", SMALL_GRID, "--runs", tmp_path / "runs")
    assert message.startswith("san: MLFLOW_TRACKING_URI=http://...: ") and "MLFLOW_TRACKING_USERNAME" in message
    assert "s3cret" not in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "uri",
    [
        "https://s3cret@server",
        "http://user:with/s3cret@server",
        "postgresql://user:with@s3cret@server/runs",
        "mysql://server/runs?user=me&passwd=s3cret",
        "postgresql://server/runs?user=me&password=s3cret",
    ],
)
def test_rejects_an_address_with_a_password(uri: str) -> None:
    with pytest.raises(UserError, match="contains a password") as error:
        require_no_secret(uri)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("uri", ["http://server:5000/a/b", "postgresql://user@server:5432/runs", "sqlite:////a:b@c/runs.db"])
def test_accepts_an_address_without_a_password(uri: str) -> None:
    require_no_secret(uri)


@pytest.mark.parametrize(
    ("overrides", "name", "source"),
    [((), "digits", "local"), (("data.source=synthetic", "data.synthetic_classes=2"), "synthetic", "code")],
)
def test_data_set_has_its_source(overrides: tuple[str, ...], name: str, source: str, open_small_grid: OpenGrid) -> None:
    grid_run = open_small_grid(*overrides)
    trial = grid_run.trials[0]
    run = grid_run.tracker.open(trial)
    for _ in range(2):
        run.describe(trial, COUNTS)
    inputs = grid_run.tracker.client.get_run(run.run_id).inputs.dataset_inputs
    assert {each.tags[0].value: (each.dataset.name, each.dataset.digest) for each in inputs} == {
        context: (name, digest)
        for context, digest in zip(("training", "validation"), trial.data_digest.split("-"), strict=True)
    }
    opened = mlflow.data.get_source(inputs[0])
    assert opened._get_source_type() == source
    if source == "local":
        assert Path(opened.load(), "train").is_dir()


def test_interrupted_creation_leaves_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow could not use it, nor repair it."""

    def interrupted(tracking_uri: str) -> None:
        Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "MlflowClient", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.open_client(f"sqlite:///{tmp_path}/runs/mlflow.db")
    assert not list((tmp_path / "runs").iterdir())


def test_database_of_a_faster_process_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(tracking_uri: str) -> None:
        Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"ours")
        (tmp_path / "mlflow.db").write_bytes(b"theirs")

    monkeypatch.setattr(client, "MlflowClient", overtaken)
    client.open_client(f"sqlite:///{tmp_path}/mlflow.db")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"theirs"]


def test_message_gives_the_reason_and_not_a_remark_for_programmers() -> None:
    said = "(raised as a result of Query-invoked autoflush; consider this)\n(sqlite3.OperationalError) database or disk is full"
    with pytest.raises(TrackerError, match="disk is full"), client.usable("sqlite:///mlflow.db"):
        raise MlflowException(said)
