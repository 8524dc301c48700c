"""MLflow: one experiment per grid, one parent run per grid and profile, one child run per trial.

Runs of trials are found by the trial's content hash. So a restarted trial continues its run, and a trial that was finished in
any grid is not trained again.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import yaml
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, LifecycleStage, Metric, Param, Run, RunTag
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from experiments.config.config import flat
from experiments.config.grid import Grid, Trial
from experiments.runs.provenance import environment, git_commit, machine, versions
from experiments.runs.summary import Epoch, best_of
from experiments.tracking import Result, TrackerError
from experiments.tracking.client import ended_or_begun, follow_moved_folder, open_client, pages, usable
from san import Complexity

TRIALS = "tags.`san.role` = 'trial'"
"""Selects the runs of trials."""


class Tracker:
    """A grid's experiment on a tracking server or in a local database.

    Args:
        uri: MLflow's tracking URI, such as `sqlite:///runs/mlflow.db` or `http://server:5000`.
        grid: name of the grid and of the experiment.
        profile: name of the profile.
    """

    def __init__(self, uri: str, grid: str, profile: str) -> None:
        self.uri, self.grid, self.profile = uri, grid, profile
        self.client = open_client(uri)

    def prepare(self, grid: Grid, artifacts: Path) -> None:
        """Creates the database, the experiment and the parent run if they are missing, and marks this run as running. Must
        precede all writes of workers.

        `artifacts` is the folder of a local database's artifacts, which may have been moved.

        Raises:
            TrackerError: the tracking server does not respond, or the experiment was deleted.
        """
        with usable(self.uri):
            follow_moved_folder(self.uri, artifacts)
            if self._existing_experiment() is None:
                local = self.uri.startswith("sqlite")
                self.client.create_experiment(self.grid, artifact_location=artifacts.as_uri() if local else None)
            if (parent := self._parent()) is not None:
                self.client.update_run(parent.info.run_id, status="RUNNING")
                return
            tags = {"mlflow.runName": f"{self.grid}-{self.profile}", "san.grid": self.grid, "san.profile": self.profile}
            note = f"{grid.question} Table `{grid.table}` of the paper." if grid.table else grid.question
            tags |= {"san.role": "grid", "mlflow.note.content": note}
            self.client.create_run(self._experiment().experiment_id, tags=tags)

    def results(self) -> dict[str, Result]:
        """Runs of trials by content hash.

        Prefers finished runs of any grid over runs that this grid stopped early, and these over its unfinished runs.
        """
        with usable(self.uri):
            own, runs = self._existing_experiment(), self._anywhere(TRIALS)

        def precedence(run: Run) -> tuple[bool, bool, bool]:
            is_own = own is not None and run.info.experiment_id == own.experiment_id
            is_own = is_own and run.data.tags["san.profile"] == self.profile
            return run.info.status == "FINISHED", self._has_stopped(run), is_own

        return {run.data.tags["san.trial"]: self._result(run) for run in sorted(runs, key=precedence) if any(precedence(run))}

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Epochs (from 1) and values of a metric, in order."""
        with usable(self.uri):
            values = {logged.step: logged.value for logged in self.client.get_metric_history(run_id, metric)}
        return [(step + 1, values[step]) for step in sorted(values)]

    def open(self, trial: Trial, resumed: bool = False) -> TrialRun:
        """Continues the run of a trial, or creates one. A trial that resumes from checkpoints may have its run in another grid.

        Raises:
            TrackerError: the tracking server does not respond.
        """
        with usable(self.uri):
            where = f"tags.`san.trial` = '{trial.key}'"
            runs = self._search(where)
            if resumed and not runs:
                runs = sorted(self._anywhere(where), key=lambda run: -run.info.start_time)
            workers = str(trial.config.resources.workers)
            if runs:
                self.client.update_run(runs[0].info.run_id, status="RUNNING")
                numbers = runs[0].data.tags.get("san.workers", workers).split(",")
                if numbers[-1] != workers:
                    self.client.set_tag(runs[0].info.run_id, "san.workers", ",".join([*numbers, workers]))
                for tag in {"san.error", "san.stopped_by", "san.stopped_at"} & runs[0].data.tags.keys():
                    self.client.delete_tag(runs[0].info.run_id, tag)
                return TrialRun(self.uri, self.client, runs[0].info.run_id)
            parent, commit = self._require_parent(), git_commit()
            tags = {
                "mlflow.runName": trial.name,
                "mlflow.parentRunId": parent.info.run_id,
                "san.role": "trial",
                **trial_tags(trial),
                "san.workers": workers,
                "san.git_commit": commit,
                "mlflow.source.name": f"san run {trial.grid}",
                "mlflow.source.git.commit": commit,
                "san.versions": versions(),
                "san.machine": machine(),
            }
            run = self.client.create_run(self._experiment().experiment_id, tags=tags)
            return TrialRun(self.uri, self.client, run.info.run_id)

    def failed(self, trial: Trial, error: str) -> None:
        """Marks the run of a trial as failed and stores the error."""
        run = self.open(trial, resumed=True)
        with usable(self.uri):
            run.finish(error)

    def interrupted(self, trials: Iterable[Trial]) -> None:
        """Marks the parent run and the running trials as stopped."""
        keys = {trial.key for trial in trials}
        with usable(self.uri):
            if (parent := self._parent()) is not None:
                self.client.set_terminated(parent.info.run_id, status="KILLED")
            for run in self._anywhere(f"{TRIALS} and attributes.status = 'RUNNING'"):
                if run.data.tags["san.trial"] in keys:
                    self.client.set_terminated(run.info.run_id, status="KILLED")

    def add(self, run_id: str, values: Mapping[str, float]) -> None:
        """Adds measurements of a trained network to its run, which may be finished or belong to another grid."""
        with usable(self.uri):
            TrialRun(self.uri, self.client, run_id).add(values)

    def log_report(self, files: Iterable[Path], folder: str | None, complete: bool) -> None:
        """Uploads report files to the parent run, into a folder of its artifacts if one is named, and ends this run: as failed
        unless the last command is complete."""
        with usable(self.uri):
            run_id = self._require_parent().info.run_id
            self.client.set_terminated(run_id, status="FINISHED" if complete else "FAILED")
            for file in files:
                self.client.log_artifact(run_id, str(file), folder)

    def _existing_experiment(self) -> Experiment | None:
        """The grid's experiment, if it exists. Raises TrackerError if it was deleted."""
        experiment = self.client.get_experiment_by_name(self.grid)
        if experiment is not None and experiment.lifecycle_stage == LifecycleStage.DELETED:
            restore = f"MLFLOW_TRACKING_URI={shlex.quote(self.uri)} mlflow experiments restore -x {experiment.experiment_id}"
            raise TrackerError(f"experiment {self.grid!r} was deleted in MLflow; restore it with `{restore}`")
        return experiment

    def _experiment(self) -> Experiment:
        experiment = self._existing_experiment()
        assert experiment is not None, "prepare() creates the experiment first"
        return experiment

    def _require_parent(self) -> Run:
        parent = self._parent()
        assert parent is not None, "prepare() creates the parent run first"
        return parent

    def _parent(self) -> Run | None:
        parents = self._search("tags.`san.role` = 'grid'")
        return parents[0] if parents else None

    def _search(self, where: str) -> list[Run]:
        """Runs of this grid and profile."""
        experiments = [self._experiment().experiment_id]
        runs = pages(self.client.search_runs, experiments, where)
        # Not in the filter, which has no way to quote every name of a file.
        return [run for run in runs if run.data.tags.get("san.profile") == self.profile]

    def _anywhere(self, where: str) -> list[Run]:
        """Runs of any grid."""
        experiments = [experiment.experiment_id for experiment in pages(self.client.search_experiments)]
        return pages(self.client.search_runs, experiments, where)

    def _has_stopped(self, run: Run) -> bool:
        """Whether early stopping of this grid and profile ended a run."""
        return run.data.tags.get("san.stopped_by") == f"{self.grid}-{self.profile}"

    def _result(self, run: Run) -> Result:
        ended = ended_or_begun(run)
        return Result(
            run.info.run_id,
            run.info.status == "FINISHED",
            dict(run.data.metrics),
            (ended - run.info.start_time) / 1000,
            ended / 1000,
            dict(run.data.params),
            stopped_at=int(run.data.tags["san.stopped_at"]) if self._has_stopped(run) else None,
            tags=dict(run.data.tags),
            experiment_id=run.info.experiment_id,
        )


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The child run of one trial, to which only rank 0 writes."""

    uri: str
    client: MlflowClient
    run_id: str

    def describe(self, trial: Trial, complexity: Complexity) -> None:
        """Logs parameters, counts, the resolved config and the environment unless the run has them."""
        run = self.client.get_run(self.run_id)
        if "params" in run.data.metrics:
            return
        values = flat(trial.record) | {"recipe.lr_used": trial.config.recipe.lr_used, "seed": trial.seed}
        # A killed worker may have logged some parameters, and MLflow rejects changed values, such as the number of workers.
        params = [Param(key, str(value)) for key, value in values.items() if key not in run.data.params]
        self.client.log_batch(self.run_id, params=params)
        self.client.log_inputs(self.run_id, dataset_inputs(trial))
        self.client.log_text(self.run_id, yaml.safe_dump(trial.record, sort_keys=False), "config.yaml")
        self.client.log_text(self.run_id, environment(), "environment.txt")
        counts = {
            "params": complexity.params,
            "flops_paper": complexity.flops_paper,
            "flops_actual": complexity.flops_actual,
        }
        self.add(counts)

    def tag(self, tags: Mapping[str, str]) -> None:
        """Sets tags about the latest start, because a trial may resume on another machine."""
        self.client.log_batch(self.run_id, tags=[RunTag(f"san.{name}", value) for name, value in tags.items()])

    def log(self, history: Sequence[Epoch], logged: Set[int] | None = None) -> Set[int]:
        """Logs the epochs that the run does not have yet, so that none is missing or duplicated after a crash.

        `logged` are the epochs of the run; if None, the server is asked. Returns the epochs of the run after logging.
        """
        if logged is None:
            logged = {metric.step for metric in self.client.get_metric_history(self.run_id, "epoch")}
        missing = [epoch for epoch in history if epoch.epoch not in logged]
        metrics = [
            Metric(key, value, epoch.ended, epoch.epoch)
            for epoch in missing
            # "epoch" is the last, because it tells that the others are there: MLflow sends many metrics in several requests.
            for key, value in (epoch.metrics() | {"epoch": epoch.epoch + 1}).items()
        ]
        self.client.log_batch(self.run_id, metrics=metrics)
        return logged | {epoch.epoch for epoch in missing}

    def summarise(self, history: Sequence[Epoch], images: int) -> None:
        """Logs the best and the last epoch, the speed and the hours of training without validation and pauses. An epoch has
        `images` images."""
        best = best_of(history)
        assert best is not None, "the last epoch is validated"
        at_best, at_last = best.metrics(), history[-1].metrics()
        hours = sum(images / epoch.images_per_second for epoch in history) / 3600
        values = {
            "summary/best_top1": at_best["val/top1"],
            "summary/best_top5": at_best["val/top5"],
            "summary/best_epoch": best.epoch + 1,
            "summary/last_top1": at_last["val/top1"],
            "summary/last_top5": at_last["val/top5"],
            "summary/images_per_second": images * len(history) / (3600 * hours),
            "summary/training_hours": hours,
        }
        self.add(values, history[-1].ended)

    def add(self, values: Mapping[str, float], at: int | None = None) -> None:
        """Logs numbers of the trained network. `at` is in milliseconds since 1970, by default now."""
        at = int(time.time() * 1000) if at is None else at
        # At step 0, MLflow draws bars.
        self.client.log_batch(self.run_id, metrics=[Metric(key, value, at, 0) for key, value in values.items()])

    def finish(self, error: str | None = None) -> None:
        """Ends the run. With an error, marks the run as failed and stores the message."""
        if error is not None:
            self.client.log_batch(self.run_id, tags=[RunTag("san.error", error)])
        self.client.set_terminated(self.run_id, status="FAILED" if error else "FINISHED")

    def stop(self, by: str, epoch: int) -> None:
        """Ends the run early after `epoch` epochs; `by` is the grid and profile."""
        self.client.log_batch(self.run_id, tags=[RunTag("san.stopped_by", by), RunTag("san.stopped_at", str(epoch))])
        self.client.set_terminated(self.run_id, status="KILLED")


class NodeMonitor(SystemMetricsMonitor):
    """Logs CPU, memory, disk, network and GPU usage of this node in a thread, which ends if the server does not respond.

    The interval is 10 s, or MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.
    """

    def __init__(self, tracker_uri: str, run_id: str) -> None:
        logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)  # no warnings while a server is unavailable
        super().__init__(run_id, resume_logging=True, tracking_uri=tracker_uri)  # type: ignore[no-untyped-call]
        self.start()  # type: ignore[no-untyped-call]

    @staticmethod
    def is_wanted() -> bool:
        return os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() in ("true", "1")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()


def trial_tags(trial: Trial) -> dict[str, str]:
    """By which runs and registered models are found."""
    return {
        "san.trial": trial.key,
        "san.grid": trial.grid,
        "san.profile": trial.profile,
        "san.row": trial.row,
        "san.data_digest": trial.data_digest,
    }


def dataset_inputs(trial: Trial) -> list[DatasetInput]:
    """The training and the validation images: their folder, which `mlflow.data.get_source` opens, and their digests."""
    data = trial.config.data
    folder = None if data.source == "synthetic" or data.folder is None else data.folder.resolve()
    name = data.source if folder is None else folder.name or data.source
    kind, source = ("code", '{"tags": {}}') if folder is None else ("local", json.dumps({"uri": str(folder)}))
    return [
        DatasetInput(Dataset(name, digest, kind, source), [InputTag("mlflow.data.context", context)])
        for context, digest in zip(("training", "validation"), trial.data_digest.split("-"), strict=True)
    ]
