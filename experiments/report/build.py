"""Builds a grid's report: the table, the plot and the page, from the results in the tracker."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from experiments.errors import UserError
from experiments.evaluation.attention_samples import attention_samples
from experiments.evaluation.protocols import PROTOCOLS
from experiments.paper.tables import counts_at_paper_setting, note_on_missing_rows, paper_numbers, paper_rows
from experiments.report.charts import CURVES, save_plot
from experiments.report.data import (
    Measurement,
    Report,
    TableRow,
    counts_of_trained,
    grid_measurements,
    shown_rows,
    table_rows,
)
from experiments.report.page import page
from experiments.report.tables import SHORT, csv_text, grid_table, protocol_table
from experiments.runner.job import Job, finished_cells, is_done, is_finished, say
from experiments.runner.plan import missing_measurements
from experiments.runs.retry import retry
from experiments.runs.summary import CONFUSION, Confusion
from experiments.tracking import Result
from experiments.tracking.result import runs_page

LONGEST_NOTE = 5000
"""Characters. MLflow rejects longer descriptions of experiments (20 000 in newer versions) and truncates those of runs."""


def rows_of(job: Job, results: Mapping[str, Result]) -> list[TableRow]:
    """The rows of a grid's table, with the numbers of finished cells."""
    if job.grid.table is None:
        return table_rows(job.grid, job.trials, results, {}, counts_of_trained(job.trials))
    counts = counts_at_paper_setting(job.full_size)
    return table_rows(job.grid, job.trials, results, paper_rows(job.grid.table), counts)


def measurements_of(job: Job, results: Mapping[str, Result]) -> list[Measurement]:
    """The measurements of a grid that names a protocol; empty for other grids."""
    if job.grid.robustness is None:
        return []
    paper = paper_numbers(job.grid.table) if job.grid.table else {}
    return grid_measurements(PROTOCOLS[job.grid.robustness], job.trials, results, paper)


def records_of(job: Job, results: Mapping[str, Result]) -> Sequence[TableRow | Measurement]:
    """The records of the grid's printed table."""
    return measurements_of(job, results) if job.grid.robustness else rows_of(job, results)


def tables(job: Job, results: Mapping[str, Result]) -> dict[str, str]:
    """The grid's table in each format: text, markdown, latex, csv."""
    records: Sequence[TableRow | Measurement]
    if job.grid.robustness:
        records = found = measurements_of(job, results)
        table = protocol_table(found)
    else:
        records = rows = rows_of(job, results)
        table = grid_table(rows)
    return {"text": table.text(), "markdown": table.markdown(), "latex": table.latex(), "csv": csv_text(records)}


def show(job: Job, results: Mapping[str, Result]) -> tuple[list[Path], bool]:
    """Prints the table and the unfinished cells, and writes table, plot and page if the folder is writable. Returns the files,
    and whether all cells are finished."""
    forms = tables(job, results)
    print(f"\n{_caption(job)}\n\n{forms['text']}\n", flush=True)
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
    """Prints the names of unfinished cells; returns whether there are none."""
    stopped = [trial.name for trial in job.trials if is_done(job, results, trial) and not is_finished(results, trial)]
    if stopped:
        say(f"stopped early: {', '.join(stopped)}; to train these cells fully, remove early_stopping and run the grid again")
    unmeasured = missing_measurements(job, results)
    unfinished = [trial.name for trial in job.wanted if not is_done(job, results, trial) or trial.key in unmeasured]
    if unfinished:
        say(f"not finished: {', '.join(unfinished)}; to resume, run `{job.kept_there(job.command)}`")
    return not unfinished


def _write_files(job: Job, results: Mapping[str, Result], forms: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes table, plot and page into a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "table.md", folder / "table.csv"]
    files[0].write_text(f"{_caption(job)}\n\n{forms['markdown']}\n", encoding="utf-8")
    files[1].write_text(forms["csv"], encoding="utf-8")
    rows = rows_of(job, results)
    if any(row.top1 is not None for row in rows):
        if not job.grid.robustness:
            files.append(folder / "plot.png")
            save_plot(job.grid.plot, job.trials, rows, job.grid.question, files[-1])
            say(f"plot: {job.workspace.uri(files[-1])}")
        files.append(folder / "report.html")
        files[-1].write_text(page(report_of(job, results)), encoding="utf-8")
        say(f"report: {job.workspace.uri(files[-1])}")
    return files


