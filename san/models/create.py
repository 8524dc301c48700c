"""Creates models by name, with fresh or with trained weights."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

from san.models import pretrained as weights
from san.models.base import BaseModel
from san.models.registry import VARIANTS, model_spec


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Names that `create_model` takes and that match a shell pattern, such as `san*_pairwise`: the variants, and the networks
    whose weights the package contains. With `pretrained`, only those networks."""
    return [name for name in [*(() if pretrained else VARIANTS), *weights.included()] if fnmatchcase(name, pattern)]


def create_model(
    name: str,
    num_classes: int | None = None,
    *,
    pretrained: bool = False,
    in_channels: int = 3,
    features_only: bool = False,
    **overrides: object,
) -> BaseModel:
    """Builds a named variant with fresh weights: images [N, in_channels, H, W] to logits [N, num_classes].

    In the paper, images are RGB with values from 0 to 1. Their shorter side is resized to 256 pixels, 224 x 224 pixels are
    cropped from the center, and the result is normalized with mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225). A SAN
    accepts any size, as long as the footprints fit into the maps; every stage halves the size of the map.

    Any field of the variant's spec can be overridden: `create_model("san10_pairwise", footprint=9)`. With `features_only`, the
    model is a backbone. It has no head and returns the map of every stage, [N, model.channels[s], H / r, W / r] with
    r = model.reductions[s]. The weights of a classifier fit a backbone, except for those of the head.

    With `pretrained`, `name` is one of `list_models(pretrained=True)`. The model is then in evaluation mode, and the dict
    `model.pretrained_cfg` has the size, mean and std of its images and the names of its classes, as in timm.

    Args:
        num_classes: by default 1000 and, for a network with weights, the classes of its training; with `pretrained`, another
            number gives a new classifier.

    Raises:
        ValueError: unknown name or field, numbers that do not fit together, or overrides of a pretrained model.
    """
    if isinstance(pretrained, str | os.PathLike):
        raise ValueError(f"pretrained must be True or False, not {pretrained!r}; for a file, use load_checkpoint")
    if pretrained:
        if name not in weights.included():
            have = ", ".join(weights.included())
            raise ValueError(
                f"no weights of {name!r} are included, but of {have}; for the authors' files, use load_released_checkpoint"
            )
        if overrides:
            raise ValueError(
                f"{name} is pretrained and has no other {', '.join(overrides)}; leave it out, or use pretrained=False"
            )
        return weights.load_included(name, num_classes, in_channels, features_only)
    if name in weights.included():
        config = weights.read_config(weights.WEIGHTS_DIR / name)
        name, overrides = config["variant"], config["overrides"] | overrides
        num_classes = config["num_classes"] if num_classes is None else num_classes
    classes = 1000 if num_classes is None else num_classes
    return model_spec(name, overrides).build(None if features_only else classes, in_channels)
