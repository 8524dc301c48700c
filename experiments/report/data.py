"""The results of a grid as plain records."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import san
from experiments.config.config import value_at
from experiments.config.grid import Trial
from experiments.evaluation.robustness import PROTOCOLS, Numbers, Protocol
from experiments.paper.tables import (
    CLASSES,
    EPOCHS,
    INPUT_SIZE,
    PaperRow,
    count,
    counts_at_paper_setting,
    paper_numbers,
    paper_rows,
)
from experiments.report.interval import half_width
from experiments.runner.grid_run import GridRun, finished_trials
from experiments.runs.summary import Confusion
from experiments.tracking import Result
from experiments.training.images import open_data

SeedValues = tuple[tuple[float, ...], float | None]
"""The values of the seeds, and half of the 95 % confidence interval of their mean."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a grid's table in percent, millions and 1e9 multiply-accumulates; None for a missing number."""

    id: str
    paper_top1: float | None
    top1: float | None
    """Mean over the finished seeds."""
    top1_half_width: float | None
    """Half of the 95 % confidence interval of `top1`; None for fewer than three seeds."""
    top1_by_seed: tuple[float, ...]
    """Top-1 of each finished seed."""
    difference: float | None
    """Ours minus the paper's; None unless the training matches the paper's (`is_papers_setting`)."""
    top5: float | None
    """None for at most five classes, with which it is always 100."""
    seeds: int
    """Number of finished seeds."""
    paper_params: float | None
    params: float | None
    paper_flops: float | None
    flops: float | None
    note: str | None = None
    """The seeds that were stopped early."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The values of the keys in the grid's `product`."""

    @property
    def flops_millions(self) -> float | None:
        return None if self.flops is None else 1000 * self.flops

    def spread_of(self, field: str) -> SeedValues:
        return (self.top1_by_seed, self.top1_half_width) if field == "top1" else ((), None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number of one row under one condition of a protocol, in percent; None for a missing number."""

    condition: str
    row: str
    number: str
    """`top1`, `top5` or `success`."""
    paper: float | None
    ours: float | None
    """Mean over the seeds with this number."""
    half_width: float | None
    """Half of the 95 % confidence interval of `ours`; None for fewer than three seeds."""
    by_seed: tuple[float, ...]
    difference: float | None
    """Ours minus the paper's; None unless the training matches the paper's (`is_papers_setting`)."""
    paper_drop: float | None
    drop: float | None
    """Percentage points lost compared with the first condition, mean over the seeds with both numbers. None for the first
    condition and for numbers that the first condition lacks."""
    drop_half_width: float | None
    """Half of the 95 % confidence interval of `drop`, from the drops of single seeds; None for fewer than three seeds."""
    seeds: int

    def spread_of(self, field: str) -> SeedValues:
        if field == "ours":
            return self.by_seed, self.half_width
        return (), self.drop_half_width if field == "drop" else None


def table_rows(grid_run: GridRun, results: Mapping[str, Result]) -> list[TableRow]:
    """The rows of a grid's table in the grid's order, with the numbers of finished trials. Counts are those of the full-size
    models if the grid is a table of the paper, otherwise of the trained ones."""
    grid, trials = grid_run.grid, grid_run.trials
    paper = {} if grid.table is None else paper_rows(grid.table)
    counts = counts_of_trained(trials) if grid.table is None else counts_at_paper_setting(grid_run.full_size)
    of_row = {row.id: [trial for trial in trials if trial.row == row.id] for row in grid.rows}
    return [_table_row(row, of_row[row], results, paper.get(row, PaperRow()), counts.get(row), grid.product) for row in of_row]


def _as_in_a_grid(value: object) -> str:
    """A value as in a grid file."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def counts_of_trained(trials: Iterable[Trial]) -> Mapping[str, san.Complexity]:
    """Parameters and FLOPs of every row's model, for the classes and the image size with which it is trained."""
    return {trial.row: count(trial.config.model.spec(), trial.config.data.size, class_count(trial)) for trial in trials}


def class_count(trial: Trial) -> int:
    """Number of classes of a trial's images."""
    return len(open_data(trial.config.data)[0].classes)


def _table_row(
    row: str,
    trials: Sequence[Trial],
    results: Mapping[str, Result],
    paper: PaperRow,
    counts: san.Complexity | None,
    product: Iterable[str],
) -> TableRow:
    """`trials` are those of the row, and `product` has the keys of the grid's product."""
    has_top5 = all(class_count(trial) > 5 for trial in trials)
    finished = [result.metrics for _, result in finished_trials(trials, results)]
    by_seed = tuple(metrics["val/top1"] for metrics in finished)
    top1 = _mean(by_seed)
    return TableRow(
        id=row,
        paper_top1=paper.top1,
        top1=top1,
        top1_half_width=half_width(by_seed),
        top1_by_seed=by_seed,
        difference=_minus(top1, paper.top1) if top1 is not None and is_papers_setting(trials) else None,
        top5=_mean([metrics["val/top5"] for metrics in finished if has_top5]),
        seeds=len(finished),
        paper_params=paper.params,
        params=counts.params / 1e6 if counts else None,
        paper_flops=paper.flops,
        flops=counts.flops_paper / 1e9 if counts else None,
        note=_ended_early(trials, results),
        settings={key: _as_in_a_grid(value_at(trial.config, key)) for trial in trials[:1] for key in product},
    )


def is_papers_setting(trials: Sequence[Trial]) -> bool:
    """Whether the accuracies of a row's trials are comparable with the paper's: trained on all photographs of 1000 classes,
    with the image size and the number of epochs of the paper."""
    return all(map(_matches_paper, trials))


def _matches_paper(trial: Trial) -> bool:
    data, epochs = trial.config.data, trial.config.recipe.epochs
    if (data.size, epochs) != (INPUT_SIZE, EPOCHS):
        return False
    are_photographs = data.source in ("folder", "shards") and data.train_per_class is None
    return are_photographs and class_count(trial) == CLASSES


def _ended_early(trials: Sequence[Trial], results: Mapping[str, Result]) -> str | None:
    stops: dict[str, list[str]] = {}
    for trial, result in ((trial, results[trial.key]) for trial in trials if trial.key in results):
        recipe, epoch, by = trial.config.recipe, result.stopped_at, "early stopping"
        if result.finished and recipe.patience is not None:
            epoch, by = result.epochs(recipe.epochs), "recipe.patience"
        if epoch is not None and epoch < recipe.epochs:
            which = f"seed {trial.seed} " if len(trials) > 1 else ""
            stops.setdefault(by, []).append(f"{which}stopped at epoch {epoch} of {recipe.epochs}")
    return "; ".join(f"{', '.join(each)} by {by}" for by, each in stops.items()) or None


def grid_measurements(
    protocol: Protocol, trials: Sequence[Trial], results: Mapping[str, Result], paper: Mapping[str, Mapping[str, float]]
) -> list[Measurement]:
    """The measurements of a grid. `paper` maps each row to its printed numbers, for example `cw90_top1`."""
    of_row = {row: [trial for trial in trials if trial.row == row] for row in dict.fromkeys(trial.row for trial in trials)}
    ours = {
        row: [
            {condition.name: condition.numbers_in(result.metrics) for condition in protocol.conditions}
            for _, result in finished_trials(of_row[row], results)
        ]
        for row in of_row
    }
    return measurements(protocol, ours, paper, {row for row in ours if is_papers_setting(of_row[row])})


def measurements(
    protocol: Protocol,
    ours: Mapping[str, Sequence[Mapping[str, Numbers]]],
    paper: Mapping[str, Mapping[str, float]] | None = None,
    comparable: Collection[str] = (),
) -> list[Measurement]:
    """Measurements condition by condition. `ours` maps each row to one mapping per seed, from a condition's name to its
    numbers; `comparable` are the rows with a difference to the paper."""
    first = protocol.conditions[0]

    def measurement(condition: str, row: str, number: str) -> Measurement:
        seeds = [seed for seed in ours[row] if number in seed.get(condition, {})]
        values = tuple(seed[condition][number] for seed in seeds)
        has_drop = condition != first.name and number in first.numbers
        both = [seed for seed in seeds if has_drop and number in seed.get(first.name, {})]
        drops = [seed[first.name][number] - seed[condition][number] for seed in both]
        printed = (paper or {}).get(row, {})
        theirs, mean = printed.get(f"{condition}_{number}"), _mean(values)
        return Measurement(
            condition=condition,
            row=row,
            number=number,
            paper=theirs,
            ours=mean,
            half_width=half_width(values),
            by_seed=values,
            difference=_minus(mean, theirs) if row in comparable else None,
            paper_drop=_minus(printed.get(f"{first.name}_{number}"), theirs) if has_drop else None,
            drop=_mean(drops),
            drop_half_width=half_width(drops),
            seeds=len(values),
        )

    return [measurement(one.name, row, number) for one in protocol.conditions for row in ours for number in one.numbers]


def family(trial: Trial) -> str:
    """What models of different depths have in common, for example `san pairwise`."""
    return re.sub(r"\d+", "", trial.config.model.name).replace("_", " ")


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


MOST_ROWS = 42
"""A page shows curves and commands for at most this many rows; more would make it slow to open."""


@dataclass(frozen=True, slots=True)
class GridReport:
    """Everything that tables and the page show of a grid."""

    grid_run: GridRun
    results: Mapping[str, Result]
    rows: Sequence[TableRow]
    measurements: Sequence[Measurement]
    """The table of the grid's protocol, if it names one."""
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]] = field(default_factory=dict)
    """Epochs and values by content hash and metric. Only the page shows them and the confusions."""
    confusions: Mapping[str, Confusion] = field(default_factory=dict)
    """By row, summed over its finished seeds; empty for many classes."""

    @property
    def records(self) -> Sequence[TableRow | Measurement]:
        """The records of the printed table."""
        return self.measurements or self.rows

    @property
    def finished(self) -> list[tuple[Trial, Result]]:
        return finished_trials(self.grid_run.trials, self.results)

    @property
    def families(self) -> dict[str, list[TableRow]]:
        """The rows by the family of their models."""
        families: dict[str, list[TableRow]] = {}
        of_row = {trial.row: family(trial) for trial in self.grid_run.trials}
        for row in self.rows:
            families.setdefault(of_row[row.id], []).append(row)
        return families

    @property
    def shown_rows(self) -> list[str]:
        """The ids of the `MOST_ROWS` best rows by top-1, in order; a page shows their curves and commands."""
        best = {row.id for row in sorted(self.rows, key=lambda row: -(row.top1 or 0.0))[:MOST_ROWS]}
        return [row.id for row in self.rows if row.id in best]


def grid_report(grid_run: GridRun, results: Mapping[str, Result]) -> GridReport:
    """The numbers of a grid, without curves and confusion matrices."""
    grid, measured = grid_run.grid, list[Measurement]()
    if grid.robustness is not None:
        paper = paper_numbers(grid.table) if grid.table else {}
        measured = grid_measurements(PROTOCOLS[grid.robustness], grid_run.trials, results, paper)
    return GridReport(grid_run, results, table_rows(grid_run, results), measured)


def has_small_networks(rows: Sequence[TableRow]) -> bool:
    """Whether tables and charts show FLOPs in millions."""
    return max((row.flops or 0.0 for row in rows), default=0.0) < 0.1
