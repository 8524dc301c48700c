"""Lists the runs of a store, and deletes trials: their runs and models in MLflow, checkpoints and logs."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from experiments.errors import UserError
from experiments.runs.claims import require_idle
from experiments.runs.store import StorageError
from experiments.runs.workspace import Workspace, checkpoint_folder, has_runs
from experiments.tracking import TrackerError
from experiments.tracking.client import ended_or_begun, open_client, pages, usable

STATES = {"KILLED": "interrupted"}
"""Our names for statuses of MLflow, if they differ."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A trial's run in a list of runs."""

    grid: str
    profile: str
    name: str
    key: str
    state: str
    """running, finished, stopped (by early stopping), failed or interrupted. A run whose `san run` was killed stays "running"
    until it is resumed."""
    epoch: int | None
    epochs: int | None
    top1: float | None
    """Percent, of the last epoch."""
    age: float
    """Seconds since the run ended, or since it started if it has not ended."""
    error: str | None
    differs: str
    """The settings in which runs of the same grid, profile and name differ, such as `recipe.epochs=5`."""


def list_runs(uri: str, grid: str | None) -> list[ListedRun]:
    """The runs of all trials, or of one grid's trials, newest first; none if nothing was ever tracked there.

    Raises:
        TrackerError: the store cannot be used, or has no such grid.
    """
    if not has_runs(uri):
        return []
    client = open_client(uri)
    with usable(uri):
        experiments = pages(client.search_experiments)
        if grid is not None:
            experiments = [experiment for experiment in experiments if experiment.name == grid]
            if not experiments:
                raise TrackerError(f"MLflow at {uri} has no runs of grid {grid!r}; list the runs of all grids with `san runs`")
        everywhere = [experiment.experiment_id for experiment in experiments]
        runs = pages(client.search_runs, everywhere, "tags.`san.role` = 'trial'")
    differences = _differences(runs)
    return sorted((_listed(run, differences.get(run.info.run_id, "")) for run in runs), key=lambda listed: listed.age)


def trial_key(uri: str, name: str) -> str:
    """The key of the trial of a run, given by its id, or of a registered model: `models:/NAME/VERSION` or `models:/NAME@ALIAS`.

    Raises:
        TrackerError: the store cannot be used, or has no such run or model.
    """
    model = re.fullmatch(r"models:/([^/@]+)(?:/(\d+)|@([^/@]+))", name)
    if model is None and name.startswith("models:/"):
        raise TrackerError(f"{name}: not a registered model; expected models:/NAME/VERSION or models:/NAME@ALIAS")
    client, tags = open_client(uri), {}
    with usable(uri):
        try:
            if model is None:
                tags = client.get_run(name).data.tags
            elif model[2]:
                tags = client.get_model_version(model[1], model[2]).tags
            else:
                tags = client.get_model_version_by_alias(model[1], model[3]).tags
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # the second for an alias
                raise
    if "san.trial" not in tags:
        kind = "run of a trial" if model is None else "registered model"
        raise TrackerError(f"{name}: MLflow at {uri} has no such {kind}; use a key from the output of `san runs`")
    return str(tags["san.trial"])


def _differences(runs: Iterable[Run]) -> dict[str, str]:
    """By the id of a run, the settings in which it differs from others of the same grid, profile and name."""
    namesakes: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if run.data.params:  # a trial logs them when it starts to train
            namesakes[tuple(run.data.tags[tag] for tag in ("san.grid", "san.profile", "mlflow.runName"))].append(run)
    found = {}
    for group in namesakes.values():
        names = {name for run in group for name in run.data.params} - {"recipe.lr_used"}  # it follows from other settings
        differ = [name for name in sorted(names) if len({run.data.params.get(name) for run in group}) > 1]
        for run in group:
            values = ((name, run.data.params.get(name, "None")) for name in differ)
            found[run.info.run_id] = " ".join(f"{name}={'null' if value == 'None' else value}" for name, value in values)
    return found


def _listed(run: Run, differs: str) -> ListedRun:
    tags, metrics, params = run.data.tags, run.data.metrics, run.data.params
    return ListedRun(
        grid=tags["san.grid"],
        profile=tags["san.profile"],
        name=tags["mlflow.runName"],
        key=tags["san.trial"],
        state="stopped" if "san.stopped_at" in tags else STATES.get(run.info.status, run.info.status.lower()),
        epoch=int(metrics["epoch"]) if "epoch" in metrics else None,
        epochs=int(params["recipe.epochs"]) if "recipe.epochs" in params else None,
        top1=metrics.get("val/top1"),
        age=time.time() - ended_or_begun(run) / 1000,
        error=tags.get("san.error"),
        differs=differs,
    )


def find_trials(uri: str, names: Collection[str]) -> list[ListedRun]:
    """All runs of the trials that have these keys or are in grids with these names; a trial may be in other grids, too.

    Raises:
        UserError: there is no such trial or grid.
    """
    runs = list_runs(uri, None)
    known = {name for run in runs for name in (run.key, run.grid)}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{', '.join(unknown)}: no trial or grid with this name in {uri}; list them with `san runs`")
    keys = {run.key for run in runs if run.key in names or run.grid in names}
    return [run for run in runs if run.key in keys]


def delete_trials(workspace: Workspace, trials: Sequence[ListedRun]) -> None:
    """Deletes all runs and their models, the checkpoints and the logs of trials.

    Raises:
        ClaimedError: a trial is being trained; the trials before it are deleted.
    """
    client, store = open_client(workspace.tracking_uri), workspace.store
    for key in dict.fromkeys(run.key for run in trials):
        require_idle(store, key)
        with usable(workspace.tracking_uri):
            everywhere = [experiment.experiment_id for experiment in pages(client.search_experiments)]
            runs = pages(client.search_runs, everywhere, f"tags.`san.trial` = '{key}'")
            for run in runs:
                client.delete_run(run.info.run_id)
        try:
            store.delete_folder(checkpoint_folder(key))
            for name in (*store.names(checkpoint_folder(key)), *store.names("logs"), *store.names("failures")):
                if re.search(rf"(-|/){key}\b", name):
                    store.delete(name)
        except StorageError:
            with usable(workspace.tracking_uri):
                for run in runs:  # the command can then be repeated, and `san run` does not continue what is left
                    client.restore_run(run.info.run_id)
            raise
        with usable(workspace.tracking_uri):
            for model in pages(client.search_logged_models, everywhere, f"tags.`san.trial` = '{key}'"):
                client.delete_logged_model(model.model_id)
