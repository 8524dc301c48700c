"""Prints the results of a grid, and writes the files of its report: table, plot and page. Opens no checkpoint."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from experiments.errors import UserError
from experiments.report.data import GridReport
from experiments.report.page import render
from experiments.report.plots import CURVES, save_plot
from experiments.report.tables import caption, report_text, trial_table
from experiments.runner.grid_run import GridRun, finished_trials, is_done, is_finished, print_status
from experiments.runner.plan import missing_measurements
from experiments.runs.store import retry
from experiments.runs.summary import CONFUSION, Confusion
from experiments.tracking import Result


def print_report(report: GridReport, has_page: bool = False) -> tuple[list[Path], bool]:
    """Prints the table and the unfinished trials, and writes table, plot and maybe the page if the folder is writable. Returns
    the files, and whether all trials are finished."""
    grid_run = report.grid_run
    print(f"\n{caption(grid_run)}\n\n{report_text(report, 'text')}\n", flush=True)
    folder = grid_run.workspace.runs / grid_run.full_name
    try:
        files = _write_files(report, folder, has_page)
    except OSError as error:
        print_status(f"{folder}: cannot write the report ({error.strerror or error})")
        files = []
    for file in files:
        retry(functools.partial(grid_run.workspace.store.upload, file))
    print_status(f"browse the runs: {grid_run.request.with_runs(f'{_command()} ui')}")
    return files, print_unfinished(grid_run, report.results)


def _write_files(report: GridReport, folder: Path, has_page: bool) -> list[Path]:
    """Writes the files of a report into a folder. Raises OSError."""
    grid_run = report.grid_run
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "table.md", folder / "table.csv"]
    files[0].write_text(f"{caption(grid_run)}\n\n{report_text(report, 'markdown')}\n", encoding="utf-8", errors="replace")
    files[1].write_text(report_text(report, "csv"), encoding="utf-8")
    if any(row.top1 is not None for row in report.rows):
        if not grid_run.grid.robustness:
            files.append(folder / "plot.png")
            save_plot(grid_run.grid.plot, grid_run.trials, report.rows, grid_run.grid.question, files[-1])
            print_status(f"plot: {grid_run.workspace.uri(files[-1])}")
        if has_page:
            files.append(folder / "report.html")
            files[-1].write_text(render(_with_curves(report)), encoding="utf-8", errors="replace")
            print_status(f"report: {grid_run.workspace.uri(files[-1])}")
    return files


def print_unfinished(grid_run: GridRun, results: Mapping[str, Result]) -> bool:
    """Prints the names of unfinished trials; returns whether there are none."""
    stopped = [trial.name for trial in grid_run.trials if is_done(grid_run, results, trial) and not is_finished(results, trial)]
    if stopped:
        print_status(
            f"stopped early: {', '.join(stopped)}; to train these trials fully, remove early_stopping and run the grid again"
        )
    unmeasured = missing_measurements(grid_run, results)
    unfinished = [trial.name for trial in grid_run.selected if not is_done(grid_run, results, trial) or trial.key in unmeasured]
    if unfinished:
        request = grid_run.request
        print_status(f"not finished: {', '.join(unfinished)}; to resume, run `{request.with_runs(request.command)}`")
    return not unfinished


def write_page(report: GridReport, path: Path) -> None:
    """Writes the HTML page. Raises UserError if the file cannot be written."""
    _write(path, render(_with_curves(report)), "report", "--html")


def write_trials(grid_run: GridRun, results: Mapping[str, Result], path: Path) -> None:
    """Writes one line per trial to a CSV file, or to stdout for the path `-`. Raises UserError if it cannot write the file."""
    text = trial_table(grid_run, results).to_csv(index=False)
    if path == Path("-"):
        print(text, end="", flush=True)
    else:
        _write(path, text, "trials", "--csv")


def _write(path: Path, text: str, what: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # names of classes need not be text
    except OSError as error:
        raise UserError(f"{path}: cannot write the {what} ({error.strerror}); choose another file with {option}") from None
    print_status(f"{what}: {path}")


def _command() -> str:
    """How to call `san` in this shell: `make demo` does not activate the environment."""
    beside = Path(sys.executable).parent / "san"
    on_path = shutil.which("san")
    return "san" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)


def _with_curves(report: GridReport) -> GridReport:
    """Adds what only the page shows: the training curves (also of unfinished trials) and the confusion matrices.

    Raises:
        StorageError: the bucket cannot be used.
        TrackerError: the tracking server does not respond.
    """
    grid_run, results, shown = report.grid_run, report.results, set(report.shown_rows)
    run_ids = {trial.key: results[trial.key].run_id for trial in grid_run.trials if trial.key in results and trial.row in shown}
    history = grid_run.tracker.history
    curves = {
        key: {metric: retry(functools.partial(history, run_id, metric)) for metric in CURVES} for key, run_id in run_ids.items()
    }
    return replace(report, curves=curves, confusions=_confusions(grid_run, results, shown))


def _confusions(grid_run: GridRun, results: Mapping[str, Result], rows: Collection[str]) -> dict[str, Confusion]:
    """The confusion matrices of some rows, summed over the finished trials. Trials of older versions have none."""
    workspace, by_row = grid_run.workspace, dict[str, Confusion]()
    for trial, _ in finished_trials(grid_run.trials, results):
        content = workspace.store.read(f"{workspace.folder(trial)}/{CONFUSION}") if trial.row in rows else None
        if confusion := Confusion.of_csv(content):
            by_row[trial.row] = by_row[trial.row] + confusion if trial.row in by_row else confusion
    return by_row
