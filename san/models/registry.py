"""The named variants, one row each, and functions to list and create them."""

from __future__ import annotations

import dataclasses
import difflib
from fnmatch import fnmatchcase

from san.choice import choose
from san.models.base import BaseModel, ModelSpec
from san.models.resnet import ResNetSpec
from san.models.san import PairwiseSpec, PatchwiseSpec, ScalarSpec

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


def list_models(pattern: str = "*") -> list[str]:
    """Names of the variants that match a shell pattern, such as `san*_pairwise`."""
    return [name for name in VARIANTS if fnmatchcase(name, pattern)]


def model_spec(name: str, overrides: dict[str, object] | None = None) -> ModelSpec:
    """The spec of a named variant with some of its fields replaced.

    Raises:
        ValueError: unknown name or field, with the names that exist.
    """
    spec = choose("model", name, VARIANTS)
    fields = [field.name for field in dataclasses.fields(spec) if field.name != "name"]
    unknown = sorted(set(overrides or {}) - set(fields))
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"{f'did you mean {near[0]}? I' if near else 'i'}ts fields: {', '.join(fields)}"
        if "pretrained" in unknown:
            hint = "no pretrained weights are included; load a file of the authors with san.load_released_checkpoint"
        raise ValueError(f"{name} has no field {', '.join(unknown)}; {hint}")
    # YAML and JSON have only lists; a spec has tuples, because it is hashable.
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in (overrides or {}).items()}
    return dataclasses.replace(spec, **frozen)  # type: ignore[arg-type]


def create_model(
    name: str, num_classes: int = 1000, *, in_channels: int = 3, features_only: bool = False, **overrides: object
) -> BaseModel:
    """Builds a named variant with fresh weights: images [N, in_channels, H, W] to logits [N, num_classes].

    In the paper, images are RGB with values from 0 to 1. Their shorter side is resized to 256 pixels, 224 x 224 pixels are
    cropped from the center, and the result is normalized with mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225). A SAN
    accepts any size, as long as the footprints fit into the maps; every stage halves the size of the map.

    Any field of the variant's spec can be overridden: `create_model("san10_pairwise", footprint=9)`. With `features_only`, the
    model is a backbone. It has no head and returns the map of every stage, [N, model.channels[s], H / r, W / r] with
    r = model.reductions[s]. The weights of a classifier fit a backbone, except for those of the head.

    Raises:
        ValueError: unknown name or field, or numbers that do not fit together.
    """
    spec = model_spec(name, overrides)
    return spec.build(None if features_only else num_classes, in_channels)
