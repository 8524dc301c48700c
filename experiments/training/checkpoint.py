"""A trial's checkpoints: each written whole or not at all, read only by the trial that wrote them."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pickle
import time
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.errors import UserError
from experiments.grids.config import TrialConfig
from experiments.grids.renamed import with_new_keys
from experiments.runs.summary import Epoch
from experiments.training.engine import validated_weights
from experiments.training.metrics import RunningEpoch
from san.models.base import BaseModel

_log = logging.getLogger(__name__)

OTHER_ENDS = 300.0
"""Seconds within which a process has ended that lost its `san run`: Ray ends those of a node that is cut off after 183 s."""

# What reading a damaged file raises: the archive, torch, the pickle in it, the disk, and what is not there.
DAMAGE = (zipfile.BadZipFile, RuntimeError, EOFError, pickle.UnpicklingError, OSError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a checkpoint tells of its trial, so that it can be evaluated as it was validated."""

    grid: str
    profile: str
    row: str
    seed: int
    record: dict[str, Any]
    """The config as plain values."""
    data_digest: str
    """Of the training and of the validation images, with a dash between them."""
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a trial after the last step of `running`, which follows the whole epochs of `history`."""

    key: str
    """Content hash of the trial."""
    origin: Origin
    history: tuple[Epoch, ...]
    running: RunningEpoch
    engine: dict[str, Any]
    """`Engine.state_dict()`, with what each worker has of its own."""

    @property
    def workers(self) -> int:
        """How many workers the trial had."""
        return len(self.engine["workers"])

    @property
    def name(self) -> str:
        """Of its file; names sort as the training goes."""
        return _name(self.running.number, self.running.steps)

    def model(self) -> BaseModel:
        """The classifier with the weights that validation sees, in evaluation mode, on the CPU."""
        spec = TrialConfig.model_validate(self.origin.record).model.spec()
        model = spec.build(len(self.origin.classes))
        model.load_state_dict(validated_weights(self.engine))
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
        """Raises one of `DAMAGE` where the file is not what was written."""
        return Checkpoint.of_bytes(path.read_bytes())

    @staticmethod
    def of_bytes(content: bytes) -> Checkpoint:
        """What `as_bytes` gave. Raises one of `DAMAGE` where it is not that."""
        # torch writes a checksum for each part of the archive, and does not look at it again.
        broken = zipfile.ZipFile(io.BytesIO(content)).testzip()
        if broken is not None:
            raise zipfile.BadZipFile(f"checksum of {broken}")
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        history = tuple(Epoch(**epoch) for epoch in saved["history"])
        running = RunningEpoch(**saved["running"])
        origin = Origin(**saved["origin"] | {"record": with_new_keys(saved["origin"]["record"])})
        return Checkpoint(saved["key"], origin, history, running, saved["engine"])


def _name(epoch: int, step: int) -> str:
    return f"epoch-{epoch:04d}-step-{step:07d}.pt"


def best_in(folder: Path) -> Checkpoint | None:
    """Of a trial's checkpoints that can be read, the one after the best epoch by top-1; None where there is none."""
    found = []
    for path in sorted(folder.glob("epoch-*-step-0000000.pt")):
        with suppress(*DAMAGE):
            found.append(Checkpoint.read(path))
    return max(found, key=lambda checkpoint: checkpoint.history[-1].top1, default=None)


def last_of(folder: Path, epochs: int) -> Path:
    """The file of a finished trial after its last epoch."""
    return folder / _name(epochs, 0)


