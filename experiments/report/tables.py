"""A grid's results as tables for terminals, Markdown and LaTeX, as CSV, and as a pandas DataFrame of its trials."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.config.config import flat
from experiments.config.grid import Trial
from experiments.evaluation.robustness import PROTOCOLS, TITLES
from experiments.paper.tables import note_on_missing_rows
from experiments.report import interval
from experiments.report.data import GridReport, Measurement, TableRow, counts_of_trained, has_small_networks
from experiments.runner.grid_run import GridRun, is_finished
from experiments.tracking import Result
from experiments.tracking.results_file import METRICS

if TYPE_CHECKING:
    import pandas as pd


class Column(NamedTuple):
    """A column of a table of results, in every format."""

    name: str
    field: str
    """The field of the record."""
    form: str
    """The format, with the precision that the paper prints."""
    group: str = ""
    """What neighbors have in common: part of the heading in text, and the heading above them on the page."""

    @property
    def heading(self) -> str:
        return f"{self.group} {self.name}".strip()


COLUMNS = (
    Column("row", "id", "s"),
    Column("paper", "paper_top1", ".1f", "top-1"),
    Column("ours", "top1", ".1f", "top-1"),
    Column("seeds", "seeds", "d"),
    Column("difference", "difference", "+z.1f", "top-1"),
    Column("ours", "top5", ".1f", "top-5"),
    Column("paper", "paper_params", ".1f", "params M"),
    Column("ours", "params", ".1f", "params M"),
    Column("paper", "paper_flops", ".1f", "FLOPs G"),
    Column("ours", "flops", ".1f", "FLOPs G"),
    Column("note", "note", "s"),
)
PARAMS = Column("ours", "params", ".3g", "params M")
FLOPS_G, FLOPS_M = Column("ours", "flops", ".3g", "FLOPs G"), Column("ours", "flops_millions", ".1f", "FLOPs M")
"""The columns of tables without counts of the paper."""
MEASUREMENT_COLUMNS = (
    Column("paper", "paper", ".1f"),
    Column("ours", "ours", ".1f"),
    Column("difference", "difference", "+z.1f"),
    Column("drop paper", "paper_drop", "z.1f"),
    Column("drop ours", "drop", "z.1f"),
)
"""The columns of each number of a protocol, whose title is their group."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text whose first row is the heading. The first `text_columns` are left-aligned, the others right-aligned."""

    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    def text(self) -> str:
        """Aligned columns for a terminal."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        ruled = [self.rows[0], ["-" * width for width in widths], *self.rows[1:]]
        sides = [str.ljust if column < self.text_columns else str.rjust for column in range(len(widths))]
        return "\n".join(
            "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in ruled
        )

    def markdown(self) -> str:
        rule = ["---" if column < self.text_columns else "---:" for column in range(len(self.rows[0]))]
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.rows[0], rule, *self.rows[1:]))

    def latex(self) -> str:
        """A tabular for the package booktabs. What `paper` and `ours` have in common is a heading above them."""
        import pandas as pd  # takes half a second

        headings = [name.rpartition(" ")[::2] if name.endswith((" paper", " ours")) else ("", name) for name in self.rows[0]]
        has_groups = any(above for above, _ in headings)
        columns = pd.MultiIndex.from_tuples(headings) if has_groups else pd.Index(self.rows[0])
        alignment = "l" * self.text_columns + "r" * (len(columns) - self.text_columns)
        frame = pd.DataFrame(self.rows[1:], columns=columns)
        return frame.to_latex(index=False, escape=True, column_format=alignment, multicolumn_format="c").rstrip()


def grid_table(rows: Sequence[TableRow]) -> Table:
    """The table of a grid."""
    shown = shown_columns(rows)
    return Table([[column.heading for column in shown], *([_text(row, column) for column in shown] for row in rows)])


def shown_columns(rows: Sequence[TableRow]) -> list[Column]:
    """The columns that are not empty, behind the first a column for each key of the grid's product. The number of seeds is left
    out if all rows have one."""
    has_seeds = any(row.seeds > 1 for row in rows)
    shown = [column for column in COLUMNS if any(getattr(row, column.field) is not None for row in rows)]
    shown = [column for column in shown if column.field != "seeds" or has_seeds]
    if not any(row.paper_params for row in rows):  # the models may be small
        unit = FLOPS_M if has_small_networks(rows) else FLOPS_G
        shown = [{"params": PARAMS, "flops": unit}.get(column.field, column) for column in shown]
    if all(column.name != "paper" for column in shown):
        shown = [_alone(column) for column in shown]
    return [*shown[:1], *_setting_columns(rows), *shown[1:]]


def _alone(column: Column) -> Column:
    """The column in a table without numbers of the paper, where `ours` says nothing."""
    return column._replace(name=" ".join(word for word in column.name.split() if word != "ours"))


def _setting_columns(rows: Sequence[TableRow]) -> list[Column]:
    """Each is headed by the last part of its key if no other key has it."""
    keys = list(rows[0].settings) if rows else []
    names = [key.rpartition(".")[2] for key in keys]
    return [Column(name if names.count(name) == 1 else key, key, "s") for key, name in zip(keys, names, strict=True)]


def protocol_table(measurements: Sequence[Measurement]) -> Table:
    """The table of a protocol: a line for each row under each condition, without empty columns."""
    by_cell = {(one.condition, one.row, one.number): one for one in measurements}
    keys = list(dict.fromkeys((one.condition, one.row) for one in measurements))
    columns = [("condition", *(condition for condition, _ in keys)), ("row", *(row for _, row in keys))]
    has_paper = any(one.paper is not None for one in measurements)
    for number, title in TITLES.items():
        cells = [by_cell.get((*key, number)) for key in keys]
        for column in (column._replace(group=title) for column in MEASUREMENT_COLUMNS):
            if any(getattr(one, column.field, None) is not None for one in cells):
                column = column if has_paper else _alone(column)
                columns.append((column.heading, *(_text(one, column) for one in cells)))
    seeds = [max(one.seeds for one in measurements if (one.condition, one.row) == key) for key in keys]
    if len({number for number in seeds if number}) > 1:
        columns.append(("seeds", *map(str, seeds)))
    return Table(list(zip(*columns, strict=True)), text_columns=2)


def _text(record: TableRow | Measurement | None, column: Column) -> str:
    value = value_of(record, column.field)
    if record is None or value is None:
        return "-"
    by_seed, half_width = record.spread_of(column.field)
    if not isinstance(value, float):
        return format(value, column.form)
    return interval.mean_in_words(value, by_seed, half_width, column.form)


def value_of(record: TableRow | Measurement | None, field: str) -> Any:
    """The value of a column: a field of the record, or a setting of the row."""
    return record.settings[field] if isinstance(record, TableRow) and field in record.settings else getattr(record, field, None)


def csv_text(records: Sequence[Any]) -> str:
    """Records of one dataclass in full precision, with one column per field."""
    out = io.StringIO()
    dicts = [values | values.pop("settings", {}) for values in map(asdict, records)]
    writer = csv.DictWriter(out, dicts[0], lineterminator="\n")
    writer.writeheader()
    for values in dicts:
        writer.writerow(
            {key: " ".join(map(str, value)) if isinstance(value, tuple) else value for key, value in values.items()}
        )
    return out.getvalue()


COUNTED = ("params", "flops_paper", "flops_actual")


def trial_table(grid_run: GridRun, results: Mapping[str, Result]) -> pd.DataFrame:
    """One row per trial in the grid's order; `experiments.load_results` describes the columns."""
    import pandas as pd  # takes half a second

    counts = counts_of_trained(grid_run.trials)
    settings = pd.DataFrame([_trial_settings(trial) for trial in grid_run.trials])
    counted = pd.DataFrame([{name: getattr(counts[trial.row], name) for name in COUNTED} for trial in grid_run.trials])
    finished = [results[trial.key].metrics if is_finished(results, trial) else {} for trial in grid_run.trials]
    names = dict.fromkeys([*METRICS.values(), *sorted(set().union(*finished))])
    metrics = [name for name in names if name not in COUNTED and not name.startswith("system/")]
    return settings.join(counted).join(pd.DataFrame(finished, columns=metrics, dtype=float))


