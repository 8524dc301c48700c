"""Collects what the page of a grid shows, from the tracker and the store. Opens no checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

from experiments.report.data import GridReport, shown_rows, table_rows
from experiments.report.plots import CURVES
from experiments.report.tables import measurements_of
from experiments.runner.grid_run import GridRun, finished_trials
from experiments.runs.store import retry
from experiments.runs.summary import CONFUSION, Confusion
from experiments.tracking import Result


def collect(grid_run: GridRun, results: Mapping[str, Result]) -> GridReport:
    """Collects the numbers, the training curves (also of unfinished trials) and the confusion matrices of a grid.

    Raises:
        StorageError: the bucket cannot be used.
        TrackerError: the tracking server does not respond.
    """
    rows = table_rows(grid_run, results)
    shown = set(shown_rows(rows))
    run_ids = {trial.key: results[trial.key].run_id for trial in grid_run.trials if trial.key in results and trial.row in shown}
    history = grid_run.tracker.history
    curves = {
        key: {metric: retry(functools.partial(history, run_id, metric)) for metric in CURVES} for key, run_id in run_ids.items()
    }
    return GridReport(
        grid_run, results, rows, measurements_of(grid_run, results), curves, _confusions(grid_run, results, shown)
    )


def _confusions(grid_run: GridRun, results: Mapping[str, Result], rows: Collection[str]) -> dict[str, Confusion]:
    """The confusion matrices of some rows, summed over the finished trials. Trials of older versions have none."""
    workspace, by_row = grid_run.workspace, dict[str, Confusion]()
    for trial, _ in finished_trials(grid_run.trials, results):
        content = workspace.store.read(f"{workspace.folder(trial)}/{CONFUSION}") if trial.row in rows else None
        if confusion := Confusion.of_csv(content):
            by_row[trial.row] = by_row[trial.row] + confusion if trial.row in by_row else confusion
    return by_row
