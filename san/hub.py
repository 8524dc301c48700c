"""Shares classifiers on the Hugging Face Hub, in the format of `san.models.pretrained`.

Needs huggingface_hub, which is in the extra `hub`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, snapshot_download

from san.models.base import BaseModel
from san.models.pretrained import CONFIG, WEIGHTS, load_folder
from san.models.pretrained import save_folder as save_pretrained

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]


def push_to_hub(model: BaseModel, repo_id: str, *, data: str, accuracy: str, license: str, private: bool | None = None) -> str:
    """Uploads the files of `save_pretrained` to a repository of the Hub, which is created if necessary.

    Sign in with `hf auth login` first. Returns the address of the commit. Arguments and errors are those of `save_pretrained`.
    """
    api = HfApi()
    with TemporaryDirectory() as parent:
        folder = Path(parent) / repo_id.rpartition("/")[2]
        save_pretrained(model, folder, data=data, accuracy=accuracy, license=license)
        complete_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the name of the user
        return str(api.upload_folder(repo_id=complete_id, folder_path=folder))


def from_pretrained(repo_id: str | Path, *, revision: str | None = None) -> BaseModel:
    """Loads a classifier from a repository of the Hub or a local folder. The model is on the CPU and in evaluation mode.

    Args:
        repo_id: "owner/name", or a folder of `save_pretrained`.
        revision: a branch, tag or commit of the repository.

    Raises:
        CheckpointError: the weights do not fit the model that `config.json` describes.
    """
    if Path(repo_id).is_dir():
        return load_folder(repo_id)
    return load_folder(snapshot_download(str(repo_id), revision=revision, allow_patterns=[WEIGHTS, CONFIG]))
