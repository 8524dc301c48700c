"""Files of weights. Reading one never runs code from the file; writing replaces a file completely or not at all.

`save_checkpoint` writes a dict: `name` of the variant, `overrides` (the fields in which the model differs from that variant),
`num_classes`, `in_channels`, `state_dict`, and `pretrained_cfg` if the model has it.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from san.choice import ChoiceError
from san.models.base import BaseModel, ModelSpec
from san.models.registry import model_spec

MAX_LISTED_KEYS = 8  # of each kind, in an error message


class CheckpointError(ValueError):
    """A file cannot be read, written or loaded, or a model cannot be saved in this format. The message is for users."""


def read(path: str | Path) -> dict[str, Any]:
    """Reads a dict that `torch.save` wrote, onto the CPU. Only tensors and plain values are allowed, so no code is run.

    Raises:
        CheckpointError: there is no such file, `torch.save` did not write it, it is not a dict, or loading it would run code.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # torch ignores checksums
            raise zipfile.BadZipFile
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read this file ({error.strerror or error})") from None
    except Exception as error:  # damaged files can raise any exception
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
    """Saves a dict. A kill at any moment leaves either the old or the new file.

    Raises:
        CheckpointError: the file cannot be written, or `read` would reject it.
    """
    path = Path(path)
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path}: not saved, because it could not be loaded again: a setting or a weight is {kind[1] if kind else error}, "
            "but must be a tensor or a plain value of Python"
        ) from None
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
    """Whether a value is a state dict: a non-empty dict of tensors by name."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items())


def on_meta(spec: ModelSpec, num_classes: int, in_channels: int = 3) -> dict[str, Tensor]:
    """The state dict of a classifier on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return spec.build(num_classes, in_channels).state_dict()


