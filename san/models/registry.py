"""The named variants, one row each, and the two functions that users call on them."""

from __future__ import annotations

import dataclasses
import difflib
from fnmatch import fnmatchcase

from torch import nn

from san.models.resnet import ResNetSpec
from san.models.san import SANSpec
from san.models.spec import ModelSpec

VARIANTS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        SANSpec(name="san10_pairwise", attention="pairwise", depths=(2, 1, 2, 4, 1)),
        SANSpec(name="san10_patchwise", attention="patchwise", depths=(2, 1, 2, 4, 1)),
        SANSpec(name="san15_pairwise", attention="pairwise", depths=(3, 2, 3, 5, 2)),
        SANSpec(name="san15_patchwise", attention="patchwise", depths=(3, 2, 3, 5, 2)),
        SANSpec(name="san19_pairwise", attention="pairwise", depths=(3, 3, 4, 6, 3)),
        SANSpec(name="san19_patchwise", attention="patchwise", depths=(3, 3, 4, 6, 3)),
        ResNetSpec(name="resnet26", depths=(1, 2, 4, 1)),
        ResNetSpec(name="resnet38", depths=(2, 3, 5, 2)),
        ResNetSpec(name="resnet50", depths=(3, 4, 6, 3)),
    )
}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the variants that match a shell pattern, such as `san*_pairwise`."""
    return [name for name in VARIANTS if fnmatchcase(name, pattern)]


def model_spec(name: str, overrides: dict[str, object] | None = None) -> ModelSpec:
    """The record of a named variant with some of its fields replaced.

    Raises:
        ValueError: unknown name or field, with the names that exist.
    """
    if name not in VARIANTS:
        near = difflib.get_close_matches(name, VARIANTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown model {name!r}{hint} Known: {', '.join(VARIANTS)}")
    spec = VARIANTS[name]
    fields = [field.name for field in dataclasses.fields(spec) if field.name != "name"]
    unknown = sorted(set(overrides or {}) - set(fields))
    if unknown:
        raise ValueError(f"{name} has no field {', '.join(unknown)}; its fields: {', '.join(fields)}")
    # YAML and JSON know lists only; the record is a value and holds tuples.
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in (overrides or {}).items()}
    return dataclasses.replace(spec, **frozen)  # type: ignore[arg-type]


def create_model(name: str, num_classes: int = 1000, **overrides: object) -> nn.Module:
    """Builds a named variant with fresh weights: images [N, 3, H, W] to logits [N, num_classes].

    Any field of the variant's record may be overridden: `create_model("san10_pairwise", footprint=9)`.

    Raises:
        ValueError: unknown name or field, or numbers that do not fit together.
    """
    return model_spec(name, overrides).build(num_classes)
