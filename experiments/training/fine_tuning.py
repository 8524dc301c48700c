"""The initial weights of a trial that fine-tunes or continues: those of the checkpoint `recipe.init`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from experiments.config.config import PROJECT_DIR
from experiments.config.grid import is_checkpoint_name
from experiments.errors import UserError
from experiments.runs.workspace import Workspace
from experiments.training.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint, resolve_checkpoint, weights_file
from san.models import checkpoint, released
from san.models.base import BaseModel, ModelSpec

FREE = ("name", "footprint")
"""Fields of a spec in which a trial may differ from its file."""


def init_digest(init: str | None, workspace: Workspace) -> str:
    """16 hexadecimal digits of a hash of the file with the weights of `recipe.init`; empty without initial weights. A key names
    a trial in the workspace.

    Raises:
        UserError: there is no such checkpoint, or it cannot be read.
    """
    if init is None:
        return ""
    with _weights(init, workspace) as file:
        return _digest(file)


def initialize(
    model: BaseModel,
    init: str,
    digest: str | None,
    workspace: Workspace,
    classes: Sequence[str],
    freeze: Sequence[str] = (),
) -> str:
    """Loads the weights of `recipe.init`, except the classifier if it is for other classes than these. Returns a sentence about
    it. `digest` is that of the file when the trial was planned; None if it has just been computed. `freeze` is that of the
    recipe.

    Raises:
        UserError: the weights have another digest, are of another model, or there are none.
    """
    with _weights(init, workspace) as file:
        if digest is not None and _digest(file) != digest:
            raise UserError("changed since the trial was started; restore the file, or start the grid again")
        source = _read(file, model.spec)
        _require_same_function(model.spec, source.spec)
        number, names = checkpoint.classes(source), checkpoint.trained_on(source).get("label_names")
        state, expected = source.state_dict(), model.state_dict()
        done = f"recipe.init: weights from {init}"
        if number != model.num_classes or (names is not None and tuple(names) != tuple(classes)):
            if not model.classifier_name:
                raise UserError(
                    f"trained on other classes than the images have, and the classifier of {model.spec.name} is not known; use "
                    "weights for the same classes, or one of this project's networks"
                )
            if "head" in freeze:
                raise UserError("recipe.freeze: `head` would stay random, because the images have other classes; leave it out")
            state |= {name: weight for name, weight in expected.items() if name.startswith(f"{model.classifier_name}.")}
            other = (
                f"{model.num_classes} classes instead of {number}"
                if number != model.num_classes
                else "the classes of the images"
            )
            done += f", with a new classifier for {other}"
        checkpoint.check_fit(file, f"the model {model.spec.name}", expected, state)
    model.load_state_dict(state)
    return done


@contextmanager
def _weights(init: str, workspace: Workspace) -> Iterator[Path]:
    """The file with the weights of `recipe.init`: of a trial, those of its best epoch. Errors in the block name `init`."""
    path = PROJECT_DIR / init
    named = init if is_checkpoint_name(init) and not os.path.lexists(path) else str(path)
    try:
        with resolve_checkpoint(named, workspace.store, workspace.tracking_uri) as (found, _):
            yield weights_file(found)
    except OSError as error:
        raise UserError(
            f"recipe.init={init}: cannot read this file ({error.strerror}); give {CHECKPOINT}, a file of `san convert` or "
            "`san.save_checkpoint`, or a file of the paper's authors"
        ) from None
    except (checkpoint.CheckpointError, UserError) as error:
        raise UserError(f"recipe.init={init}: {error}") from None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _read(file: Path, spec: ModelSpec) -> BaseModel:
    """The model in a file of any kind. A file of the authors does not name its model, which is then `spec`."""
    found = read_checkpoint(file)
    if found is None:
        return released.load_released_checkpoint(file, spec.name, **checkpoint.overrides_of(spec))
    return found.model() if isinstance(found, Checkpoint) else found


def _require_same_function(wanted: ModelSpec, source: ModelSpec) -> None:
    """Raises UserError if weights of the same shapes would be used differently, for example by another relation."""
    ours, given = asdict(wanted), asdict(source)
    for field in ours if type(wanted) is type(source) else ():
        if field not in FREE and ours[field] != given[field]:
            raise UserError(
                f"the file contains {source.name} with {field}={given[field]}, but the trial's model has "
                f"{field}={ours[field]}; set model.{field} to the value of the file, or use another file"
            )
