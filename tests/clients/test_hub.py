"""huggingface_hub: sharing weights, with a local folder in place of the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import san

pytest.importorskip("huggingface_hub", reason="huggingface_hub is missing: run `make test-clients`")

from huggingface_hub import ModelCard

import san.hub
from tests.models.test_pretrained import FACTS, IMAGES, trained


def test_push_uploads_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        """Stores what is uploaded in a folder."""

        def create_repo(self, repo_id: str, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"somebody/{repo_id}")

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
            shutil.copytree(folder_path, tmp_path / repo_id)
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(san.hub, "HfApi", Hub)
    model = trained()
    assert san.hub.push_to_hub(model, "small", **FACTS) == "https://hub/somebody/small"
    assert {path.name for path in (tmp_path / "somebody/small").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    card = ModelCard.load(tmp_path / "somebody/small/README.md")
    assert card.data.license == "mit" and card.data.library_name == "san"
    assert torch.equal(san.hub.from_pretrained(tmp_path / "somebody/small")(IMAGES[:, :1]), model(IMAGES[:, :1]))
