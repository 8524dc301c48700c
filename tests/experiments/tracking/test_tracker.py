"""The tracker: one parent run per grid, and one run per trial, however often it is started."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run

from experiments.errors import UserError
from experiments.runner.job import Job, open_job
from experiments.runner.plan import plan
from experiments.runs.address import require_no_secret
from experiments.tracking import store
from experiments.tracking.tracker import Tracker
from san import Complexity
from tests.experiments.conftest import SMALL_GRID, San
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import EPOCH

COUNTS = Complexity(1, 2, 3, ())
ENDED = {0: 1_000, 1: 2_000}


def test_trial_started_twice_has_one_run(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    tracker, trial = job.tracker, job.trials[0]
    history = (EPOCH, replace(EPOCH, epoch=1, top1=60.0))
    first = tracker.open(trial)
    first.describe(trial, COUNTS)
    first.log(history[:1], ENDED)
    second = job.tracker.open(trial)
    second.describe(trial, COUNTS)
    second.log(history, ENDED)
    second.finish()
    assert first.run_id == second.run_id
    assert [m.value for m in tracker.client.get_metric_history(first.run_id, "val/top1")] == [50.0, 60.0]
    assert list(tracker.results()) == [trial.key]
    assert tracker.results()[trial.key].finished
    assert tracker.results()[trial.key].metrics["val/top1"] == 60.0


def test_preparing_twice_creates_one_parent_run(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    experiment = job.tracker.client.get_experiment_by_name("small")
    assert experiment is not None
    parents = job.tracker.client.search_runs([experiment.experiment_id], "tags.`san.role` = 'grid'")
    assert [run.data.tags["mlflow.runName"] for run in parents] == ["small-digits"]
    child = job.tracker.open(job.trials[0])
    tags = job.tracker.client.get_run(child.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parents[0].info.run_id


@pytest.mark.parametrize(("grid", "profile"), [("small", "imagenet"), ("other", "digits")])
def test_finished_trials_are_found_by_all_grids(grid: str, profile: str, open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    finished, begun, failed = (job.tracker.open(trial) for trial in job.trials)
    finished.log([EPOCH], ENDED)
    finished.finish()
    failed.finish("the loss is not finite")
    elsewhere = Tracker(job.workspace.tracking_uri, grid, profile).results()
    assert {key: result.run_id for key, result in elsewhere.items()} == {job.trials[0].key: finished.run_id}
    assert elsewhere[job.trials[0].key].metrics["val/top1"] == EPOCH.top1
    assert job.tracker.results().keys() == {trial.key for trial in job.trials}
    begun.finish()
    assert Tracker(job.workspace.tracking_uri, grid, profile).results().keys() == {trial.key for trial in job.trials[:2]}


def test_waiting_epochs_are_sent_in_one_request(open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = open_small_job()
    run, requests = job.tracker.open(job.trials[0]), []

    def count(name: str) -> None:
        call = getattr(run.client, name)
        monkeypatch.setattr(run.client, name, lambda *args, **options: requests.append(name) or call(*args, **options))

    count("get_metric_history")
    count("log_batch")
    history = [replace(EPOCH, epoch=number, top1=float(number)) for number in range(4)]
    ended = {number: 1_000 + number for number in range(4)}
    logged = run.log(history[:3], ended)
    assert run.log(history, ended, logged) == {0, 1, 2, 3}
    assert requests == ["get_metric_history", "log_batch", "log_batch"]
    kept = run.client.get_metric_history(run.run_id, "val/top1")
    assert [(metric.step, metric.value, metric.timestamp) for metric in kept] == [(n, n, 1_000 + n) for n in range(4)]


def test_no_run_is_read_twice(open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a run takes milliseconds, and a store may have thousands."""
    job = open_small_job()
    finished, _, failed = (job.tracker.open(trial) for trial in job.trials)
    finished.finish()
    failed.finish("the loss is not finite")
    tracker, read = job.tracker, []
    search = tracker.client.search_runs

    def counted(*arguments: Any, **options: Any) -> list[Run]:
        page = search(*arguments, **options)
        read.extend(run.info.run_id for run in page)
        return page

    monkeypatch.setattr(tracker.client, "search_runs", counted)
    assert len(tracker.results()) == len(read) == 3


