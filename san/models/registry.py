"""The named variants, one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from san.choice import ChoiceError, ModelError, choices, choose
from san.models.base import ModelSpec
from san.models.modules import TIMM, Build, ModuleSpec, module_spec, timm_spec
from san.models.resnet import ResNetSpec
from san.models.san import PairwiseSpec, PatchwiseSpec, ScalarSpec

F = TypeVar("F", bound=Build)

VARIANTS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        PairwiseSpec(name="san10_pairwise", depths=(2, 1, 2, 4, 1)),
        PatchwiseSpec(name="san10_patchwise", depths=(2, 1, 2, 4, 1)),
        ScalarSpec(name="san10_scalar", depths=(2, 1, 2, 4, 1)),
        PairwiseSpec(name="san15_pairwise", depths=(3, 2, 3, 5, 2)),
        PatchwiseSpec(name="san15_patchwise", depths=(3, 2, 3, 5, 2)),
        PairwiseSpec(name="san19_pairwise", depths=(3, 3, 4, 6, 3)),
        PatchwiseSpec(name="san19_patchwise", depths=(3, 3, 4, 6, 3)),
        ResNetSpec(name="resnet26", depths=(1, 2, 4, 1)),
        ResNetSpec(name="resnet38", depths=(2, 3, 5, 2)),
        ResNetSpec(name="resnet50", depths=(3, 4, 6, 3)),
    )
}


def model_spec(name: str, overrides: dict[str, object] | None = None) -> ModelSpec:
    """The spec of a named variant, or of a model of timm (`timm/NAME`), with some of its fields replaced.

    Raises:
        ValueError: unknown name or field, with the names that exist.
    """
    spec = timm_spec(name) if str(name).startswith(TIMM) else _registered(name)
    fields = [field.name for field in dataclasses.fields(spec) if field.name != "name"]
    unknown = sorted(set(overrides or {}) - set(fields))
    if unknown:
        raise ModelError(f"{name} has no field {', '.join(unknown)}; {choices('its fields', unknown[0], fields)}")
    # YAML and JSON have only lists; a spec has tuples, because it is hashable.
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in (overrides or {}).items()}
    return dataclasses.replace(spec, **frozen)  # type: ignore[arg-type]


def _registered(name: str) -> ModelSpec:
    try:
        return choose("model", name, VARIANTS)
    except ChoiceError as error:
        raise ChoiceError("name", f"{error}, timm/NAME, or a model that an imported file registers") from None


def register_model(name: str) -> Callable[[F], F]:
    """Decorator that adds a function, or a subclass of `nn.Module`, as a model: `create_model(name)`, and rows of grids with
    `model: {name: NAME}`.

    The function receives `num_classes` and `in_channels` as keyword arguments and returns a module: images [N, in_channels, H,
    W] to logits [N, num_classes]. Its other parameters need type hints and plain values as defaults; each is a field that grids
    can change.

    Raises:
        ValueError: a network of this package has that name, or a parameter lacks a plain default or a type hint.
    """

    if not isinstance(name, str):
        raise ValueError('register_model needs the name of the model: @san.register_model("NAME")')

    def register(function: F) -> F:
        from san.models.pretrained import included  # imports this file

        is_ours = name in included() or (name in VARIANTS and not isinstance(VARIANTS[name], ModuleSpec))
        if name.startswith(TIMM) or is_ours:
            raise ValueError(f"model {name!r} is a model of this package or of timm; choose another name")
        VARIANTS[name] = module_spec(name, function)
        return function

    return register
