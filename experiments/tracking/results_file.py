"""Results of finished trials as a CSV file, which is kept in version control: anyone can check them and continue elsewhere."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
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


def read_results(path: Path) -> dict[str, Result]:
    """Reads the finished trials of a file that `add_results` wrote, by key. Without a file, there are none.

    Raises:
        UserError: the file was edited; the message names the line.
    """
    if not path.exists():
        return {}
    results = {}
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                metrics = {name: float(row[column]) for column, name in METRICS.items() if row[column]}
                ended = datetime.fromisoformat(row["ended"]).timestamp()
                results[row["key"]] = Result("", True, metrics, float(row["seconds"]), ended)
            except (KeyError, TypeError, ValueError):
                message = f"{path}:{reader.line_num}: must have the columns {', '.join(CSV_COLUMNS)}; delete this line"
                raise UserError(message) from None
    return results


def add_results(path: Path, trials: Iterable[Trial], results: Mapping[str, Result]) -> None:
    """Appends the finished trials that the file does not have yet. A trial of several grids has one line."""
    known, is_new = set(read_results(path)), not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(CSV_COLUMNS)
        for trial in trials:
            result = results.get(trial.key)
            if trial.key in known or result is None or not result.finished:
                continue
            known.add(trial.key)
            ended = datetime.fromtimestamp(result.ended, UTC).isoformat(timespec="seconds")
            name, epochs = f"{trial.grid}/{trial.name}", trial.config.recipe.epochs
            values = (result.metrics.get(metric) for metric in METRICS.values())
            numbers = ("" if value is None else f"{value:.6g}" for value in values)
            writer.writerow([trial.key, name, epochs, f"{result.seconds:.0f}", ended, *numbers])