def test_runs_are_listed(open_small_job: Callable[..., Job], run_san: San) -> None:
    job = open_small_job()
    runs = [job.tracker.open(trial) for trial in job.trials]
    runs[0].describe(job.trials[0], COUNTS)
    runs[0].log([EPOCH], ENDED)
    runs[1].finish()
    runs[2].finish("the loss is not finite")
    store = ("--runs", job.workspace.runs)
    listed = {run["name"]: run for run in json.loads(run_san("runs", "--json", *store)[1])}
    assert {name: (run["state"], run["epoch"], run["top1"], run["error"]) for name, run in listed.items()} == {
        "pairwise_3": ("running", 1, 50.0, None),
        "resnet26_3": ("finished", None, None, None),
        "patchwise_3": ("failed", None, None, "the loss is not finite"),
    }
    assert all(0 <= run["age"] < PATIENCE for run in listed.values())
    key = job.trials[0].key
    _, out, _ = run_san("runs", "small", *store)
    assert re.search(rf"^running +1/18 +50\.0 % +\d+ s  {key}  small-digits pairwise_3$", out, re.MULTILINE)
    code, _, err = run_san("runs", "other", *store)
    assert code == 2
    assert "has no runs of grid 'other'; list the runs of all grids with `san runs`" in err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_runs_are_followed(
    is_terminal: bool, open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, run_san: San
) -> None:
    """On a terminal, each list replaces the one before and is cut to the window. In a pipe, it is appended."""
    job = open_small_job()
    runs = [job.tracker.open(trial) for trial in job.trials]
    runs[1].finish()
    runs[2].finish()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("time.sleep", lambda seconds: runs[0].finish())
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "3")
    _, out, _ = run_san("runs", "--follow", "--runs", job.workspace.runs)
    if is_terminal:
        _, first, second = out.split("\x1b[2J\x1b[1;1H")
        assert [first.count("\n"), second.count("\n")] == [2, 2]
        assert max(map(len, first.splitlines())) == 20
    else:
        first, second = out.split("\n\n")
        assert (first.count("running "), second.count("running ")) == (1, 0)
        assert all(len(line) > 60 for line in (first + "\n" + second).splitlines())


def test_following_ends_with_ctrl_c(open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, run_san: San) -> None:
    job = open_small_job()
    job.tracker.open(job.trials[0])

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", leave)
    code, _, err = run_san("runs", "--follow", "--runs", job.workspace.runs)
    assert code == 0 and "interrupted" not in err


