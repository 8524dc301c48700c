"""The numbers of a protocol: paper | ours | difference, and what is lost against no disturbance."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from experiments.evaluation.protocol import TITLES, Numbers, Protocol
from experiments.grids.grid import Trial
from experiments.report import interval
from experiments.report.table import finished_metrics, is_papers_setting
from experiments.report.text import aligned, latex, markdown
from experiments.tracking import Result


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of one row under one condition; percent, None where it is missing."""

    condition: str
    row: str
    number: str
    """`top1`, `top5` or `success`."""
    paper: float | None
    ours: float | None
    """Mean over the seeds of which it is known."""
    half_width: float | None
    """Half of the 95 % confidence interval of `ours`; None for fewer than three seeds."""
    by_seed: tuple[float, ...]
    """The number for each seed of which it is known."""
    difference: float | None
    """Only where the training is the paper's: `is_papers_setting`."""
    paper_drop: float | None
    drop: float | None
    """Percentage points lost against the first condition, mean over the seeds that have both; None for that, and for what it
    does not have."""
    drop_half_width: float | None
    """Half of the 95 % confidence interval of `drop`, by the drops of single seeds; None for fewer than three."""
    seeds: int


def cells_of_grid(
    protocol: Protocol, trials: Sequence[Trial], results: Mapping[str, Result], paper: Mapping[str, Mapping[str, float]]
) -> list[Cell]:
    """The table of a grid. `paper` has what is printed, by row, and by condition and number such as `cw90_top1`."""
    ours = {
        trial.row: [
            {condition.name: condition.found(metrics) for condition in protocol.conditions}
            for metrics in finished_metrics(trial.row, trials, results)
        ]
        for trial in trials
    }
    return cells(protocol, ours, paper, {row for row in ours if is_papers_setting(row, trials)})


def cells(
    protocol: Protocol,
    ours: Mapping[str, Sequence[Mapping[str, Numbers]]],
    paper: Mapping[str, Mapping[str, float]] | None = None,
    comparable: Collection[str] = (),
) -> list[Cell]:
    """A table, condition by condition. `ours` has, by row, the numbers of each condition by its name, once for each seed;
    `comparable` are the rows with a difference to the paper's."""
    first = protocol.conditions[0].name
    found: dict[tuple[str, str, str], Cell] = {}
    for condition in protocol.conditions:
        for row, seeds in ours.items():
            for number in condition.numbers:
                mine = [seed for seed in seeds if number in seed.get(condition.name, {})]
                values = [seed[condition.name][number] for seed in mine]
                both = [seed for seed in mine if number in seed.get(first, {})]
                drops = [seed[first][number] - seed[condition.name][number] for seed in both]
                printed = (paper or {}).get(row, {}).get(f"{condition.name}_{number}")
                mean = statistics.fmean(values) if values else None
                spread, drop_spread = interval.of_mean(values), interval.of_mean(drops)
                before = found.get((first, row, number))
                found[condition.name, row, number] = Cell(
                    condition=condition.name,
                    row=row,
                    number=number,
                    paper=printed,
                    ours=mean,
                    half_width=spread.half_width if spread else None,
                    by_seed=tuple(values),
                    difference=_minus(mean, printed) if row in comparable else None,
                    paper_drop=_minus(before.paper, printed) if before else None,
                    drop=statistics.fmean(drops) if before and drops else None,
                    drop_half_width=drop_spread.half_width if before and drop_spread else None,
                    seeds=len(values),
                )
    return list(found.values())


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


COLUMNS = (
    ("{} paper", "paper", ".1f"),
    ("{} ours", "ours", ".1f"),
    ("difference", "difference", "+.1f"),
    ("drop paper", "paper_drop", ".1f"),
    ("drop ours", "drop", ".1f"),
)
"""Of each number: heading, field of `Cell`, form."""
HALF_WIDTHS = {"ours": "half_width", "drop": "drop_half_width"}
"""Fields of `Cell` that are means, and those with half of their intervals."""


def _rows(table: Sequence[Cell]) -> list[tuple[str, ...]]:
    """A line for each row under each condition, with the numbers beside each other; a column that tells nothing is left out."""
    by_place = {(cell.condition, cell.row, cell.number): cell for cell in table}
    places = list(dict.fromkeys((cell.condition, cell.row) for cell in table))
    columns = [("condition", *(condition for condition, _ in places)), ("row", *(row for _, row in places))]
    for number, title in TITLES.items():
        cells = [by_place.get((*place, number)) for place in places]
        for heading, field, form in COLUMNS:
            if any(cell is not None and getattr(cell, field) is not None for cell in cells):
                columns.append((heading.format(title), *(_text(cell, field, form) for cell in cells)))
    seeds = [max(cell.seeds for cell in table if (cell.condition, cell.row) == place) for place in places]
    if len({number for number in seeds if number}) > 1:
        columns.append(("seeds", *(str(number) for number in seeds)))
    return list(zip(*columns, strict=True))


def _text(cell: Cell | None, field: str, form: str) -> str:
    value = None if cell is None else getattr(cell, field)
    if cell is None or value is None:
        return "-"
    half_width = getattr(cell, HALF_WIDTHS[field]) if field in HALF_WIDTHS else None
    return interval.in_words(value, cell.by_seed if field == "ours" else (), half_width, form)


def as_text(table: Sequence[Cell]) -> str:
    """Columns lined up for a terminal."""
    return aligned(_rows(table), words=2)


def as_markdown(table: Sequence[Cell]) -> str:
    """A Markdown table."""
    return markdown(_rows(table), words=2)


def as_latex(table: Sequence[Cell]) -> str:
    """A LaTeX table."""
    return latex(_rows(table), words=2)


def as_csv(table: Sequence[Cell]) -> str:
    """Full precision, a line for each number."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Cell)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(cell) | {"by_seed": " ".join(map(str, cell.by_seed))} for cell in table)
    return out.getvalue()


FORMS: Mapping[str, Callable[[Sequence[Cell]], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "latex": as_latex,
    "csv": as_csv,
}