def check_fit(path: str | Path, model: str, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Checks that a file's state dict has the names and shapes of `expected`. `num_batches_tracked` may be missing.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ; the message lists them.
    """
    mismatches = _mismatches(expected, state)
    if mismatches:
        raise CheckpointError(f"{path}: does not match {model}; {mismatches}")


def check_own(path: str | Path, model: BaseModel) -> None:
    """Checks that a classifier still matches its spec, so that a file with its weights can be loaded.

    Raises:
        CheckpointError: the model is a backbone, is not one of ours, or layers with weights were replaced.
    """
    num_classes = classes(model)
    mismatches = _mismatches(on_meta(model.spec, num_classes, model.in_channels), model.state_dict())
    if mismatches:
        built = f"{model.spec.name} with {num_classes} classes"
        raise CheckpointError(
            f"{path}: not saved, because the model no longer matches {built} and could not be loaded again; {mismatches}"
        )


def _mismatches(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    shapes = ((key, list(state[key].shape), list(expected[key].shape)) for key in expected if key in state)
    kinds = {key: (state[key].is_floating_point(), state[key].layout) for key in expected if key in state}
    mistakes = {
        "missing": [key for key in expected if key not in state and not key.endswith("num_batches_tracked")],
        "unexpected": [key for key in state if key not in expected],
        "of the wrong shape": [f"{key} {seen} instead of {due}" for key, seen, due in shapes if seen != due],
        "of the wrong type": [
            f"{key} {state[key].dtype}" for key in kinds if kinds[key] != (expected[key].is_floating_point(), torch.strided)
        ],
    }
    return "; ".join(f"{len(keys)} {what}: {_first(keys)}" for what, keys in mistakes.items() if keys)


def _first(keys: list[str]) -> str:
    rest = len(keys) - MAX_LISTED_KEYS
    return ", ".join(keys[:MAX_LISTED_KEYS]) + (f" and {rest} more" if rest > 0 else "")


def classes(model: BaseModel) -> int:
    """Number of classes of a classifier.

    Raises:
        CheckpointError: the model is a backbone, which has no classifier, or is not one of ours.
    """
    require_ours(model)
    if not model.num_classes:
        raise CheckpointError(f"{model.spec.name}: this model has no Linear head; only classifiers can be saved, not backbones")
    return model.num_classes


def require_ours(model: nn.Module) -> None:
    """Raises CheckpointError unless `san.create_model` made the model."""
    if not isinstance(model, BaseModel):
        # As DistributedDataParallel and torch.compile do.
        inner = next((name for name in ("module", "_orig_mod") if isinstance(getattr(model, name, None), BaseModel)), None)
        hint = f"; save the model that it wraps, model.{inner}" if inner else ""
        raise CheckpointError(f"{type(model).__name__}: only models from san.create_model can be saved in this format{hint}")


def overrides_of(spec: ModelSpec) -> dict[str, Any]:
    """The fields in which a spec differs from the named variant."""
    named = model_spec(spec.name)
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return {field: value for field, value in values.items() if value != getattr(named, field)}


def save_checkpoint(model: BaseModel, path: str | Path) -> None:
    """Writes a classifier to a file for `load_checkpoint`, completely or not at all; an existing file is replaced.

    Raises:
        CheckpointError: the model is a backbone, layers with weights were replaced, or the file cannot be written.
    """
    check_own(path, model)
    content = {"name": model.spec.name, "overrides": overrides_of(model.spec), "num_classes": classes(model)}
    content |= {"in_channels": model.in_channels, "state_dict": dict(model.state_dict())}
    write(content | ({"pretrained_cfg": config} if (config := trained_on(model)) else {}), path)


def trained_on(model: BaseModel) -> dict[str, Any]:
    """`model.pretrained_cfg`, without the classes if the classifier was replaced by one for more or fewer; empty if there is
    none."""
    known = dict(getattr(model, "pretrained_cfg", None) or {})
    if len(known.get("label_names") or range(model.num_classes)) != model.num_classes:
        known = {key: value for key, value in known.items() if key not in ("num_classes", "label_names")}
    return known


def is_checkpoint(content: Mapping[str, Any]) -> bool:
    """Whether `content` was written by `save_checkpoint`."""
    return {"name", "overrides", "num_classes", "in_channels", "state_dict"} <= content.keys()


def load_checkpoint(path: str | Path) -> BaseModel:
    """Loads a file of `save_checkpoint` or `san convert`. The model is on the CPU, in evaluation mode, in the default dtype.

    Raises:
        CheckpointError: the file cannot be read, has another format, or its weights do not fit the variant that it names.
    """
    content = read(path)
    if not is_checkpoint(content) or not is_state(content["state_dict"]):
        hint = "`san convert` makes such a file from a trial's checkpoint; load_released_checkpoint reads the authors' files"
        raise CheckpointError(f"{path}: not written by save_checkpoint or `san convert`; {hint}")
    return restore(path, content["name"], content, content["state_dict"])


def restore(path: str | Path, name: str, described: Mapping[str, Any], state: Mapping[str, Tensor]) -> BaseModel:
    """Builds the variant `name` as a file describes it, with `overrides`, `num_classes`, `in_channels` and `pretrained_cfg`, if
    there is one, and loads its weights. The model is on the CPU and in evaluation mode.

    Raises:
        CheckpointError: the model cannot be built, or the weights do not fit it; the message names `path`.
    """
    num_classes, in_channels = described["num_classes"], described["in_channels"]
    try:
        spec = model_spec(name, dict(described["overrides"]))
        expected = on_meta(spec, num_classes, in_channels)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # torch adds a trace of its C++ code
        hint = "; if a file of yours registers it, import this file first" if isinstance(error, ChoiceError) else ""
        raise CheckpointError(f"{path}: the model described in this file cannot be built ({reason}){hint}") from None
    check_fit(path, f"{spec.name} with {num_classes} classes", expected, state)
    model = spec.build(num_classes, in_channels)
    model.load_state_dict(dict(state))  # in a plain dict, torch sets missing values of num_batches_tracked to zero
    if "pretrained_cfg" in described:
        model.pretrained_cfg = described["pretrained_cfg"]
    return model.eval()
