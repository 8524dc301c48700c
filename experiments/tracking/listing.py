"""The runs of a store, as a list."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlflow.entities import Run

from experiments.tracking.address import TrackerError
from experiments.tracking.store import pages, usable
from experiments.tracking.tracker import Tracker


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
    with usable(uri):
        experiments = pages(tracker.client.search_experiments)
        if grid is not None:
            experiments = [experiment for experiment in experiments if experiment.name == grid]
            if not experiments:
                raise TrackerError(f"MLflow at {uri} has no runs of a grid {grid!r}; `san runs` lists those of all grids")
        everywhere = [experiment.experiment_id for experiment in experiments]
        runs = pages(tracker.client.search_runs, everywhere, "tags.`san.role` = 'trial'")
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
