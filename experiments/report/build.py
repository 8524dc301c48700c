"""A grid's tables and texts, from its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.evaluation.protocols import PROTOCOLS
from experiments.paper.tables import note_on_missing_rows, paper_numbers
from experiments.report.data import Measurement, TableRow, grid_measurements, table_rows
from experiments.report.tables import csv_text, grid_table, protocol_table
from experiments.runner.grid_run import GridRun
from experiments.tracking import Result


def measurements_of(grid_run: GridRun, results: Mapping[str, Result]) -> list[Measurement]:
    """The measurements of a grid that names a protocol; empty for other grids."""
    if grid_run.grid.robustness is None:
        return []
    paper = paper_numbers(grid_run.grid.table) if grid_run.grid.table else {}
    return grid_measurements(PROTOCOLS[grid_run.grid.robustness], grid_run.trials, results, paper)


def records_of(grid_run: GridRun, results: Mapping[str, Result]) -> Sequence[TableRow | Measurement]:
    """The records of the grid's printed table."""
    return measurements_of(grid_run, results) if grid_run.grid.robustness else table_rows(grid_run, results)


def tables(grid_run: GridRun, results: Mapping[str, Result]) -> dict[str, str]:
    """The grid's table in each format: text, markdown, latex, csv."""
    measured, rows = measurements_of(grid_run, results), table_rows(grid_run, results)
    table = protocol_table(measured) if grid_run.grid.robustness else grid_table(rows)
    return {"text": table.text(), "markdown": table.markdown(), "latex": table.latex(), "csv": csv_text(measured or rows)}


def caption(grid_run: GridRun) -> str:
    return f"{grid_run.grid.question} {setting(grid_run)}"


def setting(grid_run: GridRun) -> str:
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
