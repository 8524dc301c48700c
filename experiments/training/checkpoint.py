"""The checkpoints of a trial, which are its only state: each is written completely or not at all. `resolve_checkpoint` finds
them by name."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import torch

from experiments.config.config import ModelConfig
from experiments.config.grid import KEY, RUN_ID
from experiments.errors import UserError
from experiments.runs.claims import Claim, claim_trial
from experiments.runs.store import LocalStore, StorageError, Store, is_uri
from experiments.runs.summary import Epoch, best_of
from experiments.runs.workspace import checkpoint_folder, has_runs, is_bucket, open_store, tracking_uri
from experiments.training.engine import validated_weights
from experiments.training.metrics import RunningEpoch
from san.choice import similar
from san.models import checkpoint as model_files
from san.models import pretrained
from san.models.base import BaseModel

_log = logging.getLogger(__name__)

# Raised when a damaged file is read: by the archive, by torch, by its pickle or by the disk, or because a key is missing.
DAMAGE = (zipfile.BadZipFile, RuntimeError, EOFError, pickle.UnpicklingError, OSError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from, so that it can be evaluated in the same way as it was validated."""

    grid: str
    profile: str
    row: str
    seed: int
    record: dict[str, Any]
    """The config as plain values."""
    data_digest: str
    """Digests of the training and the validation images, joined by a dash."""
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a trial: the finished epochs in `history` and the finished steps of the current epoch in `running`."""

    key: str
    """Content hash of the trial."""
    origin: Origin
    history: tuple[Epoch, ...]
    running: RunningEpoch
    engine: dict[str, Any]
    """`Engine.state_dict()`."""

    @property
    def workers(self) -> int:
        """Number of workers of the trial."""
        return len(self.engine["workers"])

    @property
    def name(self) -> str:
        """Name of the file."""
        return file_name(self.running.number, self.running.steps)

    def model(self) -> BaseModel:
        """The validated model, in evaluation mode, on the CPU, with its images and classes in `pretrained_cfg`."""
        spec = ModelConfig.model_validate(self.origin.record["model"]).spec()
        model = spec.build(len(self.origin.classes))
        model.load_state_dict(validated_weights(self.engine))
        data = self.origin.record["data"]
        model.pretrained_cfg = {
            "input_size": [3, data["size"], data["size"]],
            "crop_pct": data["size"] / data["resize"],
            "interpolation": "bilinear",
            "mean": list(data["mean"]),
            "std": list(data["std"]),
            "num_classes": len(self.origin.classes),
            "label_names": list(self.origin.classes),
        }
        return model.eval()

    def as_bytes(self) -> bytes:
        content = {
            "key": self.key,
            "origin": asdict(self.origin),
            "history": [asdict(epoch) for epoch in self.history],
            "running": asdict(self.running),
            "engine": self.engine,
        }
        memory = io.BytesIO()
        torch.save(content, memory)
        return memory.getvalue()

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """Raises one of `DAMAGE` if the file is damaged."""
        return Checkpoint.of_bytes(path.read_bytes())

    @staticmethod
    def of_bytes(content: bytes) -> Checkpoint:
        """The inverse of `as_bytes`. Raises one of `DAMAGE` if the content is damaged."""
        # torch writes a checksum for each part of the archive, but does not verify it.
        broken = zipfile.ZipFile(io.BytesIO(content)).testzip()
        if broken is not None:
            raise zipfile.BadZipFile(f"checksum of {broken}")
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        history = tuple(Epoch(**epoch) for epoch in saved["history"])
        running = RunningEpoch(**saved["running"])
        return Checkpoint(saved["key"], Origin(**saved["origin"]), history, running, saved["engine"])


def file_name(epoch: int, step: int) -> str:
    """Names sort by training time."""
    return f"epoch-{epoch:04d}-step-{step:07d}.pt"


def last_of(folder: Path, epochs: int) -> Path:
    """The file of a finished trial after its last epoch."""
    return folder / file_name(epochs, 0)


def best_in(store: Store, folder: str = "") -> Checkpoint | None:
    """The checkpoint after the best epoch by top-1, of those in a folder that can be read: after the last epoch if none was
    validated, and None if there is none."""
    by_epoch: dict[Epoch, Checkpoint] = {}
    for name in store.names(folder):
        if re.fullmatch(r"epoch-\d+-step-0000000\.pt", PurePosixPath(name).name):
            with suppress(*DAMAGE):
                checkpoint = Checkpoint.of_bytes(store.read(name) or b"")
                by_epoch[checkpoint.history[-1]] = checkpoint
    best = best_of(list(by_epoch)) or max(by_epoch, key=lambda epoch: epoch.epoch, default=None)
    return by_epoch[best] if best else None


def weights_file(path: Path) -> Path:
    """The file with the weights of a checkpoint: in a folder of a trial, that of its best epoch.

    Raises:
        UserError: there is none.
    """
    if pretrained.is_folder(path):
        return path / pretrained.WEIGHTS
    if path.suffix == ".safetensors" and not (path.name == pretrained.WEIGHTS and pretrained.is_folder(path.parent)):
        needs = f"a folder with {pretrained.WEIGHTS} and {pretrained.CONFIG}, as san.hub.save_pretrained writes it"
        raise UserError(f"{path}: weights alone do not say to which model they belong; give {needs}")
    if not os.path.isdir(path):
        return path
    best = best_in(LocalStore(path))
    if best is None:
        raise UserError(f"{path}: no readable checkpoint of a complete epoch (epoch-*-step-0000000.pt) in this folder")
    return path / best.name


def read_checkpoint(file: Path) -> Checkpoint | BaseModel | None:
    """The checkpoint of a trial or the model in a file, or None for one of the paper's authors, which may lack fields.

    Raises:
        CheckpointError, UserError: the file cannot be read.
    """
    if file.name == pretrained.WEIGHTS:
        return pretrained.load_folder(file.parent)
    content = model_files.read(file)
    if "engine" not in content:
        return model_files.load_checkpoint(file) if model_files.is_checkpoint(content) else None
    try:
        return Checkpoint.read(file)
    except DAMAGE as error:
        raise UserError(
            f"{file}: checkpoint damaged or written by an older version ({type(error).__name__}: {error})"
        ) from None


class Checkpoints:
    """The checkpoints of one trial: the last `keep` and the best by top-1. Only the process that called `load` last may write.

    Args:
        store, folder: where they are stored.
        key: content hash of the trial.
        keep: how many of the last ones are kept.
        seconds: between two checkpoints within an epoch.
    """

    def __init__(self, store: Store, folder: str, key: str, keep: int, seconds: float) -> None:
        self.store, self.folder, self.key, self.keep, self.seconds = store, folder, key, keep, seconds
        self._claim: Claim | None = None
        self._names: list[str] = []
        """Of the checkpoints in the store, from first to last."""
        self._saved_at = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= self.seconds

    @property
    def newest(self) -> str | None:
        """Name of the last checkpoint."""
        return self._names[-1] if self._names else None

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; the earlier ones are intact if the process is killed meanwhile.

        Raises:
            ClaimedError: another process has taken over the trial; nothing was written.
            StorageError: the store does not accept the checkpoint; the earlier ones are intact.
        """
        self.write(checkpoint.name, checkpoint.as_bytes())
        self._names.append(checkpoint.name)
        self._delete_old(checkpoint.history)
        self._saved_at = time.monotonic()

    def write(self, name: str, content: bytes) -> None:
        """Writes a file beside the checkpoints; raises as `save` does."""
        assert self._claim is not None, "only the owner of a trial writes"
        self._claim.check()
        try:
            self.store.write(self._path(name), content)
        except StorageError as error:
            good = f"the last good checkpoint is {self.newest}" if self.newest else "no earlier checkpoint exists"
            raise StorageError(f"{error}; {good}") from None

    def load(self) -> Checkpoint | None:
        """Makes this process the owner of the trial, and reads its last checkpoint.

        If that is damaged, reads the last intact one; damaged checkpoints are renamed, and the log names them.

        Raises:
            StorageError: the store cannot be read; no checkpoint was changed.
            UserError: a checkpoint belongs to another trial or version; no checkpoint was changed.
        """
        self._claim = claim_trial(self.store, self.folder)
        names = self.store.names(self.folder)
        for name in names:
            if name.endswith(".partial"):  # an earlier owner was killed while it wrote
                self.store.delete(name)
        self._names = [PurePosixPath(name).name for name in names if re.search(r"/epoch-[^/]*\.pt$", name)]
        while self.newest is not None:
            try:
                return self.read(self.newest)
            except (KeyError, TypeError):
                raise UserError(
                    f"{self.uri(self.newest)}: intact, but written by another version of this project; resume with that "
                    "version, or move the trial's checkpoints away to train from the start"
                ) from None
            except UserError:
                raise
            except DAMAGE as error:
                self._set_aside(self._names.pop(), error)
        return None

    def read(self, name: str) -> Checkpoint:
        """Raises one of `DAMAGE` if the file is damaged, else as `load` does."""
        content = self.store.read(self._path(name))
        if content is None:
            raise UserError(f"{self.uri(name)}: deleted while it was being read; run the same command again to resume")
        checkpoint = Checkpoint.of_bytes(content)
        if checkpoint.key != self.key:
            raise UserError(
                f"{self.uri(name)}: a checkpoint of trial {checkpoint.key}, not of {self.key}; move the file to the folder of "
                f"trial {checkpoint.key}"
            )
        return checkpoint

    def uri(self, name: str) -> str:
        return self.store.uri(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _set_aside(self, name: str, error: Exception) -> None:
        aside = name.replace(".pt", ".broken")
        self.store.write(self._path(aside), self.store.read(self._path(name)) or b"")
        self.store.delete(self._path(name))
        before = (
            f"resuming from {self.newest}" if self.newest else "no earlier checkpoint, so training starts from the beginning"
        )
        _log.warning("%s: damaged (%s: %s); renamed to %s; %s", self.uri(name), type(error).__name__, error, aside, before)

    def _delete_old(self, history: Sequence[Epoch]) -> None:
        best = best_of(history)
        for name in self._names[: -self.keep]:
            if best is None or name != file_name(best.epoch + 1, 0):
                self.store.delete(self._path(name))
                self._names.remove(name)


CHECKPOINT = (
    "a file or folder (local or s3://...), a trial's key (see `san runs`), the id of an MLflow run, models:/NAME/VERSION, "
    f"models:/NAME@ALIAS, or a network with weights ({', '.join(pretrained.included())})"
)
"""What `resolve_checkpoint` accepts, for messages."""


@contextmanager
def resolve_checkpoint(name: str, store: Store, tracked_at: str | None = None) -> Iterator[tuple[Path, str | None]]:
    """Finds the local file or folder of a checkpoint by its path, URI, key, run id in MLflow, registered model
    (`models:/NAME/VERSION` or `models:/NAME@ALIAS`), or the name of a network whose weights the package contains.

    A checkpoint in a bucket is downloaded for the duration of the block and comes with its URI; in a folder there, the best
    epoch is chosen. `store` holds the trials, and `tracked_at` is MLflow's address, by default that of `tracking_uri`.

    Raises:
        UserError: there is no such checkpoint, run or model, or MLflow cannot be used.
        StorageError: the bucket cannot be used.
    """
    if not name or (is_uri(name) and not is_bucket(name)):
        shown = f"{name.partition('://')[0]}://..." if name else "''"  # the rest may hold a password
        raise UserError(f"{shown}: not a checkpoint; give {CHECKPOINT}")
    if name in pretrained.included() and not os.path.exists(name):
        yield pretrained.WEIGHTS_DIR / name, None
        return
    asked = _key_in_mlflow(name, store, tracked_at) or name
    if re.fullmatch(KEY, asked) and not os.path.exists(asked):
        if store.shared and not (store.folder / checkpoint_folder(asked)).is_dir():
            raise UserError(
                f"{name}: no such file, and no checkpoints of trial {asked} in {store.folder}; `san runs` lists the trials of "
                "a folder, and --runs selects another one"
            )
        asked = store.uri(checkpoint_folder(asked))
    if not is_uri(asked):
        if re.fullmatch(r"\w+", asked) and not os.path.lexists(asked):  # a name rather than a path
            near = similar(name, pretrained.included())
            hint = f"did you mean `{near}`? Give" if near else "give"
            raise UserError(f"{name}: no such file or name; {hint} {CHECKPOINT}")
        yield Path(os.path.expanduser(asked)), None
        return
    opened = open_store(asked)
    file = ""  # the name of what the address names
    content = opened.read(file)
    if content is None and (best := best_in(opened)) is not None:
        file, content = best.name, opened.read(best.name)
    if content is None:
        raise UserError(f"{opened}: no such file, and no folder with a readable checkpoint of a complete epoch")
    with tempfile.TemporaryDirectory(prefix="san-checkpoint-") as folder:
        path = Path(folder) / (file or urlsplit(asked).path.rpartition("/")[2])
        path.write_bytes(content)
        yield path, opened.uri(file) if file else str(opened)


def _key_in_mlflow(name: str, store: Store, tracked_at: str | None) -> str | None:
    """The key of the trial if the name is a run id or a registered model; otherwise None."""
    is_run = re.fullmatch(RUN_ID, name) and not os.path.exists(name)
    if not is_run and not name.startswith("models:/"):
        return None
    uri = tracked_at or tracking_uri(store)
    if not has_runs(uri):
        raise UserError(f"{name}: no runs in {uri} yet; choose another store with --runs or MLFLOW_TRACKING_URI")
    from experiments.tracking.listing import trial_key  # imports MLflow

    return trial_key(uri, name)