def write_page(job: Job, results: Mapping[str, Result], path: Path) -> None:
    """Writes the HTML page. Unfinished cells have curves, too.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(page(report_of(job, results)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the page ({error.strerror}); choose another file with --html") from None


def report_of(job: Job, results: Mapping[str, Result]) -> Report:
    """Collects everything that the page shows."""
    rows = rows_of(job, results)
    shown = set(shown_rows(rows))
    run_ids = {trial.key: results[trial.key].run_id for trial in job.trials if trial.key in results and trial.row in shown}

    def curve(run_id: str, metric: str) -> Sequence[tuple[int, float]]:
        return retry(lambda: job.tracker.history(run_id, metric))

    return Report(
        grid=job.grid,
        name=job.name,
        caption=_setting(job),
        command=job.command,
        overrides=job.overrides,
        trials=job.trials,
        results=results,
        rows=rows,
        curves={key: {metric: curve(run_id, metric) for metric in CURVES} for key, run_id in run_ids.items()},
        store=job.workspace.tracking_uri,
        samples=attention_samples(job.workspace, finished_cells(job.trials, results)),
        measurements=measurements_of(job, results),
        profile_option=job.profile_option,
        confusions=_confusions(job, results, shown),
    )


def _confusions(job: Job, results: Mapping[str, Result], rows: Collection[str]) -> dict[str, Confusion]:
    """The confusion matrices of the finished cells of some rows. Cells of older versions have none."""
    found: dict[str, Confusion] = {}
    for trial, _ in finished_cells(job.trials, results):
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


def _caption(job: Job) -> str:
    return f"{job.grid.question} {_setting(job)}"


def _setting(job: Job) -> str:
    epochs = job.trials[0].config.recipe.epochs
    lacking = note_on_missing_rows(job.grid.table, (trial.row for trial in job.trials))
    paper = f"Paper: ImageNet, table `{job.grid.table}`{lacking}. " if job.grid.table else ""
    ours = f"Ours: profile `{job.profile}`, {epochs} {'epoch' if epochs == 1 else 'epochs'}"
    if job.grid.robustness:
        return f"{PROTOCOLS[job.grid.robustness].caption} {paper}{ours}."
    if job.grid.table is None:
        return f"{ours}; params and FLOPs of the trained models."
    return f"{paper}{ours}; params and FLOPs for 224 x 224 images and 1000 classes."


def note(job: Job, results: Mapping[str, Result]) -> str:
    """The description of the grid in MLflow, as Markdown: links to cells of other grids, and the table without top-5,
    truncated if necessary."""
    if job.grid.robustness:
        table = protocol_table([one for one in measurements_of(job, results) if one.number != "top5"])
    else:
        table = grid_table(rows_of(job, results), SHORT)
    heading, rule, *others = table.markdown().splitlines()
    spaced = [line.replace(" | ", "&nbsp; | ") for line in (heading, *others)]  # MLflow leaves no room between columns
    # MLflow shows only the first line of the first paragraph until it is unfolded, so the links are at its beginning.
    first = f"{_links_elsewhere(job, results)}**{job.grid.question}** {_setting(job)}"
    text = "\n".join([first, "", spaced[0], rule, *spaced[1:]])
    if len(text) <= LONGEST_NOTE:
        return text
    kept = text[: LONGEST_NOTE - 100].rpartition("\n")[0]
    return f"{kept}\n\n{len(text.splitlines()) - len(kept.splitlines())} more rows are in `table.md`."


def _links_elsewhere(job: Job, results: Mapping[str, Result]) -> str:
    """Links to the experiments of other grids that trained some of the cells; they work on any page of the server."""
    known = [results[trial.key] for trial in job.trials if trial.key in results]
    places = Counter((result.tags["san.grid"], result.experiment_id) for result in known)
    links = [
        f"{cells} of {len(job.trials)} in [{grid}]({runs_page(experiment_id)})"
        for (grid, experiment_id), cells in places.items()
        if grid != job.name
    ]
    return f"Cells: {', '.join(links)}. " if links else ""
