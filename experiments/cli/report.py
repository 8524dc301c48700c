"""`san report`: prints the table, and writes table, plot and page."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from experiments.errors import UserError
from experiments.evaluation.attention_samples import attention_samples
from experiments.report.build import caption, measurements_of, rows_of, setting, tables
from experiments.report.charts import CURVES, save_plot
from experiments.report.data import GridReport, shown_rows
from experiments.report.page import page
from experiments.runner.job import Job, finished_trials, is_done, is_finished, say
from experiments.runner.plan import missing_measurements
from experiments.runs.retry import retry
from experiments.runs.summary import CONFUSION, Confusion
from experiments.tracking import Result


def print_report(job: Job, results: Mapping[str, Result]) -> tuple[list[Path], bool]:
    """Prints the table and the unfinished trials, and writes table, plot and page if the folder is writable. Returns the files,
    and whether all trials are finished."""
    forms = tables(job, results)
    print(f"\n{caption(job)}\n\n{forms['text']}\n", flush=True)
    folder = job.workspace.runs / f"{job.name}-{job.profile}"
    try:
        files = _write_files(job, results, forms, folder)
    except OSError as error:
        say(f"{folder}: cannot write the table, plot and page ({error.strerror or error})")
        files = []
    for file in files:
        retry(functools.partial(job.workspace.store.upload, file))
    say(f"browse the runs: {job.kept_there(f'{_command()} ui')}")
    return files, print_unfinished(job, results)


def print_unfinished(job: Job, results: Mapping[str, Result]) -> bool:
    """Prints the names of unfinished trials; returns whether there are none."""
    stopped = [trial.name for trial in job.trials if is_done(job, results, trial) and not is_finished(results, trial)]
    if stopped:
        say(f"stopped early: {', '.join(stopped)}; to train these trials fully, remove early_stopping and run the grid again")
    unmeasured = missing_measurements(job, results)
    unfinished = [trial.name for trial in job.wanted if not is_done(job, results, trial) or trial.key in unmeasured]
    if unfinished:
        say(f"not finished: {', '.join(unfinished)}; to resume, run `{job.kept_there(job.command)}`")
    return not unfinished


def _write_files(job: Job, results: Mapping[str, Result], forms: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes table, plot and page into a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "table.md", folder / "table.csv"]
    files[0].write_text(f"{caption(job)}\n\n{forms['markdown']}\n", encoding="utf-8")
    files[1].write_text(forms["csv"], encoding="utf-8")
    rows = rows_of(job, results)
    if any(row.top1 is not None for row in rows):
        if not job.grid.robustness:
            files.append(folder / "plot.png")
            save_plot(job.grid.plot, job.trials, rows, job.grid.question, files[-1])
            say(f"plot: {job.workspace.uri(files[-1])}")
        files.append(folder / "report.html")
        files[-1].write_text(page(_collected(job, results)), encoding="utf-8")
        say(f"report: {job.workspace.uri(files[-1])}")
    return files


def write_page(job: Job, results: Mapping[str, Result], path: Path) -> None:
    """Writes the HTML page. Unfinished trials have curves, too.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(page(_collected(job, results)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the page ({error.strerror}); choose another file with --html") from None


def _collected(job: Job, results: Mapping[str, Result]) -> GridReport:
    """Collects everything that the page shows."""
    rows = rows_of(job, results)
    shown = set(shown_rows(rows))
    run_ids = {trial.key: results[trial.key].run_id for trial in job.trials if trial.key in results and trial.row in shown}

    def curve(run_id: str, metric: str) -> Sequence[tuple[int, float]]:
        return retry(lambda: job.tracker.history(run_id, metric))

    return GridReport(
        grid=job.grid,
        name=job.name,
        caption=setting(job),
        command=job.command,
        overrides=job.overrides,
        trials=job.trials,
        results=results,
        rows=rows,
        curves={key: {metric: curve(run_id, metric) for metric in CURVES} for key, run_id in run_ids.items()},
        store=job.workspace.tracking_uri,
        samples=attention_samples(job.workspace, finished_trials(job.trials, results)),
        measurements=measurements_of(job, results),
        profile_option=job.profile_option,
        confusions=_confusions(job, results, shown),
    )


def _confusions(job: Job, results: Mapping[str, Result], rows: Collection[str]) -> dict[str, Confusion]:
    """The confusion matrices of the finished trials of some rows. Trials of older versions have none."""
    found: dict[str, Confusion] = {}
    for trial, _ in finished_trials(job.trials, results):
        content = job.workspace.store.read(f"{job.workspace.folder(trial)}/{CONFUSION}") if trial.row in rows else None
        one = Confusion.of_csv(content)
        if one is not None:
            found[trial.row] = found[trial.row] + one if trial.row in found else one
    return found


def _command() -> str:
    """How to call `san` in this shell."""
    beside = Path(sys.executable).parent / "san"
    on_path = shutil.which("san")
    return "san" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)
