"""What a page tells of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.grids.grid import Grid, Trial
from experiments.report.attention import Attention
from experiments.report.figures import family
from experiments.report.robustness import Cell
from experiments.report.table import Line
from experiments.tracking import Result

MOST_ROWS = 42
"""Rows of which curves, labels and commands are shown: more could not be told apart."""

Curves = Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
"""By a trial's content hash and the name of a metric: epoch and value."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a cell's network weighs the footprint of a pixel."""

    trial: Trial
    checkpoint: str
    """Where it lies."""
    image: int
    """Number of the validation image."""
    seen: Attention | str
    """Or why there is none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a page tells of."""

    grid: Grid
    name: str
    caption: str
    command: str
    """The `san run` that makes it."""
    overrides: Sequence[str]
    trials: Sequence[Trial]
    results: Mapping[str, Result]
    lines: Sequence[Line]
    curves: Curves
    store: str
    """The tracker's address."""
    looks: Sequence[Look]
    cells: Sequence[Cell]
    """The table of the grid's protocol, where it names one."""

    @property
    def profile(self) -> str:
        return self.trials[0].profile

    def done(self) -> list[tuple[Trial, Result]]:
        """Finished cells, in order."""
        found = [(trial, self.results[trial.key]) for trial in self.trials if trial.key in self.results]
        return [(trial, result) for trial, result in found if result.finished]

    def families(self) -> dict[str, list[Line]]:
        """Lines by the family of their models."""
        families: dict[str, list[Line]] = {}
        of_row = {trial.row: family(trial) for trial in self.trials}
        for line in self.lines:
            families.setdefault(of_row[line.id], []).append(line)
        return families


def shown_rows(lines: Sequence[Line]) -> list[str]:
    """The rows of which a page shows curves, labels and commands: all, or the `MOST_ROWS` best by top-1; in order."""
    best = sorted(lines, key=lambda line: -(line.top1 or 0.0))[:MOST_ROWS]
    kept = {line.id for line in best}
    return [line.id for line in lines if line.id in kept]


def left_out(lines: Sequence[Line], what: str) -> str:
    """A sentence on which rows have `what`, where not all of them do."""
    return f" Only the best {MOST_ROWS} of the {len(lines)} rows, by top-1, have {what}." if len(lines) > MOST_ROWS else ""