def _trial_settings(trial: Trial) -> dict[str, Any]:
    config = flat(trial.record) | {"recipe.lr_used": trial.config.recipe.lr_used}
    # Lists cannot be grouped by.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    return {"key": trial.key, "trial": trial.name, "row": trial.row, "seed": trial.seed} | values


def report_text(report: GridReport, form: str) -> str:
    """The grid's table as `text`, `markdown`, `latex` or `csv`."""
    if form == "csv":
        return csv_text(report.records)
    table = protocol_table(report.measurements) if report.measurements else grid_table(report.rows)
    return {"text": table.text, "markdown": table.markdown, "latex": table.latex}[form]()


def caption(grid_run: GridRun) -> str:
    return f"{grid_run.grid.question} {setting_in_words(grid_run)}"


def setting_in_words(grid_run: GridRun) -> str:
    lengths = sorted({trial.config.recipe.epochs for trial in grid_run.trials})
    epochs = "1 epoch" if lengths == [1] else f"{', '.join(map(str, lengths))} epochs"
    lacking = note_on_missing_rows(grid_run.grid.table, (trial.row for trial in grid_run.trials))
    paper = f"Paper: ImageNet, table `{grid_run.grid.table}`{lacking}. " if grid_run.grid.table else ""
    changes = "".join(f", `{change}`" for change in grid_run.changes if not change.startswith("recipe.epochs="))
    ours = f"{'Ours: p' if paper else 'P'}rofile `{grid_run.profile}`, {epochs}{changes}"
    if grid_run.grid.robustness:
        return f"{PROTOCOLS[grid_run.grid.robustness].caption} {paper}{ours}."
    if grid_run.grid.table is None:
        return f"{ours}; params and FLOPs of the trained models."
    return f"{paper}{ours}; params and FLOPs for 224 x 224 images and 1000 classes."
