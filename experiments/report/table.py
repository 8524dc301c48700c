"""The table of a grid: paper | ours | difference, for a terminal, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import san
from experiments.grids.grid import Grid, Trial
from experiments.grids.paper import CLASSES, EPOCHS, INPUT_SIZE, PaperRow
from experiments.report import interval
from experiments.report.text import aligned, latex, markdown
from experiments.tracking import Result
from experiments.training.images import open_data


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; None where a number is missing. Percent, millions, 1e9 multiply-accumulates."""

    id: str
    paper_top1: float | None
    top1: float | None
    """Mean over the finished seeds."""
    top1_half_width: float | None
    """Half of the 95 % confidence interval of `top1`; None for fewer than three seeds."""
    top1_by_seed: tuple[float, ...]
    """Top-1 of each finished seed."""
    difference: float | None
    """Only where the training is the paper's: `is_papers_setting`."""
    top5: float | None
    seeds: int
    """Finished seeds behind `top1`."""
    paper_params: float | None
    params: float | None
    paper_flops: float | None
    flops: float | None
    note: str | None = None
    """Which seeds were stopped early."""


def lines(
    grid: Grid,
    trials: Sequence[Trial],
    results: Mapping[str, Result],
    paper: Mapping[str, PaperRow],
    counts: Mapping[str, san.Complexity | None],
) -> list[Line]:
    """The table's rows in the grid's order. `counts` are those of the paper's setting; a row without any has none."""
    table = []
    stopped = {key: result.stopped_at for key, result in results.items() if result.stopped_at is not None}
    for row in grid.rows:
        finished = finished_metrics(row.id, trials, results)
        top1, top5 = _mean(finished, "val/top1"), _mean(finished, "val/top5")
        by_seed = tuple(metrics["val/top1"] for metrics in finished)
        spread = interval.of_mean(by_seed)
        printed = paper.get(row.id, PaperRow())
        difference = None
        if top1 is not None and printed.top1 is not None and is_papers_setting(row.id, trials):
            difference = top1 - printed.top1
        ours = counts.get(row.id)
        params, flops = (ours.params / 1e6, ours.flops_paper / 1e9) if ours else (None, None)
        accuracy = (printed.top1, top1, spread.half_width if spread else None, by_seed, difference, top5, len(finished))
        note = _told(row.id, trials, stopped) if stopped else None
        table.append(Line(row.id, *accuracy, printed.params, params, printed.flops, flops, note))
    return table


def is_papers_setting(row: str, trials: Sequence[Trial]) -> bool:
    """Whether a row's accuracies can be compared with the paper's: photographs of 1000 classes, all of them, and the profile's
    size and epochs. What else an override changes is what the user asks."""
    return all(_is_as_in_the_paper(trial) for trial in trials if trial.row == row)


def _is_as_in_the_paper(trial: Trial) -> bool:
    data, epochs = trial.config.data, trial.config.recipe.epochs
    if trial.profile != "imagenet" or (data.size, epochs) != (INPUT_SIZE, EPOCHS):
        return False
    are_photographs = data.source in ("folder", "shards") and data.train_per_class is None
    return are_photographs and len(open_data(data)[0].classes) == CLASSES


def finished_metrics(row: str, trials: Sequence[Trial], results: Mapping[str, Result]) -> list[Mapping[str, float]]:
    """The metrics of a row's finished trials, one mapping per seed, in the order of the trials."""
    found = [results[trial.key] for trial in trials if trial.row == row and trial.key in results]
    return [result.metrics for result in found if result.finished]


def _told(row: str, trials: Sequence[Trial], stopped: Mapping[str, int]) -> str | None:
    """After which epochs a row's trials were stopped, None where none was."""
    mine = [trial for trial in trials if trial.row == row]
    told = [
        f"{f'seed {trial.seed} ' if len(mine) > 1 else ''}stopped at epoch {stopped[trial.key]} of {trial.config.recipe.epochs}"
        for trial in mine
        if trial.key in stopped
    ]
    return f"{', '.join(told)} by early stopping" if told else None


def _mean(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    return statistics.fmean(m[name] for m in metrics) if metrics else None


Column = tuple[str, str, str]
"""Heading, field of `Line`, form: at the precision that the paper prints."""

ACCURACY: tuple[Column, ...] = (
    ("row", "id", "s"),
    ("top-1 paper", "paper_top1", ".1f"),
    ("top-1 ours", "top1", ".1f"),
    ("seeds", "seeds", "d"),
)
COLUMNS: tuple[Column, ...] = (
    *ACCURACY,
    ("difference", "difference", "+.1f"),
    ("top-5 ours", "top5", ".1f"),
    ("params M paper", "paper_params", ".1f"),
    ("params M ours", "params", ".1f"),
    ("FLOPs G paper", "paper_flops", ".1f"),
    ("FLOPs G ours", "flops", ".1f"),
    ("note", "note", "s"),
)

SHORT = tuple(column for column in COLUMNS if column[1] not in ("top5", "paper_params", "paper_flops"))
"""Columns where there is not much room; parameters and FLOPs are those of the paper's setting in any case."""


def _rows(table: Sequence[Line], columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """Heading and lines as text; a column that tells nothing is left out."""
    kept = [
        (heading, *(_text(line, field, form) for line in table)) for heading, field, form in columns if _tells(field, table)
    ]
    return list(zip(*kept, strict=True))


def _tells(field: str, table: Sequence[Line]) -> bool:
    """Whether there is any number; a single seed goes without saying."""
    if field == "seeds":
        return any(line.seeds > 1 for line in table)
    return any(getattr(line, field) is not None for line in table)


def _text(line: Line, field: str, form: str) -> str:
    value = getattr(line, field)
    if value is None:
        return "-"
    return interval.in_words(value, line.top1_by_seed, line.top1_half_width, form) if field == "top1" else format(value, form)


def as_text(table: Sequence[Line]) -> str:
    """Columns lined up for a terminal."""
    return aligned(_rows(table, COLUMNS))


def as_markdown(table: Sequence[Line], columns: Sequence[Column] = COLUMNS) -> str:
    """A Markdown table, of all columns or of some."""
    return markdown(_rows(table, columns), words=1)


def as_latex(table: Sequence[Line]) -> str:
    """A table for a paper; it needs booktabs."""
    return latex(_rows(table, COLUMNS))


def as_csv(table: Sequence[Line]) -> str:
    """Full precision, one column per field of `Line`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) | {"top1_by_seed": " ".join(map(str, line.top1_by_seed))} for line in table)
    return out.getvalue()


FORMS: Mapping[str, Callable[[Sequence[Line]], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "latex": as_latex,
    "csv": as_csv,
}
"""By name."""
