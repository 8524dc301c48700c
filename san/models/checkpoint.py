"""Files of weights: read without running what they carry, written whole or not at all, loaded strictly.

A file of ours is a dict: `name` of the variant, `overrides` (the fields in which the model differs from that variant),
`num_classes`, `in_channels` (3 where it is missing) and `state_dict`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from san.models.registry import model_spec
from san.models.spec import RENAMED_FIELDS, ModelSpec, Trunk

LISTED = 8  # keys of each kind that a refusal names


class CheckpointError(ValueError):
    """A file that cannot be read, written or loaded, or a model that such a file cannot hold; one sentence."""


def read(path: str | Path) -> dict[str, Any]:
    """The dict that `torch.save` wrote to a file, on the CPU. Tensors and plain values only: nothing in the file is run.

    Raises:
        CheckpointError: no such file, not a dict that `torch.save` wrote, or code would have to be run to read it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read this file ({error.strerror or error})") from None
    except Exception as error:  # bytes that are no pickle can raise anything
        code = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if code is None:
            raise CheckpointError(f"{path}: not a file written by torch.save, or damaged") from None
        raise CheckpointError(
            f"{path}: rejected because loading this file would run code ({code[1]}); save only the tensors (the state dict)"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dict of weights, not {type(content).__name__}")
    return content


def write(content: dict[str, Any], path: str | Path) -> None:
    """Saves a dict so that a kill at any moment leaves the old file or the new one.

    Raises:
        CheckpointError: the place cannot be written.
    """
    path = Path(path)
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    buffer = io.BytesIO()
    torch.save(content, buffer)
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path}: exists and is not a regular file; choose another path")
    try:
        with open(partial, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write this file ({error.strerror})") from None
    finally:
        if os.path.exists(partial):
            partial.unlink()


def is_state(value: object) -> bool:
    """Whether a value of a file is a state dict: names to tensors, at least one."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items())


def on_meta(spec: ModelSpec, num_classes: int, in_channels: int = 3) -> dict[str, Tensor]:
    """The state dict of a classifier without its memory: names and shapes."""
    with torch.device("meta"):
        return spec.build(num_classes, in_channels).state_dict()


def check_fit(path: str | Path, model: str, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Whether a file's state dict has the names and shapes that `model` wants. Counts of batches may be missing.

    Raises:
        CheckpointError: with the names that are missing, left over or of another shape.
    """
    told = _misfits(wanted, state)
    if told:
        raise CheckpointError(f"{path}: does not match {model}; {told}")


def check_own(path: str | Path, model: Trunk) -> None:
    """Whether a classifier still is what its record tells, so that a file of it can be loaded.

    Raises:
        CheckpointError: a backbone, none of our models, or one whose layers were replaced.
    """
    num_classes = classes(model)
    told = _misfits(on_meta(model.spec, num_classes, model.in_channels), model.state_dict())
    if told:
        built = f"{model.spec.name} with {num_classes} classes"
        raise CheckpointError(
            f"{path}: not saved, because the model no longer matches {built} and could not be loaded again; {told}"
        )


def _misfits(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    shapes = ((key, list(state[key].shape), list(wanted[key].shape)) for key in wanted if key in state)
    kinds = {key: (state[key].is_floating_point(), state[key].layout) for key in wanted if key in state}
    mistakes = {
        "missing": [key for key in wanted if key not in state and not key.endswith("num_batches_tracked")],
        "unexpected": [key for key in state if key not in wanted],
        "of the wrong shape": [f"{key} {seen} instead of {due}" for key, seen, due in shapes if seen != due],
        "of the wrong type": [
            f"{key} {state[key].dtype}" for key in kinds if kinds[key] != (wanted[key].is_floating_point(), torch.strided)
        ],
    }
    return "; ".join(f"{len(keys)} {what}: {_first(keys)}" for what, keys in mistakes.items() if keys)


def _first(keys: list[str]) -> str:
    rest = len(keys) - LISTED
    return ", ".join(keys[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def classes(model: Trunk) -> int:
    """Number of classes that a classifier answers with.

    Raises:
        CheckpointError: a backbone, which has no head, or a module that is none of ours.
    """
    if not isinstance(model, Trunk):
        raise CheckpointError(f"{type(model).__name__}: only models from san.create_model can be saved in this format")
    if not model.num_classes:
        raise CheckpointError(f"{model.spec.name}: this model has no Linear head; only classifiers can be saved, not backbones")
    return model.num_classes


def overrides_of(spec: ModelSpec) -> dict[str, Any]:
    """The fields in which a record differs from the named variant that it comes from."""
    named = model_spec(spec.name)
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return {field: value for field, value in values.items() if value != getattr(named, field)}


def save_checkpoint(model: Trunk, path: str | Path) -> None:
    """Writes a classifier to a file that `load_checkpoint` reads back, whole or not at all; an old file is replaced.

    Raises:
        CheckpointError: a backbone, a model whose layers were replaced, or a place that cannot be written.
    """
    check_own(path, model)
    content = {"name": model.spec.name, "overrides": overrides_of(model.spec), "num_classes": classes(model)}
    write(content | {"in_channels": model.in_channels, "state_dict": dict(model.state_dict())}, path)


def is_checkpoint(content: Mapping[str, Any]) -> bool:
    """Whether `save_checkpoint` wrote what was read."""
    return {"name", "overrides", "num_classes", "state_dict"} <= content.keys()


def load_checkpoint(path: str | Path) -> Trunk:
    """The classifier that `save_checkpoint` or `san convert` wrote, in evaluation mode, on the CPU, in torch's default dtype.

    Raises:
        CheckpointError: the file cannot be read, is none of ours, or its weights do not fit the variant that it names.
    """
    content = read(path)
    if not is_checkpoint(content) or not is_state(content["state_dict"]):
        hint = "use load_released_checkpoint for the authors' files"
        raise CheckpointError(f"{path}: not written by save_checkpoint or `san convert`; {hint}")
    num_classes, in_channels, state = content["num_classes"], content.get("in_channels", 3), content["state_dict"]
    try:
        stored: dict[str, object] = dict(content["overrides"])
        overrides = {RENAMED_FIELDS.get(field, field): value for field, value in stored.items()}
        spec = model_spec(content["name"], overrides)
        wanted = on_meta(spec, num_classes, in_channels)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).partition("\n")[0]  # torch adds a trace of its C++ code
        raise CheckpointError(f"{path}: the model described in this file cannot be built ({said})") from None
    check_fit(path, f"{spec.name} with {num_classes} classes", wanted, state)
    model = spec.build(num_classes, in_channels)
    model.load_state_dict(dict(state))  # a plain dict, so that torch begins missing counts of batches at zero
    return model.eval()
