"""The initial weights of a trial that fine-tunes: those of the file `recipe.init`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

from experiments.errors import UserError
from experiments.grids.config import PROJECT_DIR
from experiments.training.checkpoint import DAMAGE, Checkpoint
from san.models import checkpoint, released
from san.models.base import BaseModel, ModelSpec

FREE = ("name", "footprint")
"""Fields of a spec in which a trial may differ from its file."""


def init_digest(path: str | None) -> str:
    """16 hexadecimal digits of a hash of the content of `recipe.init`; empty without a file.

    Raises:
        UserError: the file cannot be read.
    """
    if path is None:
        return ""
    try:
        return hashlib.sha256((PROJECT_DIR / path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(
            f"recipe.init={path}: cannot read this file ({error.strerror}); give a checkpoint, a file of `san convert` or "
            "`san.save_checkpoint`, or a file of the paper's authors"
        ) from None


def initialize(model: BaseModel, path: str, digest: str) -> str:
    """Loads the weights of a file, except the classifier if its number of classes differs. Returns what was done, in words.

    Raises:
        UserError: the file has another digest, contains no weights, or weights of another model.
    """
    if init_digest(path) != digest:
        raise UserError(f"recipe.init={path}: changed since the trial was started; restore the file, or start the grid again")
    try:
        source = _read(PROJECT_DIR / path, model.spec)
        _require_same_function(model.spec, source.spec)
        classes = checkpoint.classes(source)
        state, expected = source.state_dict(), model.state_dict()
        done = f"recipe.init: weights from {path}"
        if classes != model.num_classes:
            state |= {name: weight for name, weight in expected.items() if name.startswith(f"{model.classifier_name}.")}
            done += f", with a new classifier for {model.num_classes} classes instead of {classes}"
        checkpoint.check_fit(path, f"the model {model.spec.name}", expected, state)
    except (checkpoint.CheckpointError, UserError) as error:
        raise UserError(f"recipe.init: {error}") from None
    model.load_state_dict(state)
    return done


def _read(path: Path, spec: ModelSpec) -> BaseModel:
    """The model in a file of any kind. A file of the authors does not name its model, which is then `spec`."""
    content = checkpoint.read(path)
    if "engine" in content:
        try:
            found = Checkpoint.read(path)
        except DAMAGE as error:
            raise UserError(f"{path}: checkpoint damaged or written by an older version ({error})") from None
        return found.model()
    if checkpoint.is_checkpoint(content):
        return checkpoint.load_checkpoint(path)
    return released.load_released_checkpoint(path, spec.name, **checkpoint.overrides_of(spec))


def _require_same_function(wanted: ModelSpec, source: ModelSpec) -> None:
    """Raises UserError if weights of the same shapes would be used differently, for example by another relation."""
    ours, given = asdict(wanted), asdict(source)
    for field in ours if type(wanted) is type(source) else ():
        if field not in FREE and ours[field] != given[field]:
            raise UserError(
                f"the file contains {source.name} with {field}={given[field]}, but the trial's model has "
                f"{field}={ours[field]}; set model.{field} to the value of the file, or use another file"
            )
