"""Converts between our parameter names and files and those of the authors' released code (github.com/hszhao/SAN)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from san.models.base import BaseModel, ModelSpec
from san.models.checkpoint import (
    CheckpointError,
    check_fit,
    check_own,
    is_checkpoint,
    is_state,
    on_meta,
    read,
    require_ours,
    write,
)
from san.models.registry import VARIANTS, model_spec
from san.models.san import PairwiseSpec, PatchwiseSpec

# Our name and the authors' name; the first match counts. The authors number stages from 0.
RENAMES = (
    ("stem.{rest}", "conv_in.{rest}"),
    ("stem_norm.{rest}", "bn_in.{rest}"),
    ("head.{rest}", "fc.{rest}"),
    ("stage{stage}.linear.{rest}", "conv{stage}.{rest}"),
    ("stage{stage}.norm.{rest}", "bn{stage}.{rest}"),
    ("stage{stage}.blocks.{block}.norm1.{rest}", "layer{stage}.{block}.bn1.{rest}"),
    ("stage{stage}.blocks.{block}.norm2.{rest}", "layer{stage}.{block}.bn2.{rest}"),
    ("stage{stage}.blocks.{block}.linear.{rest}", "layer{stage}.{block}.conv.{rest}"),
    ("stage{stage}.blocks.{block}.attention.phi.{rest}", "layer{stage}.{block}.sam.conv1.{rest}"),
    ("stage{stage}.blocks.{block}.attention.psi.{rest}", "layer{stage}.{block}.sam.conv2.{rest}"),
    ("stage{stage}.blocks.{block}.attention.beta.{rest}", "layer{stage}.{block}.sam.conv3.{rest}"),
    ("stage{stage}.blocks.{block}.attention.gamma.{rest}", "layer{stage}.{block}.sam.conv_w.{rest}"),
    ("stage{stage}.blocks.{block}.attention.position.linear.{rest}", "layer{stage}.{block}.sam.conv_p.{rest}"),
)
PARTS = {".": r"\.", "{stage}": r"(?P<stage>\d+)", "{block}": r"(?P<block>\d+)", "{rest}": r"(?P<rest>.+)"}

# Fields of a spec that may differ from the variant. The other fields are fixed in the released code, and some of them do not
# affect names and shapes, so a model with other values would be loaded as a different one.
SIZES = ("name", "depths", "widths", "num_stages", "width_mult", "footprint")

PREFIX = "module."  # DistributedDataParallel's


def released_key(key: str) -> str:
    """The authors' name for a key of our state dicts.

    Raises:
        ValueError: SAN models have no such key.
    """
    for ours, theirs in RENAMES:
        pattern = ours
        for part, expression in PARTS.items():
            pattern = pattern.replace(part, expression)
        if match := re.fullmatch(pattern, key):
            parts = match.groupdict()
            return theirs.format(**parts | {"stage": int(parts.get("stage", 1)) - 1})
    raise ValueError(f"{key!r} is not a parameter of a SAN model")


def _check_form(spec: ModelSpec) -> None:
    """Raises CheckpointError if the released code has no such network."""
    if not isinstance(spec, PairwiseSpec | PatchwiseSpec):
        raise CheckpointError(
            f"{spec.name} cannot be converted to the authors' format, which has only pairwise and patchwise SANs"
        )
    fixed = [field for field in dataclasses.fields(spec) if field.name not in SIZES]
    other = [field for field in fixed if getattr(spec, field.name) != field.default]
    if other:
        asked = ", ".join(f"{field.name}={getattr(spec, field.name)!r}" for field in other)
        theirs = ", ".join(f"{field.name}={field.default!r}" for field in other)
        raise CheckpointError(f"{spec.name} with {asked} cannot be converted to the authors' format, which requires {theirs}")


def released_state_dict(model: BaseModel) -> dict[str, Tensor]:
    """A model's state dict with the authors' names. The tensors are not copied.

    Raises:
        CheckpointError: the released code has no such network, or the model is not from `san.create_model`.
    """
    require_ours(model)
    _check_form(model.spec)
    if model.in_channels != 3:
        other = f"{model.spec.name} with in_channels={model.in_channels}"
        raise CheckpointError(f"{other} cannot be converted to the authors' format, which requires in_channels=3")
    return {released_key(key): value for key, value in model.state_dict().items()}


def save_released_checkpoint(model: BaseModel, path: str | Path) -> None:
    """Writes a classifier to a file for the released code, completely or not at all; an existing file is replaced.

    Raises:
        CheckpointError: the released code has no such network, the model is a backbone, layers with weights were replaced, or
            the file cannot be written.
    """
    check_own(path, model)
    write({"state_dict": {PREFIX + key: value for key, value in released_state_dict(model).items()}}, path)


def load_released_checkpoint(path: str | Path, /, name: str | None = None, **overrides: object) -> BaseModel:
    """Loads a classifier from a file of the released code: in evaluation mode, on the CPU, in the default dtype.

    `create_model` describes the images with which the authors trained. The file is a checkpoint of the released training or a
    state dict, with or without the prefix of DistributedDataParallel. The variant, the number of classes and the footprint of
    patchwise attention follow from names and shapes. The footprint of pairwise attention does not; it is 7 by default.

    Args:
        path: of the file.
        name: of the variant, instead of the one that follows from the file.
        overrides: fields of the variant's spec.

    Raises:
        CheckpointError: the file cannot be read, or its weights do not fit the variant.
        ValueError: an unknown name or field, or sizes that do not fit together.
    """
    state = _read_state(path)
    name = name or _detect_variant(path, state, overrides)
    spec = model_spec(name, _detect_footprint(state) | overrides)
    _check_form(spec)
    num_classes = next((len(state[key]) for key in ("fc.bias", "fc.weight") if key in state and state[key].dim()), 1000)
    ours = on_meta(spec, num_classes)
    names = {released_key(key): key for key in ours}
    check_fit(path, f"{name} with {num_classes} classes", {theirs: ours[key] for theirs, key in names.items()}, state)
    model = spec.build(num_classes)
    model.load_state_dict({names[key]: value for key, value in state.items()})
    return model.eval()


def _read_state(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file, without the prefix."""
    content = read(path)
    if is_checkpoint(content):
        raise CheckpointError(f"{path}: in this project's format, not the authors'; use load_checkpoint")
    state = content.get("state_dict", content)
    if not is_state(state):
        raise CheckpointError(f"{path}: no state dict found, neither at the top level nor under 'state_dict'")
    has_prefix = all(key.startswith(PREFIX) for key in state)
    return {key.removeprefix(PREFIX): value for key, value in state.items()} if has_prefix else dict(state)


