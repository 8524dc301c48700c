"""Classifiers in folders, in the format of the Hugging Face Hub: weights as safetensors, a configuration and a model card.

`san/weights` has a folder for each network that the package contains; `create_model(NAME, pretrained=True)` loads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from san.models.base import BaseModel
from san.models.checkpoint import CheckpointError, check_own, classes, overrides_of, restore, trained_on
from san.models.modules import ModuleSpec

WEIGHTS_DIR = Path(__file__).parents[1] / "weights"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
TEMPLATE = """---
library_name: san
license: {license}
pipeline_tag: image-classification
tags: [image-classification, self-attention]
---

# {title}

A {kind}.

| | |
| --- | --- |
| variant | {variant} |
| settings that differ from the variant | {settings} |
| parameters | {params:,} |
| classes | {num_classes} |
| input channels | {in_channels} |
| training data | {data} |
| accuracy | {accuracy} |
| license | {license} |

{usage}
"""
FROM_HUB = """```python
import san.hub

model = san.hub.from_pretrained("OWNER/NAME")  # the name of this repository
```"""


def included() -> list[str]:
    """Names of the networks whose weights the package contains."""
    return sorted(path.parent.name for path in WEIGHTS_DIR.glob(f"*/{CONFIG}"))


def is_folder(path: str | Path) -> bool:
    """Whether `save_folder` wrote this folder."""
    return os.path.isfile(os.path.join(path, CONFIG))


def save_folder(
    model: BaseModel,
    folder: str | Path,
    *,
    data: str,
    accuracy: str,
    license: str,
    usage: str = FROM_HUB,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Writes a classifier to a folder: `model.safetensors`, `config.json` and the model card `README.md`.

    Args:
        data: what the model was trained on, for the model card.
        accuracy: the accuracy and how it was measured, for the model card.
        license: the license of the weights, an identifier of the Hub such as "mit".
        usage: end of the model card, in Markdown: how to use the model.
        facts: further entries of `config.json`.

    Raises:
        CheckpointError: the model is a backbone, or layers with weights were replaced, so that it could not be loaded again.
    """
    from safetensors.torch import save_file  # here, so that `import san` needs only torch

    check_own(folder, model)
    variant, overrides = model.spec.name, overrides_of(model.spec)
    config = {"variant": variant, "overrides": overrides, "num_classes": classes(model), "in_channels": model.in_channels}
    config |= {"data": data, "accuracy": accuracy, "license": license}
    config |= {"pretrained_cfg": known} if (known := trained_on(model)) else {}
    card = TEMPLATE.format(
        **config,
        title=Path(folder).name,
        kind=_kind(model),
        settings=", ".join(f"{name}={value}" for name, value in overrides.items()) or "none",
        params=sum(parameter.numel() for parameter in model.parameters()),
        usage=usage,
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config | dict(facts or {}), indent=2) + "\n")
    (folder / CARD).write_text(card)


def _kind(model: BaseModel) -> str:
    if isinstance(model.spec, ModuleSpec):
        return "network for image recognition"
    kind = "residual" if model.spec.name.startswith("resnet") else "self-attention"
    return f"{kind} network for image recognition ([paper](https://arxiv.org/abs/2004.13621))"


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration in a folder of `save_folder`.

    Raises:
        CheckpointError: the file cannot be read or lacks an entry.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read this file ({error}); expected a folder of save_pretrained") from None
    needed = ("variant", "overrides", "num_classes", "in_channels")
    if not isinstance(config, dict) or not config.keys() >= set(needed):
        raise CheckpointError(f"{path}: not written by save_pretrained; expected the entries {', '.join(needed)}")
    return config


def load_folder(folder: str | Path) -> BaseModel:
    """Loads a folder of `save_folder`. The model is on the CPU and in evaluation mode.

    Raises:
        CheckpointError: a file cannot be read, or the weights do not fit the model that `config.json` describes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config, path = read_config(folder), Path(folder) / WEIGHTS
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot read this file ({error})") from None
    return restore(path, config["variant"], config, state)


def load_included(name: str, num_classes: int | None, in_channels: int, features_only: bool) -> BaseModel:
    """A network that the package contains, in evaluation mode. For other classes than those of the training, it gets a new
    classifier.

    Raises:
        ValueError: `num_classes` or `in_channels` is impossible.
    """
    model = load_folder(WEIGHTS_DIR / name)
    if in_channels != model.in_channels:
        raise ValueError(
            f"{name} was trained on images with {model.in_channels} channels, not {in_channels}; leave out in_channels"
        )
    if features_only:
        delattr(model, model.classifier_name)
    elif num_classes not in (None, model.num_classes):
        model.reset_classifier(num_classes)
    return model
