"""`san report`: prints the table, and writes table, plot and page."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import click

from experiments.errors import UserError
from experiments.report.data import GridReport, shown_rows, table_rows
from experiments.report.page import render
from experiments.report.plots import CURVES, save_plot
from experiments.report.tables import caption, measurements_of, tables, trial_table
from experiments.runner.grid_run import GridRun, finished_trials, is_done, is_finished
from experiments.runner.plan import missing_measurements
from experiments.runs.store import retry
from experiments.runs.summary import CONFUSION, Confusion
from experiments.tracking import Result


def print_report(grid_run: GridRun, results: Mapping[str, Result]) -> tuple[list[Path], bool]:
    """Prints the table and the unfinished trials, and writes table, plot and page if the folder is writable. Returns the files,
    and whether all trials are finished."""
    forms = tables(grid_run, results)
    print(f"\n{caption(grid_run)}\n\n{forms['text']}\n", flush=True)
    folder = grid_run.workspace.runs / grid_run.full_name
    try:
        files = _write_files(grid_run, results, forms, folder)
    except OSError as error:
        click.echo(f"{folder}: cannot write the table, plot and page ({error.strerror or error})", err=True)
        files = []
    for file in files:
        retry(functools.partial(grid_run.workspace.store.upload, file))
    click.echo(f"browse the runs: {grid_run.request.with_runs(f'{_command()} ui')}", err=True)
    return files, print_unfinished(grid_run, results)


def print_unfinished(grid_run: GridRun, results: Mapping[str, Result]) -> bool:
    """Prints the names of unfinished trials; returns whether there are none."""
    stopped = [trial.name for trial in grid_run.trials if is_done(grid_run, results, trial) and not is_finished(results, trial)]
    if stopped:
        click.echo(
            f"stopped early: {', '.join(stopped)}; to train these trials fully, remove early_stopping and run the grid again",
            err=True,
        )
    unmeasured = missing_measurements(grid_run, results)
    unfinished = [trial.name for trial in grid_run.wanted if not is_done(grid_run, results, trial) or trial.key in unmeasured]
    if unfinished:
        request = grid_run.request
        click.echo(f"not finished: {', '.join(unfinished)}; to resume, run `{request.with_runs(request.command)}`", err=True)
    return not unfinished


def _write_files(grid_run: GridRun, results: Mapping[str, Result], forms: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes table, plot and page into a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "table.md", folder / "table.csv"]
    files[0].write_text(f"{caption(grid_run)}\n\n{forms['markdown']}\n", encoding="utf-8")
    files[1].write_text(forms["csv"], encoding="utf-8")
    rows = table_rows(grid_run, results)
    if any(row.top1 is not None for row in rows):
        if not grid_run.grid.robustness:
            files.append(folder / "plot.png")
            save_plot(grid_run.grid.plot, grid_run.trials, rows, grid_run.grid.question, files[-1])
            click.echo(f"plot: {grid_run.workspace.uri(files[-1])}", err=True)
        files.append(folder / "report.html")
        files[-1].write_text(render(_collected(grid_run, results)), encoding="utf-8")
        click.echo(f"report: {grid_run.workspace.uri(files[-1])}", err=True)
    return files


def write_page(grid_run: GridRun, results: Mapping[str, Result], path: Path) -> None:
    """Writes the HTML page. Unfinished trials have curves, too. Raises UserError if the file cannot be written."""
    _write(path, render(_collected(grid_run, results)), "report", "--html")


def write_trials(grid_run: GridRun, results: Mapping[str, Result], path: Path) -> None:
    """Writes one line per trial to a CSV file, or to stdout for the path `-`. Raises UserError if it cannot write the file."""
    text = trial_table(grid_run, results).to_csv(index=False)
    if path == Path("-"):
        click.echo(text, nl=False)
    else:
        _write(path, text, "trials", "--csv")


def _write(path: Path, text: str, what: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the {what} ({error.strerror}); choose another file with {option}") from None
    click.echo(f"{what}: {path}", err=True)


def _collected(grid_run: GridRun, results: Mapping[str, Result]) -> GridReport:
    """Collects everything that the page shows."""
    rows = table_rows(grid_run, results)
    shown = set(shown_rows(rows))
    run_ids = {trial.key: results[trial.key].run_id for trial in grid_run.trials if trial.key in results and trial.row in shown}

    def curve(run_id: str, metric: str) -> Sequence[tuple[int, float]]:
        return retry(lambda: grid_run.tracker.history(run_id, metric))

    return GridReport(
        grid_run,
        results,
        rows,
        measurements_of(grid_run, results),
        curves={key: {metric: curve(run_id, metric) for metric in CURVES} for key, run_id in run_ids.items()},
        confusions=_confusions(grid_run, results, shown),
    )


def _confusions(grid_run: GridRun, results: Mapping[str, Result], rows: Collection[str]) -> dict[str, Confusion]:
    """The confusion matrices of the finished trials of some rows. Trials of older versions have none."""
    by_row: dict[str, Confusion] = {}
    for trial, _ in finished_trials(grid_run.trials, results):
        content = (
            grid_run.workspace.store.read(f"{grid_run.workspace.folder(trial)}/{CONFUSION}") if trial.row in rows else None
        )
        one = Confusion.of_csv(content)
        if one is not None:
            by_row[trial.row] = by_row[trial.row] + one if trial.row in by_row else one
    return by_row


def _command() -> str:
    """How to call `san` in this shell: `make demo` does not activate the environment."""
    beside = Path(sys.executable).parent / "san"
    on_path = shutil.which("san")
    return "san" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)