def _detect_variant(path: str | Path, state: Mapping[str, Tensor], overrides: dict[str, object]) -> str:
    """The variant with the kind of attention and the number of blocks per stage that follow from the names."""
    matches = [re.match(r"layer(\d+)\.(\d+)\.sam\.", key) for key in state]
    blocks = sorted({(int(match[1]), int(match[2])) for match in matches if match})
    if not blocks:
        raise CheckpointError(
            f"{path}: not one of the authors' SANs (expected keys such as layer0.0.sam.conv1.weight), and weights alone do not "
            "say to which other model they belong; load them with load_state_dict, and save the model with san.save_checkpoint"
        )
    depths = tuple({stage: block + 1 for stage, block in blocks}.values())
    kind = PairwiseSpec if any(".sam.conv_p." in key for key in state) else PatchwiseSpec
    specs = [model_spec(name, overrides) for name, row in VARIANTS.items() if isinstance(row, kind)]
    variants = {spec.name: spec.kept_depths() for spec in specs if isinstance(spec, kind)}
    for name, kept in variants.items():
        if kept == depths:
            return name
    known = ", ".join(f"{name} {kept}" for name, kept in variants.items())
    raise CheckpointError(f"{path}: {depths} blocks per stage match none of {known}; pass the name of a model, or depths")


def _detect_footprint(state: Mapping[str, Tensor]) -> dict[str, object]:
    """Side of a patchwise footprint: gamma's last Linear has G inputs and K * G outputs. Empty for other files."""
    shape = state["layer1.0.sam.conv_w.5.weight"].shape if "layer1.0.sam.conv_w.5.weight" in state else ()
    if any(".sam.conv_p." in key for key in state) or len(shape) != 4 or not shape[1]:
        return {}
    side = math.isqrt(shape[0] // shape[1])
    return {"footprint": side} if side % 2 else {}
