"""The metrics of an epoch; `summary.csv`, which lists the finished epochs of a trial; `confusion.csv`."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Epoch:
    """Metrics of a finished epoch; `metrics()` returns them by their names in MLflow."""

    epoch: int
    lr: float
    train_loss: float
    images_per_second: float
    wait_share: float
    """Share of the training time spent waiting for images, 0 to 1."""
    val_loss: float | None
    """None if the epoch was not validated, like top-1 and top-5."""
    top1: float | None
    """Percent."""
    top5: float | None
    """Percent."""
    train_top1: float | None = None
    """Percent of the training images; None in checkpoints of earlier versions."""
    ended: int = field(default_factory=lambda: int(time.time() * 1000), compare=False)
    """End of the epoch, in milliseconds since 1970."""

    def metrics(self) -> dict[str, float]:
        names = {
            "train_top1": "train/top1",
            "train_loss": "train/loss",
            "images_per_second": "train/images_per_second",
            "wait_share": "train/wait_share",
            "val_loss": "val/loss",
            "top1": "val/top1",
            "top5": "val/top5",
        }
        return {
            names.get(key, key): value
            for key, value in asdict(self).items()
            if key not in ("epoch", "ended") and value is not None
        }


def best_of(history: Sequence[Epoch]) -> Epoch | None:
    """The epoch with the highest top-1, of several the one with the lowest loss; None if none was validated."""
    validated = [
        (epoch.top1, -epoch.val_loss, epoch) for epoch in history if epoch.top1 is not None and epoch.val_loss is not None
    ]
    return max(validated, key=lambda scored: scored[:2])[2] if validated else None


def is_out_of_patience(history: Sequence[Epoch], patience: int | None) -> bool:
    """Whether `patience` epochs have passed since the best one, after a validation; never with None."""
    best = best_of(history)
    if patience is None or best is None or history[-1].top1 is None:  # a finished trial is validated after its last epoch
        return False
    return history[-1].epoch - best.epoch >= patience


SUMMARY = "summary.csv"
"""Name of the file with the finished epochs of a trial, beside its checkpoints."""


def summary_csv(history: Sequence[Epoch]) -> bytes:
    """Content of the file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([each.name for each in fields(Epoch)])
    for epoch in history:
        moment = datetime.fromtimestamp(epoch.ended / 1000, UTC)
        writer.writerow((asdict(epoch) | {"ended": moment.isoformat(timespec="milliseconds")}).values())
    return text.getvalue().encode()


CONFUSION = "confusion.csv"
"""Name of the file with the confusion matrix of a trial, beside its checkpoints."""


@dataclass(frozen=True, slots=True)
class Confusion:
    """The validation images of a trial after its last epoch, by class and by predicted class."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """One row per class, one column per predicted class."""

    @property
    def accuracies(self) -> list[float | None]:
        """Percent of each class that is predicted correctly; None for a class without images."""
        return [100 * row[label] / sum(row) if sum(row) else None for label, row in enumerate(self.counts)]

    def __add__(self, other: Confusion) -> Confusion:
        rows = zip(self.counts, other.counts, strict=True)
        return Confusion(self.classes, tuple(tuple(map(sum, zip(*pair, strict=True))) for pair in rows))

    def as_csv(self) -> bytes:
        """Content of the file."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("class", *self.classes), *zip(self.classes, *zip(*self.counts, strict=True), strict=True)])
        return text.getvalue().encode(errors="surrogateescape")

    @staticmethod
    def of_csv(content: bytes | None) -> Confusion | None:
        """The inverse of `as_csv`; None if the file is missing or was edited."""
        text = (content or b"").decode(errors="surrogateescape")
        try:
            (_, *classes), *rows = csv.reader(io.StringIO(text, newline=""))
            counts = tuple(tuple(map(int, row[1:])) for row in rows)
        except ValueError:
            return None
        is_square = {len(row) for row in (classes, *counts)} == {len(counts)}
        return Confusion(tuple(classes), counts) if classes and is_square else None
