"""Deletes trials: their runs and models in MLflow, checkpoints and logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from experiments.errors import UserError
from experiments.runs.claims import require_idle
from experiments.runs.workspace import Workspace
from experiments.tracking.listing import Listed, list_runs
from experiments.tracking.store import open_client, pages, usable


def find_trials(uri: str, names: Iterable[str]) -> list[Listed]:
    """The runs of trials with these keys, and all runs of grids with these names.

    Raises:
        UserError: there is no such trial or grid.
    """
    runs = list_runs(uri, None)
    chosen = {name: [run for run in runs if name in (run.key, run.grid)] for name in names}
    unknown = [name for name, matches in chosen.items() if not matches]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: no trial or grid with this name in {uri}; list them with `san runs`")
    return [run for run in runs if any(run in matches for matches in chosen.values())]


def delete_trials(workspace: Workspace, trials: Sequence[Listed]) -> None:
    """Deletes all runs and their models, the checkpoints and the logs of trials.

    Raises:
        ClaimedError: a trial is being trained; the trials before it are deleted.
    """
    client, store = open_client(workspace.tracking_uri), workspace.store
    for key in dict.fromkeys(run.key for run in trials):
        require_idle(store, key)
        with usable(workspace.tracking_uri):
            everywhere = [experiment.experiment_id for experiment in pages(client.search_experiments)]
            for model in pages(client.search_logged_models, everywhere, f"tags.`san.trial` = '{key}'"):
                client.delete_logged_model(model.model_id)
            for run in pages(client.search_runs, everywhere, f"tags.`san.trial` = '{key}'"):
                client.delete_run(run.info.run_id)
            store.delete_folder(f"checkpoints/{key}")
            for name in (*store.names("logs"), *store.names("failures")):
                if re.search(rf"-{key}\b", name):
                    store.delete(name)