def test_runs_of_different_grids_do_not_mix(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    other = Tracker(job.workspace.tracking_uri, "other", "digits")
    other.prepare(job.grid, job.workspace.runs / "artifacts")
    trial = job.trials[0]
    theirs, ours = other.open(trial), job.tracker.open(trial)
    assert theirs.run_id != ours.run_id
    for tracker, run in ((other, theirs), (job.tracker, ours)):
        assert tracker.results()[trial.key].run_id == run.run_id  # neither is finished, so each tracker returns its own
    theirs.finish()
    job.tracker.interrupted([trial])
    assert job.tracker.results()[trial.key].run_id == theirs.run_id  # the finished one is preferred
    assert [job.tracker.client.get_run(run.run_id).info.status for run in (theirs, ours)] == ["FINISHED", "KILLED"]
    assert job.tracker.open(trial).run_id == ours.run_id
    ours.finish()
    for tracker, run in ((other, theirs), (job.tracker, ours)):
        assert tracker.results()[trial.key].run_id == run.run_id  # both are finished, so each tracker returns its own


def test_results_come_from_every_page(open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAGE", 1)
    job = open_small_job()
    for trial in job.trials:
        job.tracker.open(trial).finish()
    assert len(job.tracker.results()) == len(Tracker(job.workspace.tracking_uri, "other", "digits").results()) == 3


@pytest.mark.parametrize(("table", "note"), [("footprint", "q Table `footprint` of the paper."), (None, "q")])
def test_description_of_a_grid_is_its_question(table: str | None, note: str, open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    tracker = Tracker(job.workspace.tracking_uri, "mine", "digits")
    tracker.prepare(job.grid.model_copy(update={"question": "q", "table": table}), job.workspace.runs / "artifacts")
    experiment = tracker.client.get_experiment_by_name("mine")
    assert experiment is not None
    (parent,) = tracker.client.search_runs([experiment.experiment_id])
    assert parent.data.tags["mlflow.note.content"] == note


def test_params_have_all_fields_of_the_model(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    run = job.tracker.open(job.trials[0])
    run.describe(job.trials[0], COUNTS)
    params = job.tracker.client.get_run(run.run_id).data.params
    assert (params["model.name"], params["model.footprint"], params["model.r1"]) == ("san10_pairwise", "3", "16")


def test_failed_trial_has_its_error_and_can_resume(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job()
    run = job.tracker.open(job.trials[0])
    run.finish("the loss is not finite")
    failed = job.tracker.client.get_run(run.run_id)
    assert failed.info.status == "FAILED"
    assert failed.data.tags["san.error"] == "the loss is not finite"
    assert not job.tracker.results()[job.trials[0].key].finished
    assert job.tracker.open(job.trials[0]).run_id == run.run_id


def test_environment_variable_selects_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}")
    job = open_job(SMALL_GRID, "digits", (), tmp_path / "runs")
    assert [cell.finished for cell in plan(job)] == [False] * 3
    assert not elsewhere.exists()
    shutil.copy(empty_database, elsewhere)
    job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    job.tracker.open(job.trials[1]).finish()
    assert [cell.finished for cell in plan(job)] == [True, False, False]
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def test_resumed_trial_continues_the_run_of_its_checkpoints(open_small_job: Callable[..., Job]) -> None:
    """The run may belong to another grid, but not to another trial, and it must not be deleted."""
    job = open_small_job()
    other = Tracker(job.workspace.tracking_uri, "other", "digits")
    other.prepare(job.grid, job.workspace.runs / "artifacts")
    trial, second = job.trials[:2]
    begun = job.tracker.open(trial)
    other.interrupted([trial])
    assert job.tracker.client.get_run(begun.run_id).info.status == "KILLED"
    assert other.open(trial, resumed=True).run_id == begun.run_id
    other.failed(trial, "no disk")
    assert job.tracker.client.get_run(begun.run_id).data.tags["san.error"] == "no disk"
    assert other.open(second, resumed=True).run_id != begun.run_id
    job.tracker.client.delete_run(begun.run_id)
    new = other.open(trial, resumed=True)
    assert new.run_id != begun.run_id


def test_stopped_grid_is_not_running(open_small_job: Callable[..., Job]) -> None:
    tracker = open_small_job().tracker
    experiment = tracker.client.get_experiment_by_name("small")
    assert experiment is not None
    (parent,) = tracker.client.search_runs([experiment.experiment_id], "tags.`san.role` = 'grid'")
    tracker.begin()
    assert tracker.client.get_run(parent.info.run_id).info.status == "RUNNING"
    tracker.interrupted([])
    assert tracker.client.get_run(parent.info.run_id).info.status == "KILLED"


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "http://127.0.0.1:port", "foo://bar", "file:///nowhere/mlruns"])
def test_rejects_an_unusable_store(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    job = open_job(SMALL_GRID, "digits", (), tmp_path / "runs")
    with pytest.raises(UserError, match=rf"cannot use MLflow at {uri}: .*; check MLFLOW_TRACKING_URI and --runs"):
        plan(job)


def test_rejects_a_broken_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    with pytest.raises(UserError, match=r"mlflow.db: .*not a database"):
        plan(open_job(SMALL_GRID, "digits", (), tmp_path))


@pytest.mark.parametrize(
    "command", [("plan", SMALL_GRID), ("run", SMALL_GRID), ("report", SMALL_GRID), ("ui",)], ids=lambda command: command[0]
)
@pytest.mark.parametrize(
    ("uri", "shown", "hint"),
    [
        ("http://user:s3cret@server:5000", "http://...", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASS"),
        ("https://s3cret@server", "https://...", "or MLFLOW_TRACKING_TOKEN"),
        ("http://user:with/s3cret@server", "http://...", "or MLFLOW_TRACKING_TOKEN"),
        ("postgresql://user:s3cret@server/runs", "postgresql://...", "such as in PGPASSWORD or ~/.pgpass"),
        ("postgresql://user:with@s3cret@server/runs", "postgresql://...", "such as in PGPASSWORD or ~/.pgpass"),
        ("mysql://server/runs?user=me&passwd=s3cret", "mysql://...", "such as in PGPASSWORD or ~/.pgpass"),
        ("postgresql://server/runs?user=me&password=s3cret", "postgresql://...", "such as in PGPASSWORD or ~/.pgpass"),
    ],
)
def test_rejects_a_password_in_the_address(
    command: tuple[object, ...], uri: str, shown: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_san: San
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, out, err = run_san(*command, "--runs", tmp_path / "runs")
    assert code == 2
    assert err.startswith(
        f"san: MLFLOW_TRACKING_URI={shown}: this address contains a password, which would be printed and stored"
    )
    assert hint in err
    assert "s3cret" not in out + err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("uri", ["http://server:5000/a/b", "postgresql://user@server:5432/runs", "sqlite:////a:b@c/runs.db"])
def test_accepts_an_address_without_a_password(uri: str) -> None:
    require_no_secret(uri)
