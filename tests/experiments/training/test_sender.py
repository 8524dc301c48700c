"""A tracking server that goes away: training goes on, and in the end nothing is missing or doubled."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from experiments.cli.plan import plan
from experiments.errors import UserError
from experiments.runs.summary import read_ended, write_summary
from experiments.tracking import TrackerError
from experiments.tracking.listing import list_runs
from experiments.tracking.tracker import Tracker
from experiments.training import sender
from experiments.training.job import Job, open_job
from experiments.training.trainer import run_trial
from san import Complexity
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.servers import Server
from tests.experiments.training.test_training import EPOCH


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    shutil.copy(empty_database, tmp_path / "server.db")
    server = Server(tmp_path, f"sqlite:///{tmp_path / 'server.db'}")
    server.launch()
    server.wait()
    yield server
    server.kill()


def steps(job: Job) -> list[tuple[str, list[int]]]:
    """Status and epochs of each run of the grid's trials."""
    experiment = job.tracker.client.get_experiment_by_name(job.name)
    assert experiment is not None
    runs = job.tracker.client.search_runs([experiment.experiment_id], "tags.`san.role` = 'trial'")
    histories = [(run.info.status, job.tracker.client.get_metric_history(run.info.run_id, "val/top1")) for run in runs]
    assert all([m.timestamp for m in history] == sorted(m.timestamp for m in history) for _, history in histories)
    return [(status, [metric.step for metric in history]) for status, history in histories]


@pytest.mark.slow
def test_a_server_that_goes_away_costs_no_epoch(
    server: Server, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in epoch 2, back in epoch 4, killed again in epoch 6 and away for longer than the trial's end waits."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setattr("experiments.training.trainer.PATIENCE", 1.0)
    monkeypatch.setattr(sender, "PAUSE", 0.2)
    job = open_job(SMALL_GRID, "digits", ("recipe.epochs=8", "recipe.batch_size=128"), tmp_path / "runs")
    job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    trial = job.trials[1]
    waited: dict[int, float] = {}
    epochs: list[int] = []

    def disturb(metrics: Mapping[str, float]) -> None:
        if "step" in metrics:  # inside an epoch
            return
        epochs.append(int(metrics["epoch"]))
        if epochs[-1] in (2, 6):
            server.kill()
        if epochs[-1] == 4:
            server.launch()
            server.wait()
            limit = time.monotonic() + 30
            while steps(job) != [("RUNNING", [0, 1, 2, 3])]:  # what it missed comes by itself
                assert time.monotonic() < limit
                time.sleep(0.2)
        waited[epochs[-1]] = time.monotonic()

    run_trial(job.workspace, trial, disturb)
    assert epochs == list(range(1, 9))
    with_server, without = waited[2] - waited[1], waited[3] - waited[2]
    assert without < with_server + 5  # an epoch does not wait for the server
    with pytest.raises(UserError, match="cannot use MLflow"):
        plan(job)

    server.launch()
    server.wait()
    assert [status for status, _ in steps(job)] == ["RUNNING"]
    assert [(run.state, run.epoch) for run in list_runs(server.uri, None)] == [("running", steps(job)[0][1][-1] + 1)]
    assert job.workspace.log(trial).read_text().count("cannot send results to MLflow, will retry: ") == 2
    again: list[Mapping[str, float]] = []
    run_trial(job.workspace, trial, again.append)
    assert again == []  # nothing was trained
    assert steps(job) == [("FINISHED", list(range(8)))]
    assert list(job.tracker.results()) == [trial.key]
    with open(job.workspace.checkpoints(trial) / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(8))
    history = job.tracker.client.get_metric_history(job.tracker.results()[trial.key].run_id, "val/top1")
    assert [metric.value for metric in history] == [float(row["top1"]) for row in rows]
    assert [metric.timestamp for metric in history] == list(
        read_ended(job.workspace.checkpoints(trial) / "summary.csv").values()
    )


def test_a_server_that_is_away_is_asked_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "PAUSE", 0.02)
    trial = open_job(SMALL_GRID, "digits", (), tmp_path / "runs").trials[0]
    asked: list[float] = []

    def away() -> Tracker:
        asked.append(time.monotonic())
        raise TrackerError("nobody answers")

    waiting = sender.Sender(away, trial, Complexity(1, 2, 3, ()), {}, 10, tmp_path / "summary.csv")
    waiting.log([EPOCH])
    time.sleep(2)
    assert not waiting.finish(None, seconds=0.0)
    assert 6 <= len(asked) <= 20  # 100, at the first rhythm
    assert asked[-1] - asked[-2] > 3 * (asked[1] - asked[0])


def test_summary_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "key" / "summary.csv"
    assert read_ended(path) == {}
    write_summary(path, [], {})
    assert read_ended(path) == {}
    write_summary(path, [EPOCH], {0: 1_763_760_000_123})
    assert read_ended(path) == {0: 1_763_760_000_123}
    assert path.read_text().splitlines() == [
        "epoch,lr,train_loss,images_per_second,wait_share,val_loss,top1,top5,ended",
        "0,0.1,1.0,2.0,0.5,1.0,50.0,100.0,2025-11-21T21:20:00.123+00:00",
    ]
    path.write_text("what a person wrote")
    assert read_ended(path) == {}


def test_rejects_a_summary_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "summary.partial").mkdir()  # as good as a disk that is full, for root too
    with pytest.raises(UserError, match=r"summary\.csv: cannot write \(Is a directory\); check the disk"):
        write_summary(tmp_path / "summary.csv", [EPOCH], {EPOCH.epoch: 0})
