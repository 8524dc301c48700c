"""A cell's checkpoint: written whole or not at all, read only by the trial that wrote it."""

from __future__ import annotations

import os
import pickle
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.training.metrics import Epoch


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after the last epoch of `history`."""

    key: str
    """Content hash of the trial."""
    history: tuple[Epoch, ...]
    engine: dict[str, Any]

    def save(self, path: Path) -> None:
        """Replaces `path` in one step, so that a kill at any moment leaves the old or the new checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        content = {"key": self.key, "history": [asdict(epoch) for epoch in self.history], "engine": self.engine}
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @staticmethod
    def load(path: Path, key: str) -> Checkpoint | None:
        """The checkpoint at `path`, or None where there is none of this trial. One that cannot be read is set aside."""
        if not path.exists():
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
            aside = path.with_suffix(".broken")
            path.replace(aside)
            reason = type(error).__name__
            warnings.warn(f"{path} cannot be read ({reason}); it is kept as {aside.name}, training starts anew", stacklevel=2)
            return None
        if content["key"] != key:
            return None
        return Checkpoint(key, tuple(Epoch(**epoch) for epoch in content["history"]), content["engine"])
