"""Results of finished trials as a CSV file, which is kept in version control: anyone can check them and continue elsewhere."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.config.grid import Trial
from experiments.errors import UserError
from experiments.tracking import Result

METRICS = {
    "top1": "val/top1",
    "top5": "val/top5",
    "val_loss": "val/loss",
    "train_loss": "train/loss",
    "images_per_second": "summary/images_per_second",
}
"""The metric of each column, after the last epoch."""
CSV_COLUMNS = ("key", "trial", "epochs", "seconds", "ended", *METRICS)


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """A file of finished trials; without a file, there are none. A trial of several grids has one line."""

    path: Path
    measured: tuple[str, ...] = ()
    """Metrics that every trial in the file has, in columns of the same names."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*CSV_COLUMNS, *self.measured)

    def read(self) -> dict[str, Result]:
        """The trials by key.

        Raises:
            UserError: the file was edited; the message names the line.
        """
        results = {}
        with open(self.path, encoding="utf-8", newline="") if self.path.exists() else io.StringIO() as file:
            reader = csv.DictReader(file)
            expected = f"expected a CSV file with the columns {', '.join(self.columns)}"
            if reader.fieldnames is not None and not set(self.columns) <= set(reader.fieldnames):
                raise UserError(f"{self.path}: {expected}; choose another file")
            for row in reader:
                try:
                    metrics = {name: float(row[column]) for column, name in METRICS.items()}
                    metrics |= {name: float(row[name]) for name in self.measured}
                    if not all(map(math.isfinite, metrics.values())):
                        raise ValueError
                    ended = datetime.fromisoformat(row["ended"]).timestamp()
                    tags = {"hardware": row.get("hardware") or ""}
                    results[row["key"]] = Result("", True, metrics, float(row["seconds"]), ended, tags=tags)
                except (TypeError, ValueError):
                    raise UserError(f"{self.path}:{reader.line_num}: {expected}; delete this line") from None
        return results

    def add(self, trials: Iterable[Trial], results: Mapping[str, Result]) -> None:
        """Appends the trials that are finished and measured, and not in the file yet. Other columns of the file stay empty."""
        known, metrics = set(self.read()), (*METRICS.values(), *self.measured)
        with open(self.path, "a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            text = file.read()
            if text and not text.endswith("\n"):  # an editor removed it
                file.write("\n")
            header = next(csv.reader(io.StringIO(text)), None)
            writer = csv.DictWriter(file, header or self.columns, restval="", lineterminator="\n")
            if header is None:
                writer.writeheader()
            for trial in trials:
                result = results.get(trial.key)
                if trial.key in known or result is None or not result.finished or not set(metrics) <= result.metrics.keys():
                    continue
                known.add(trial.key)
                ended = datetime.fromtimestamp(result.ended, UTC).isoformat(timespec="seconds")
                name, epochs = f"{trial.grid}/{trial.name}", trial.config.recipe.epochs
                numbers = [f"{result.metrics[name]:.6g}" for name in metrics]
                line = trial.key, name, epochs, f"{result.seconds:.0f}", ended, *numbers
                writer.writerow(dict(zip(self.columns, line, strict=True)))
