"""MLflow: where runs are kept and found again; the only file that imports mlflow.

One experiment per grid, one parent run per grid and profile, one child run per trial. A trial's run is found by its content
hash, so a cell that is started again continues its run, and one that is finished, in whatever grid, is never trained twice.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# MLflow's client would repeat for minutes, and a request that was carried out, but whose answer was lost, would be carried out
# twice. Whoever asks here asks again, after looking at what is there.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

import torch
import yaml
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from experiments.config import flat
from experiments.errors import UserError
from experiments.grid import Grid, Trial
from experiments.training.metrics import Epoch
from san import Complexity

BATCH = 100  # most params or tags that one call may carry
PAGE = 1000  # runs or experiments that one call asks for
PATIENCE = 120.0  # seconds that the end of a trial, or of a grid, waits for a tracker that is away
PAUSE = 2.0  # seconds before a tracker that is away is asked again
UNUSABLE = (MlflowException, SQLAlchemyError, OSError)  # what comes of a tracker that is away or refuses


def require_no_secret(uri: str) -> None:
    """An address is printed, kept with runs and handed to other processes, so it must hold no password.

    Raises:
        UserError: it does; the text shows the address without it.
    """
    scheme, _, rest = uri.partition("://")
    if scheme in ("sqlite", "file"):
        return
    server = scheme in ("http", "https")
    if not re.search("@" if server else "^[^@]*:[^@]*@|password=", rest):
        return
    hidden = f"{scheme}://...@{re.split('[@?]', rest)[1 if '@' in rest else 0]}"
    way = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    raise UserError(
        f"MLFLOW_TRACKING_URI={hidden}: an address must not hold a user's password, for it is printed and kept; leave it out "
        f"and give {way if server else 'it as the database wants it, such as PGPASSWORD or ~/.pgpass'}"
    )


class TrackerError(UserError):
    """The tracker cannot be used, now or as it is addressed."""


@dataclass(frozen=True, slots=True)
class Result:
    """A trial's run as the tracker knows it."""

    run_id: str
    finished: bool
    metrics: Mapping[str, float]
    seconds: float = 0.0
    """From the start of the run to its end."""


class Tracker:
    """A grid's experiment on a tracking server or in a local database.

    Args:
        uri: where MLflow keeps runs, such as `sqlite:///runs/mlflow.db` or `http://server:5000`.
        grid: the grid's name, which is the experiment's.
        profile: the profile's name.
    """

    def __init__(self, uri: str, grid: str, profile: str) -> None:
        logging.getLogger("alembic").setLevel(logging.ERROR)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.uri, self.grid, self.profile = uri, grid, profile
        with _usable(uri):
            self.client = MlflowClient(tracking_uri=uri)

    def check(self) -> None:
        """Asks once, before anything starts, whether the store can be used: the client itself would try for minutes.

        Raises:
            TrackerError: no server answers there, or it is no store of MLflow.
        """
        with _usable(self.uri):
            if self.uri.startswith("http"):
                try:
                    urllib.request.urlopen(f"{self.uri.rstrip('/')}/health", timeout=10).close()
                except urllib.error.HTTPError:
                    pass  # something answers; what it refuses, the client will tell
            self.client.get_experiment_by_name(self.grid)

    def prepare(self, grid: Grid, artifacts: Path) -> None:
        """Makes database, experiment and parent run where they are missing. Called once, before any worker writes.

        Raises:
            TrackerError: the tracking server does not answer.
        """
        with _usable(self.uri):
            if self.client.get_experiment_by_name(self.grid) is None:
                local = self.uri.startswith("sqlite")
                self.client.create_experiment(self.grid, artifact_location=artifacts.as_uri() if local else None)
            parent = self._parent()
            if parent is not None:
                self.client.update_run(parent.info.run_id, status="RUNNING")
                return
            tags = {"mlflow.runName": f"{self.grid}-{self.profile}", "san.grid": self.grid, "san.profile": self.profile}
            note = f"{grid.question} Table `{grid.table}` of the paper." if grid.table else grid.question
            tags |= {"san.role": "grid", "mlflow.note.content": note}
            self.client.create_run(self._experiment_id(), tags=tags)

    def results(self) -> dict[str, Result]:
        """Runs of trials by content hash: this grid's and profile's own, and those that any other has finished, which have the
        same result. A finished run comes before one that is not."""
        with _usable(self.uri):
            experiments = _pages(lambda token: self.client.search_experiments(max_results=PAGE, page_token=token))
            everywhere = [experiment.experiment_id for experiment in experiments]
            finished = _by_key(self._runs(everywhere, "tags.`san.role` = 'trial' and attributes.status = 'FINISHED'"))
            own = self._own()
        return own | finished | {key: result for key, result in own.items() if result.finished}

    def open(self, trial: Trial) -> TrialRun:
        """The run of a trial: continued where there is one, else made.

        Raises:
            TrackerError: the tracker cannot be used now.
        """
        with _usable(self.uri):
            found = self._search(f"tags.`san.trial` = '{trial.key}'")
            workers = str(trial.config.placement.workers)
            if found:
                self.client.update_run(found[0].info.run_id, status="RUNNING")
                numbers = found[0].data.tags.get("san.workers", workers).split(",")
                if numbers[-1] != workers:
                    self.client.set_tag(found[0].info.run_id, "san.workers", ",".join([*numbers, workers]))
                if "san.error" in found[0].data.tags:
                    self.client.delete_tag(found[0].info.run_id, "san.error")
                return TrialRun(self.uri, self.client, found[0].info.run_id)
            parent = self._parent()
            assert parent is not None, "prepare() makes the parent run before any trial starts"
            tags = {
                "mlflow.runName": trial.name,
                "mlflow.parentRunId": parent.info.run_id,
                "san.role": "trial",
                "san.trial": trial.key,
                "san.grid": trial.grid,
                "san.profile": trial.profile,
                "san.row": trial.row,
                "san.data_digest": trial.data_digest,
                "san.workers": workers,
                "san.git_commit": git_commit(),
            }
            run = self.client.create_run(self._experiment_id(), tags=tags)
            return TrialRun(self.uri, self.client, run.info.run_id)

    def failed(self, trial: Trial, error: str) -> None:
        """Marks the run of a trial as failed; it carries the sentence."""
        run = self.open(trial)
        with _usable(self.uri):
            run.finish(error)

    def interrupted(self, trials: Iterable[Trial]) -> None:
        """Marks the runs of trials that were stopped on the way."""
        with _usable(self.uri):
            own = self._own()
            for trial in trials:
                if trial.key in own and not own[trial.key].finished:
                    self.client.set_terminated(own[trial.key].run_id, status="KILLED")

    def log_report(self, files: Iterable[Path], complete: bool) -> None:
        """Keeps the table and the plot with the grid's parent run, and ends that."""
        with _usable(self.uri):
            parent = self._parent()
            assert parent is not None, "prepare() makes the parent run"
            for file in files:
                self.client.log_artifact(parent.info.run_id, str(file))
            self.client.set_terminated(parent.info.run_id, status="FINISHED" if complete else "FAILED")

    def _experiment_id(self) -> str:
        experiment = self.client.get_experiment_by_name(self.grid)
        assert experiment is not None, "prepare() makes the experiment before anything is tracked"
        return str(experiment.experiment_id)

    def _parent(self) -> Run | None:
        found = self._search("tags.`san.role` = 'grid'")
        return found[0] if found else None

    def _own(self) -> dict[str, Result]:
        """The runs of this grid's and profile's trials, by content hash."""
        if self.client.get_experiment_by_name(self.grid) is None:
            return {}
        return _by_key(self._search("tags.`san.role` = 'trial'"))

    def _search(self, where: str) -> list[Run]:
        """Runs of this grid and profile."""
        return self._runs([self._experiment_id()], f"{where} and tags.`san.profile` = '{self.profile}'")

    def _runs(self, experiments: list[str], where: str) -> list[Run]:
        return _pages(lambda token: self.client.search_runs(experiments, where, max_results=PAGE, page_token=token))


