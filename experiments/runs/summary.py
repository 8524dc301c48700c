"""A cell's `summary.csv`: a row for each epoch of its checkpoint, and when that epoch ended."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.errors import UserError


@dataclass(frozen=True, slots=True)
class Epoch:
    """One line of a run's history; `metrics()` gives it the names that the tracker shows."""

    epoch: int
    lr: float
    train_loss: float
    images_per_second: float
    wait_share: float
    """Share of the training time spent waiting for images, 0 to 1."""
    val_loss: float
    top1: float
    """Percent."""
    top5: float
    """Percent."""

    def metrics(self) -> dict[str, float]:
        names = {
            "train_loss": "train/loss",
            "images_per_second": "train/images_per_second",
            "wait_share": "train/wait_share",
            "val_loss": "val/loss",
            "top1": "val/top1",
            "top5": "val/top5",
        }
        return {names.get(key, key): value for key, value in asdict(self).items() if key != "epoch"}


def write_summary(path: Path, history: Sequence[Epoch], ended: Mapping[int, int]) -> None:
    """Replaces the file in one step. `ended` gives each epoch's end in milliseconds since 1970.

    Raises:
        UserError: the disk is full or gone.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for epoch in history:
                values = asdict(epoch)
                if epoch is history[0]:
                    writer.writerow([*values, "ended"])
                moment = datetime.fromtimestamp(ended[epoch.epoch] / 1000, UTC)
                writer.writerow([*values.values(), moment.isoformat(timespec="milliseconds")])
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot write ({error.strerror}); check the disk, then run the same command again to resume from the "
            "checkpoint"
        ) from None


def read_ended(path: Path) -> dict[int, int]:
    """When the epochs ended that the file tells of, in milliseconds since 1970; nothing where it cannot be read as ours."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return {
                int(row["epoch"]): round(datetime.fromisoformat(row["ended"]).timestamp() * 1000)
                for row in csv.DictReader(file)
            }
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return {}


def read_top1(path: Path) -> list[float]:
    """Top-1 of the epochs that the file tells of, in percent; nothing where it cannot be read as ours."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [float(row["top1"]) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError):
        return []


def read_run_id(folder: Path) -> str | None:
    """The name of the tracker's run in which the checkpoints of a folder began, None where it is not known."""
    try:
        return (folder / "run_id").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def write_run_id(folder: Path, run_id: str) -> None:
    """Keeps it. Grids share cells: another one that goes on with these checkpoints goes on with their run."""
    (folder / "run_id").write_text(f"{run_id}\n", encoding="ascii")