class Checkpoints:
    """The checkpoints of one trial in a folder: the last `keep` and the best by top-1. The first worker alone writes.

    Args:
        folder: of this trial alone.
        key: content hash of the trial.
        keep: how many of the last ones stay.
        seconds: between one checkpoint and the next inside an epoch.
    """

    def __init__(self, folder: Path, key: str, keep: int, seconds: float) -> None:
        self.folder, self.key, self.keep, self.seconds = folder, key, keep, seconds
        self._saved_at = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() - self._saved_at >= self.seconds

    def newest(self) -> Path | None:
        """The file of the last checkpoint."""
        return max(self.folder.glob("epoch-*.pt"), default=None)

    def prepare(self) -> None:
        """Makes the folder, and removes what killed writers left there.

        Raises:
            UserError: that cannot be done.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for partial in self.folder.glob("*.partial"):
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot store checkpoints in this folder ({error.strerror})") from None

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; a kill at any moment leaves the ones before as they are.

        Raises:
            UserError: the disk is full or gone; the ones before stay.
        """
        path, partial = self.folder / checkpoint.name, self.folder / f"{uuid.uuid4().hex}.partial"
        content = checkpoint.as_bytes()
        try:
            # The folder is not made again: where a disk has gone, another would be written to in its place.
            with open(partial, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync(self.folder)
            self._remove_old(checkpoint.history)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            kept = self.newest()
            good = f"the last good checkpoint is {kept.name}" if kept else "there is no earlier checkpoint"
            raise UserError(
                f"{path}: cannot write this checkpoint ({error.strerror}); {good}; "
                "check the disk, then run the same command again to resume"
            ) from None
        self._saved_at = time.monotonic()

    def load(self) -> Checkpoint | None:
        """The last checkpoint that can be read, None where there is none; damaged ones are set aside, and the log tells.

        Raises:
            UserError: it is another trial's, or of another version, or the disk does not give it; the file stays as it is.
        """
        for path in sorted(self.folder.glob("epoch-*.pt"), reverse=True):
            try:
                checkpoint = Checkpoint.read(path)
            except OSError as error:
                raise UserError(
                    f"{path}: cannot read this checkpoint ({error.strerror}); check the disk and run the same command again to "
                    "resume, or move the file away to resume from the previous checkpoint"
                ) from None
            except (KeyError, TypeError):
                raise UserError(
                    f"{path}: intact, but written by another version of this project; resume with that version, or move "
                    "the cell's checkpoints away to train from the start"
                ) from None
            except DAMAGE as error:
                self._set_aside(path, error)
                continue
            if checkpoint.key != self.key:
                raise UserError(
                    f"{path}: a checkpoint of cell {checkpoint.key}, not of {self.key}; move the file to the folder of "
                    f"cell {checkpoint.key}"
                )
            return checkpoint
        return None

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_suffix(".broken")
        path.replace(aside)
        before = self.newest()
        goes_on = f"resuming from {before.name}" if before else "no earlier checkpoint, so training starts from the beginning"
        _log.warning("%s: damaged (%s: %s); renamed to %s; %s", path, type(error).__name__, error, aside.name, goes_on)

    def _remove_old(self, history: Sequence[Epoch]) -> None:
        paths = sorted(self.folder.glob("epoch-*.pt"))
        best = max(history, key=lambda epoch: epoch.top1, default=None)
        for path in paths[: -self.keep]:
            if best is None or path.name != _name(best.epoch + 1, 0):
                path.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path, seconds: float = OTHER_ENDS) -> Iterator[None]:
    """Inside, no other process writes the checkpoints in `folder`; waits so long for one that has lost its `san run` and is
    about to end. The lock is gone with the process, however it ends; on NFS, that of a node that was lost after 90 s.

    Raises:
        UserError: the other is still there, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise UserError(f"{folder}: cannot write checkpoints ({error.strerror}); choose another folder with --runs") from None
    limit, told = time.monotonic() + seconds, False
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise UserError(
                        f"{folder}: another process has been training this cell for more than {seconds:.0f} s; "
                        "wait until that process ends, or stop it, then run the same command again to resume"
                    ) from None
                if not told:
                    _log.warning(
                        "%s: another process is training this cell; waiting up to %.0f s for that process", folder, seconds
                    )
                told = True
                time.sleep(0.1)
        yield


def _sync(folder: Path) -> None:
    """Makes a rename last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
