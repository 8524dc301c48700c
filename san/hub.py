"""Shares classifiers on the Hugging Face Hub: weights as safetensors, a configuration and a model card.

Needs huggingface_hub and safetensors: `pip install 'san-attention[hub]'`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
from safetensors.torch import load_file, save_file

from san.models.base import BaseModel
from san.models.checkpoint import check_own, classes, overrides_of, restore

WEIGHTS = "model.safetensors"
CARD = """---
{{ card_data }}
---

# {{ variant }}

A self-attention network for image recognition ([paper](https://arxiv.org/abs/2004.13621)).

| | |
| --- | --- |
| variant | {{ variant }} |
| settings that differ from the variant | {{ overrides }} |
| classes | {{ num_classes }} |
| input channels | {{ in_channels }} |
| training data | {{ data }} |
| accuracy | {{ accuracy }} |
| license | {{ license }} |

```python
import san.hub

model = san.hub.from_pretrained("OWNER/NAME")  # the name of this repository
```
"""


class _SharedModel(ModelHubMixin, library_name="san"):  # type: ignore[call-arg,misc]
    """A model with its description. The mixin stores the arguments of `__init__` in `config.json`."""

    model: BaseModel

    def __init__(
        self,
        variant: str,
        overrides: dict[str, object],
        num_classes: int,
        in_channels: int,
        data: str,
        accuracy: str,
        license: str,
    ) -> None:
        self.facts = {"variant": variant, "overrides": overrides, "num_classes": num_classes, "in_channels": in_channels}
        self.facts |= {"data": data, "accuracy": accuracy, "license": license}

    def _save_pretrained(self, save_directory: Path) -> None:
        state = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(state, save_directory / WEIGHTS)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> _SharedModel:
        names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        download = {name: options.pop(name) for name in names}
        folder = Path(model_id)
        path = folder / WEIGHTS if folder.is_dir() else Path(hf_hub_download(model_id, WEIGHTS, **download))
        shared = cls(**options)
        sizes = options["num_classes"], options["in_channels"]
        shared.model = restore(path, options["variant"], options["overrides"], *sizes, load_file(path))
        return shared

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        tags = ["image-classification", "self-attention"]
        data = ModelCardData(license=self.facts["license"], library_name="san", pipeline_tag=tags[0], tags=tags)
        return ModelCard.from_template(data, template_str=CARD, **self.facts)


def save_pretrained(model: BaseModel, folder: str | Path, *, data: str, accuracy: str, license: str) -> None:
    """Writes a classifier to a folder: `model.safetensors`, `config.json` and, unless there is one, the model card `README.md`.

    Args:
        data: what the model was trained on, for the model card.
        accuracy: the accuracy and how it was measured, for the model card.
        license: the license of the weights, an identifier of the Hub such as "mit".

    Raises:
        CheckpointError: the model is a backbone, or layers were replaced, so that it could not be loaded again.
    """
    _shared(model, folder, data, accuracy, license).save_pretrained(folder)


def push_to_hub(model: BaseModel, repo_id: str, *, data: str, accuracy: str, license: str, private: bool | None = None) -> str:
    """Uploads the files of `save_pretrained` to a repository of the Hub, which is created if necessary.

    Sign in with `hf auth login` first. Returns the address of the commit. Arguments and errors are those of `save_pretrained`.
    """
    address: str = _shared(model, repo_id, data, accuracy, license).push_to_hub(repo_id, private=private)
    return address


def from_pretrained(repo_id: str | Path, *, revision: str | None = None) -> BaseModel:
    """Loads a classifier from a repository of the Hub or a local folder. The model is on the CPU and in evaluation mode.

    Args:
        repo_id: "owner/name", or a folder of `save_pretrained`.
        revision: a branch, tag or commit of the repository.

    Raises:
        CheckpointError: the weights do not fit the model that `config.json` describes.
    """
    model: BaseModel = _SharedModel.from_pretrained(repo_id, revision=revision).model
    return model


def _shared(model: BaseModel, path: str | Path, data: str, accuracy: str, license: str) -> _SharedModel:
    check_own(path, model)
    described = model.spec.name, overrides_of(model.spec), classes(model), model.in_channels
    shared = _SharedModel(*described, data, accuracy, license)
    shared.model = model
    return shared
