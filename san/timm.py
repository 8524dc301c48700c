"""`import san.timm` registers all variants with timm: `timm.create_model("san10_pairwise", num_classes=10)`.

The ResNets are registered as `san_resnet26`, `san_resnet38` and `san_resnet50`, because timm has its own. Needs timm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, register_model

from san.models import create_model, list_models
from san.models.base import BaseModel

CONFIG = {
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 224 / 256,
    "interpolation": "bilinear",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "num_classes": 1000,
    "fixed_input_size": False,
}


def _build(
    variant: str,
    num_classes: int = 1000,
    in_chans: int = 3,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    **overrides: object,
) -> BaseModel:
    model = create_model(variant, num_classes, in_channels=in_chans, **overrides)  # type: ignore[arg-type]
    model.set_drop_rates(drop_rate, drop_path_rate)
    return model


def _register(variant: str) -> str:
    name = variant if variant.startswith("san") else f"san_{variant}"

    def entry(pretrained: bool = False, **settings: Any) -> BaseModel:
        if pretrained:
            raise ValueError(f"{name} has no weights to download; use san.load_released_checkpoint for the authors' files")
        config = CONFIG | {"architecture": name, "first_conv": _first_conv(variant), "classifier": _classifier(variant)}
        model: BaseModel = build_model_with_cfg(
            _build, variant, pretrained, pretrained_cfg=config, feature_cfg={"feature_cls": "getter"}, **settings, variant=variant
        )
        return model

    entry.__name__, entry.__module__ = name, __name__
    globals()[name] = register_model(entry)
    return name


def _first_conv(variant: str) -> str:
    return "conv1" if variant.startswith("resnet") else "stem"


def _classifier(variant: str) -> str:
    return "fc" if variant.startswith("resnet") else "head"


NAMES = [_register(variant) for variant in list_models()]
