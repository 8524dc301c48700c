"""`san run`, `san study` and `san report`: train unfinished trials, measure robustness, print and write the results."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import click

from experiments.config.expand import GRIDS_DIR
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.paper.tables import paper_claims
from experiments.report.collect import collect
from experiments.report.data import table_rows
from experiments.report.page import render
from experiments.report.plots import save_plot
from experiments.report.study import section_of, write_study
from experiments.report.tables import caption, tables, trial_table
from experiments.runner.execute import execute, prepare, train
from experiments.runner.grid_run import GridRun, is_done, is_finished, known_results, open_grid_run
from experiments.runner.plan import missing_measurements, to_train
from experiments.runner.progress import trial_count
from experiments.runs.store import retry
from experiments.tracking import Result, TrackerError
from experiments.tracking.results_file import add_results, read_results
from experiments.training.images import open_data


def run(grid_run: GridRun, address: str | None) -> bool:
    """Trains and measures what is missing, prints the table, draws the plot and writes the page. Returns whether all trials are
    finished.

    The report in MLflow is updated even if nothing was missing, because another grid or version may have trained its trials. A
    user without write access still gets the table.
    """
    results = execute(grid_run, address)
    files, complete = print_report(grid_run, results, has_page=True)
    try:
        prepare(grid_run)
        grid_run.tracker.log_report(files, grid_run.suffix[1:] or None, complete and grid_run.selected == grid_run.trials)
    except TrackerError as error:
        click.echo(f"the report in MLflow was not updated: {error}", err=True)
    return complete


def study(
    profile: str,
    seeds: int,
    runs: str | Path | None,
    address: str | None,
    page: Path,
    kept: Path,
    trains: bool = True,
    take_over: bool = False,
    serial: bool = False,
) -> bool:
    """Trains the paper's ablation grids and writes a page with the results. Returns whether all trials are finished.

    Results are added to the file `kept` after each grid. Its trials count as finished, wherever they were trained. Without
    `trains`, nothing is trained: finished trials are added to the file, and the page is written.

    Raises:
        UserError: as `open_grid_run` and `run`, before training starts.
    """
    for path, option in ((page, "--page"), (kept, "--results")):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"{path}: cannot write this file; choose another one with {option}")
    requests = [
        GridRequest(GRIDS_DIR / f"{name}.yaml", profile, runs=runs, seeds=seeds, take_over=take_over, serial=serial)
        for name in paper_claims()
    ]
    grid_runs = [open_grid_run(request) for request in requests]
    for grid_run in grid_runs:
        results = known_results(grid_run) | read_results(kept)
        missing = {trial.key: trial for trial, _ in to_train(grid_run, results)}
        if missing and trains:
            click.echo(f"grid {grid_run.name}, profile {grid_run.profile}: {trial_count(len(missing))} to train", err=True)
            train(grid_run, missing, address)
            results = retry(functools.partial(known_results, grid_run)) | read_results(kept)
        add_results(kept, grid_run.trials, results)
    results = read_results(kept)
    training, validation = open_data(grid_runs[0].trials[0].config.data)
    sections = [section_of(grid_run, results) for grid_run in grid_runs]
    files = write_study(sections, page, len(training), len(validation))
    click.echo(f"study: {files[0]}", err=True)
    return all(is_finished(results, trial) for grid_run in grid_runs for trial in grid_run.trials)


def print_report(grid_run: GridRun, results: Mapping[str, Result], has_page: bool = False) -> tuple[list[Path], bool]:
    """Prints the table and the unfinished trials, and writes table, plot and maybe the page if the folder is writable. Returns
    the files, and whether all trials are finished."""
    forms = tables(grid_run, results)
    print(f"\n{caption(grid_run)}\n\n{forms['text']}\n", flush=True)
    folder = grid_run.workspace.runs / grid_run.full_name
    try:
        files = _write_files(grid_run, results, forms, folder, has_page)
    except OSError as error:
        click.echo(f"{folder}: cannot write the report ({error.strerror or error})", err=True)
        files = []
    for file in files:
        retry(functools.partial(grid_run.workspace.store.upload, file))
    click.echo(f"browse the runs: {grid_run.request.with_runs(f'{_command()} ui')}", err=True)
    return files, print_unfinished(grid_run, results)


def _write_files(
    grid_run: GridRun, results: Mapping[str, Result], forms: Mapping[str, str], folder: Path, has_page: bool
) -> list[Path]:
    """Writes the files of a report into a folder. Raises OSError."""
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
        if has_page:
            files.append(folder / "report.html")
            files[-1].write_text(render(collect(grid_run, results)), encoding="utf-8")
            click.echo(f"report: {grid_run.workspace.uri(files[-1])}", err=True)
    return files


def print_unfinished(grid_run: GridRun, results: Mapping[str, Result]) -> bool:
    """Prints the names of unfinished trials; returns whether there are none."""
    stopped = [trial.name for trial in grid_run.trials if is_done(grid_run, results, trial) and not is_finished(results, trial)]
    if stopped:
        click.echo(
            f"stopped early: {', '.join(stopped)}; to train these trials fully, remove early_stopping and run the grid again",
            err=True,
        )
    unmeasured = missing_measurements(grid_run, results)
    unfinished = [trial.name for trial in grid_run.selected if not is_done(grid_run, results, trial) or trial.key in unmeasured]
    if unfinished:
        request = grid_run.request
        click.echo(f"not finished: {', '.join(unfinished)}; to resume, run `{request.with_runs(request.command)}`", err=True)
    return not unfinished


def write_page(grid_run: GridRun, results: Mapping[str, Result], path: Path) -> None:
    """Writes the HTML page. Raises UserError if the file cannot be written."""
    _write(path, render(collect(grid_run, results)), "report", "--html")


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


def _command() -> str:
    """How to call `san` in this shell: `make demo` does not activate the environment."""
    beside = Path(sys.executable).parent / "san"
    on_path = shutil.which("san")
    return "san" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)