def _pages(ask: Callable[[str | None], Any]) -> list[Any]:
    """Everything that a search finds; `ask` takes the token of a page."""
    page = ask(None)
    found = list(page)
    while page.token:
        page = ask(page.token)
        found += page
    return found


@contextmanager
def _usable(uri: str) -> Iterator[None]:
    """Turns what MLflow and its database say of a store that cannot be used into one sentence."""
    try:
        yield
    except UNUSABLE as error:
        code = getattr(error, "error_code", None)
        if code == "UNAUTHENTICATED":
            raise TrackerError(
                f"MLflow at {uri} does not take this user and password; check MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from None
        if code == "PERMISSION_DENIED":
            user = os.environ.get("MLFLOW_TRACKING_USERNAME", "this user")
            raise TrackerError(
                f"MLflow at {uri} does not let {user} do this; ask whoever runs it for the right to edit"
            ) from None
        reason = str(error).splitlines()[0][:200]
        raise TrackerError(f"MLflow at {uri} cannot be used: {reason}; check MLFLOW_TRACKING_URI and --runs") from None


def _by_key(runs: Iterable[Run]) -> dict[str, Result]:
    return {run.data.tags["san.trial"]: _result(run) for run in runs}


def _result(run: Run) -> Result:
    seconds = ((run.info.end_time or run.info.start_time) - run.info.start_time) / 1000
    return Result(run.info.run_id, run.info.status == "FINISHED", dict(run.data.metrics), seconds)


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The child run of one trial, written by its first worker only."""

    uri: str
    client: MlflowClient
    run_id: str

    def describe(self, trial: Trial, complexity: Complexity) -> None:
        """Parameters, counts, resolved config and environment, once; a continued run has them already."""
        run = self.client.get_run(self.run_id)
        if "params" in run.data.metrics:
            return
        values = flat(trial.record) | {"recipe.lr_used": trial.config.recipe.lr_used, "seed": trial.seed}
        # Some are there where a worker was killed meanwhile; MLflow refuses another value, such as another number of workers.
        params = [Param(key, str(value)) for key, value in values.items() if key not in run.data.params]
        for first in range(0, len(params), BATCH):
            self.client.log_batch(self.run_id, params=params[first : first + BATCH])
        self.client.log_text(self.run_id, yaml.safe_dump(trial.record, sort_keys=False), "config.yaml")
        self.client.log_text(self.run_id, environment(), "environment.txt")
        counts = {
            "params": complexity.params,
            "flops_paper": complexity.flops_paper,
            "flops_actual": complexity.flops_actual,
        }
        self._log(counts, 0, int(time.time() * 1000))

    def log(self, history: Sequence[Epoch], ended: Mapping[int, int]) -> None:
        """Logs the epochs that the run does not have yet: none is missing or doubled after a crash. `ended` gives each epoch's
        end in milliseconds since 1970."""
        logged = {metric.step for metric in self.client.get_metric_history(self.run_id, "val/top1")}
        for epoch in history:
            if epoch.epoch not in logged:
                self._log(epoch.metrics() | {"epoch": epoch.epoch + 1}, epoch.epoch, ended[epoch.epoch])

    def summarise(self, history: Sequence[Epoch], images: int, at: int) -> None:
        """What a table of runs shows: the best and the last epoch, speed, and hours of training, without validation and pauses.

        `images` are those of an epoch, `at` is in milliseconds since 1970.
        """
        best, last = max(history, key=lambda epoch: epoch.top1), history[-1]
        hours = sum(images / epoch.images_per_second for epoch in history) / 3600
        values = {
            "summary/best_top1": best.top1,
            "summary/best_top5": best.top5,
            "summary/best_epoch": best.epoch + 1,
            "summary/last_top1": last.top1,
            "summary/last_top5": last.top5,
            "summary/images_per_second": images * len(history) / (3600 * hours),
            "summary/training_hours": hours,
        }
        self._log(values, last.epoch, at)

    def finish(self, error: str | None = None) -> None:
        """Ends the run; with an error it is marked as failed and carries the sentence."""
        if error is not None:
            self.client.log_batch(self.run_id, tags=[RunTag("san.error", error)])
        self.client.set_terminated(self.run_id, status="FAILED" if error else "FINISHED")

    def _log(self, values: Mapping[str, float], step: int, at: int) -> None:
        self.client.log_batch(self.run_id, metrics=[Metric(key, value, at, step) for key, value in values.items()])


class NodeMonitor(SystemMetricsMonitor):
    """Logs CPU, memory, disk, network and GPUs of this node with a run, from a thread that ends if the tracker does not answer.

    Every 10 s, or as MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL says.
    """

    def __init__(self, tracker_uri: str, run_id: str) -> None:
        logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)  # it would tell of every server that is away
        super().__init__(run_id, resume_logging=True, tracking_uri=tracker_uri)  # type: ignore[no-untyped-call]
        self.start()  # type: ignore[no-untyped-call]

    @staticmethod
    def is_wanted() -> bool:
        return os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() in ("true", "1")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()


@dataclass(frozen=True, slots=True)
class Listed:
    """A trial's run in a list of runs."""

    grid: str
    profile: str
    name: str
    key: str
    state: str
    """running, finished, failed or killed; a run whose driver was killed stays running until it is continued."""
    epoch: int | None
    epochs: int | None
    top1: float | None
    """Percent, of the last epoch."""
    age: float
    """Seconds since it ended, or since it started where it has not."""
    error: str | None


def list_runs(uri: str, grid: str | None) -> list[Listed]:
    """The runs of all trials, or of one grid's, the newest first.

    Raises:
        TrackerError: the tracker cannot be used, or has no such grid.
    """
    tracker = Tracker(uri, grid or "", "")
    tracker.check()
    with _usable(uri):
        experiments = _pages(lambda token: tracker.client.search_experiments(max_results=PAGE, page_token=token))
        if grid is not None:
            experiments = [experiment for experiment in experiments if experiment.name == grid]
            if not experiments:
                raise TrackerError(f"MLflow at {uri} has no runs of a grid {grid!r}; `san runs` lists those of all grids")
        runs = tracker._runs([experiment.experiment_id for experiment in experiments], "tags.`san.role` = 'trial'")
    return sorted(map(_listed, runs), key=lambda listed: listed.age)


def _listed(run: Run) -> Listed:
    tags, metrics, params = run.data.tags, run.data.metrics, run.data.params
    return Listed(
        grid=tags["san.grid"],
        profile=tags["san.profile"],
        name=tags["mlflow.runName"],
        key=tags["san.trial"],
        state=run.info.status.lower(),
        epoch=int(metrics["epoch"]) if "epoch" in metrics else None,
        epochs=int(params["recipe.epochs"]) if "recipe.epochs" in params else None,
        top1=metrics.get("val/top1"),
        age=time.time() - (run.info.end_time or run.info.start_time) / 1000,
        error=tags.get("san.error"),
    )


def git_commit() -> str:
    """Commit of the project, `unknown` outside a checkout (as in a Ray job's copy)."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def environment() -> str:
    """Hardware, Python and package versions, as text."""
    packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [f"python {platform.python_version()}", platform.platform(), f"{os.cpu_count()} CPUs, {device}"]
    return "\n".join([*lines, "", *packages, ""])
