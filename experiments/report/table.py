"""The table of a grid: paper | ours | difference, for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import san
from experiments.grid import Grid, Trial
from experiments.report.paper import PaperRow
from experiments.tracking import Result


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; None where a number is missing. Percent, millions, 1e9 multiply-accumulates."""

    id: str
    paper_top1: float | None
    top1: float | None
    """Mean over the finished seeds."""
    difference: float | None
    """Only where the data are the paper's."""
    top5: float | None
    seeds: int
    """Finished seeds behind `top1`."""
    paper_params: float | None
    params: float | None
    paper_flops: float | None
    flops: float | None


def lines(
    grid: Grid,
    trials: Sequence[Trial],
    results: Mapping[str, Result],
    paper: Mapping[str, PaperRow],
    counts: Mapping[str, san.Complexity | None],
) -> list[Line]:
    """The table's rows in the grid's order. `params` and `flops` are those of the paper's setting."""
    table = []
    for row in grid.rows:
        finished = [results[t.key].metrics for t in trials if t.row == row.id and _is_finished(results.get(t.key))]
        top1, top5 = _mean(finished, "val/top1"), _mean(finished, "val/top5")
        printed = paper.get(row.id, PaperRow())
        difference = None
        if trials[0].profile == "imagenet" and top1 is not None and printed.top1 is not None:
            difference = top1 - printed.top1
        ours = counts[row.id]
        params, flops = (ours.params / 1e6, ours.flops_paper / 1e9) if ours else (None, None)
        accuracy = (printed.top1, top1, difference, top5, len(finished))
        table.append(Line(row.id, *accuracy, printed.params, params, printed.flops, flops))
    return table


def _is_finished(result: Result | None) -> bool:
    return result is not None and result.finished


def _mean(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    return statistics.fmean(m[name] for m in metrics) if metrics else None


# Heading, field of `Line`, form: at the precision that the paper prints.
COLUMNS = (
    ("row", "id", "s"),
    ("top-1 paper", "paper_top1", ".1f"),
    ("top-1 ours", "top1", ".1f"),
    ("difference", "difference", "+.1f"),
    ("top-5 ours", "top5", ".1f"),
    ("params M paper", "paper_params", ".1f"),
    ("ours", "params", ".1f"),
    ("FLOPs G paper", "paper_flops", ".1f"),
    ("ours", "flops", ".1f"),
)


def _rows(table: Sequence[Line]) -> list[tuple[str, ...]]:
    """Heading and lines as text; a column without any number is left out."""
    columns = [
        (heading, *(_text(getattr(line, field), form) for line in table))
        for heading, field, form in COLUMNS
        if any(getattr(line, field) is not None for line in table)
    ]
    return list(zip(*columns, strict=True))


def _text(value: str | float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def as_text(table: Sequence[Line]) -> str:
    """Columns lined up for a terminal."""
    rows = _rows(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def as_markdown(table: Sequence[Line]) -> str:
    """A Markdown table."""
    rows = _rows(table)
    rows.insert(1, ("---", *["---:"] * (len(rows[0]) - 1)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def as_csv(table: Sequence[Line]) -> str:
    """Full precision, one column per field of `Line`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in table)
    return out.getvalue()
