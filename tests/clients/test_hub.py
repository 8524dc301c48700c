"""huggingface_hub: sharing weights, with a local folder in place of the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import san

hub_mixin = pytest.importorskip("huggingface_hub.hub_mixin", reason="huggingface_hub is missing: run `make test-clients`")

import safetensors.torch  # noqa: E402
from huggingface_hub import ModelCard  # noqa: E402

import san.hub  # noqa: E402

FACTS = {"data": "random images", "accuracy": "10.0% top-1, one crop", "license": "mit"}
IMAGES = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))


def trained() -> san.models.base.BaseModel:
    model = san.create_model("san10_patchwise", 5, in_channels=1, width_mult=0.5, num_stages=2, footprint=5)
    model(IMAGES)  # running statistics
    return model.eval()


def test_a_folder_holds_weights_configuration_and_card(tmp_path: Path) -> None:
    model = trained()
    san.hub.save_pretrained(model, tmp_path / "shared", **FACTS)
    restored = san.hub.from_pretrained(tmp_path / "shared")
    assert restored.spec == model.spec and not restored.training
    assert torch.equal(restored(IMAGES), model(IMAGES))
    assert safetensors.torch.load_file(tmp_path / "shared/model.safetensors").keys() == model.state_dict().keys()
    config = json.loads((tmp_path / "shared/config.json").read_text())
    assert config["variant"] == "san10_patchwise" and config["overrides"]["footprint"] == 5
    card = ModelCard.load(tmp_path / "shared/README.md")
    assert card.data.license == "mit" and card.data.library_name == "san"
    for fact in ("san10_patchwise", "random images", "10.0% top-1", "| license | mit |"):
        assert fact in card.text


def test_push_uploads_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        """Stores what is uploaded in a folder."""

        def __init__(self, **_: Any) -> None:
            self.repo_id = ""

        def create_repo(self, repo_id: str, **_: Any) -> Hub:
            self.repo_id = repo_id
            return self

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
            shutil.copytree(folder_path, tmp_path / repo_id)
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(hub_mixin, "HfApi", Hub)
    model = trained()
    assert san.hub.push_to_hub(model, "somebody/small", **FACTS) == "https://hub/somebody/small"
    assert {path.name for path in (tmp_path / "somebody/small").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert torch.equal(san.hub.from_pretrained(tmp_path / "somebody/small")(IMAGES), model(IMAGES))


def test_rejects_what_could_not_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(san.CheckpointError, match="only classifiers can be saved"):
        san.hub.save_pretrained(san.create_model("resnet26", features_only=True), tmp_path / "shared", **FACTS)
    san.hub.save_pretrained(trained(), tmp_path / "shared", **FACTS)
    config = tmp_path / "shared/config.json"
    config.write_text(config.read_text().replace('"footprint": 5', '"footprint": 3'))
    with pytest.raises(san.CheckpointError, match="does not match san10_patchwise with 5 classes"):
        san.hub.from_pretrained(tmp_path / "shared")
