"""Finds checkpoints by name: files, folders, addresses, keys of trials, runs and models of MLflow, networks with weights."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from experiments.errors import UserError
from experiments.grids.grid import KEY, RUN_ID
from experiments.runs.store import is_uri
from experiments.runs.workspace import STORES, has_store, open_store, open_workspace
from experiments.training.checkpoint import best_in
from san.models import pretrained

CHECKPOINT = (
    "a file or folder (local or s3://...), a trial's key (see `san runs`), the id of an MLflow run, models:/NAME/VERSION, or "
    f"a network with weights ({', '.join(pretrained.included())})"
)
"""What `resolve_checkpoint` accepts, for messages."""


@contextmanager
def resolve_checkpoint(name: str, runs: str | Path | None) -> Iterator[tuple[Path, str | None]]:
    """Finds the local file or folder of a checkpoint by its path, URI, key, run id in MLflow, registered model
    (`models:/NAME/VERSION` or `models:/NAME@ALIAS`), or the name of a network whose weights the package contains.

    A checkpoint in a bucket is downloaded for the duration of the block and comes with its URI; in a folder there, the best
    epoch is chosen. `runs` is the store, as in `open_workspace`.

    Raises:
        UserError: there is no such checkpoint, run or model, or MLflow cannot be used.
        StorageError: the bucket cannot be used.
    """
    if not name or (is_uri(name) and name.partition("://")[0] not in STORES):
        shown = f"{name.partition('://')[0]}://..." if name else "''"  # the rest may hold a password
        raise UserError(f"{shown}: not a checkpoint; give {CHECKPOINT}")
    if name in pretrained.included() and not os.path.exists(name):
        yield pretrained.WEIGHTS_DIR / name, None
        return
    store, asked = open_store(runs), _key_in_mlflow(name, runs) or name
    if re.fullmatch(KEY, asked) and not os.path.exists(asked):
        if store.shared and not (store.folder / "checkpoints" / asked).is_dir():
            raise UserError(
                f"{name}: no such file, and no checkpoints of trial {asked} in {store.folder}; `san runs` lists the trials of "
                "a folder, and --runs selects another one"
            )
        asked = store.uri(f"checkpoints/{asked}")
    if not is_uri(asked):
        yield Path(os.path.expanduser(asked)), None
        return
    opened = open_store(asked)
    file = ""  # the name of what the address names
    if (content := opened.read(file)) is None:
        best = best_in(opened)
        if best is None:
            raise UserError(f"{opened}: no such file, and no folder with a readable checkpoint of a complete epoch")
        file, content = best.name, best.as_bytes()
    with tempfile.TemporaryDirectory(prefix="san-checkpoint-") as folder:
        path = Path(folder) / (file or urlsplit(asked).path.rpartition("/")[2])
        path.write_bytes(content)
        yield path, opened.uri(file) if file else str(opened)


def _key_in_mlflow(name: str, runs: str | Path | None) -> str | None:
    """The key of the trial if the name is a run id or a registered model; otherwise None."""
    is_run = re.fullmatch(RUN_ID, name) and not os.path.exists(name)
    if not is_run and not name.startswith("models:/"):
        return None
    uri = open_workspace(runs).tracking_uri
    if not has_store(uri):
        raise UserError(f"{name}: no runs in {uri} yet; choose another store with --runs or MLFLOW_TRACKING_URI")
    from experiments.tracking.listing import trial_key  # imports MLflow

    return trial_key(uri, name)
