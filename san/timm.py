"""`import san.timm` registers all variants with timm, and the networks whose weights the package contains:
`timm.create_model("san10_pairwise", num_classes=10)`, `timm.create_model("san10_pairwise_cifar10", pretrained=True)`.

The ResNets are registered as `san_resnet26` and so on, because timm has its own. Needs timm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from san.models import create_model, list_models
from san.models.base import BaseModel
from san.models.pretrained import WEIGHTS, WEIGHTS_DIR, read_config

INCLUDED = list_models(pretrained=True)
VARIANTS = {name if name.startswith("san") else f"san_{name}": name for name in list_models()}
"""Our name of each variant and of each network with weights by its name in timm."""


def _config(variant: str) -> dict[str, Any]:
    first, last = ("conv1", "fc") if variant.startswith("resnet") else ("stem", "head")
    trained: dict[str, Any] = {}
    if variant in INCLUDED:
        folder = WEIGHTS_DIR / variant
        settings = read_config(folder)["pretrained_cfg"].items()
        trained = {key: tuple(value) if isinstance(value, list) else value for key, value in settings}
        trained["file"] = str(folder / WEIGHTS)
    return {
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 224 / 256,
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "num_classes": 1000,
        "first_conv": first,
        "classifier": last,
    } | trained


default_cfgs = generate_default_cfgs({name: _config(variant) for name, variant in VARIANTS.items()})
"""timm finds this by its name."""


def _build(
    variant: str,
    num_classes: int | None = None,
    in_chans: int = 3,
    global_pool: str = "avg",
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    **overrides: object,
) -> BaseModel:
    if global_pool != "avg":
        raise ValueError(f"global_pool must be 'avg', not {global_pool!r}")
    model = create_model(variant, num_classes, in_channels=in_chans, **overrides)  # type: ignore[arg-type]
    model.set_drop_rates(drop_rate, drop_path_rate)
    return model


def _register(name: str, variant: str) -> None:
    def entry(pretrained: bool = False, **settings: Any) -> BaseModel:
        if pretrained and variant not in INCLUDED:
            have = ", ".join(name for name, ours in VARIANTS.items() if ours in INCLUDED)
            raise ValueError(f"{name} has no weights, but {have}; for the authors' files, use san.load_released_checkpoint")
        build = partial(_build, variant)
        build.__name__ = name  # type: ignore[attr-defined]
        known = read_config(WEIGHTS_DIR / variant)["overrides"] if variant in INCLUDED else {}
        maps = settings.get("num_stages") or known.get("num_stages") or 5
        feature_cfg = {"feature_cls": "getter", "out_indices": tuple(range(maps))}
        model: BaseModel = build_model_with_cfg(build, name, pretrained, feature_cfg=feature_cfg, **settings)
        if isinstance(model, BaseModel) and model.num_classes != len(model.pretrained_cfg.get("label_names") or ()):
            model.pretrained_cfg.pop("label_names", None)  # of other classes
        return model

    entry.__name__ = name
    register_model(entry)


for _name, _variant in VARIANTS.items():
    _register(_name, _variant)
