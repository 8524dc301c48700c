"""What a grid has answered so far: its table, its plot, its page."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from experiments.errors import UserError
from experiments.evaluation.cells import Work, works
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.grid import Trial
from experiments.grids.paper import counts_at_paper_setting, paper_numbers, paper_rows, unprinted
from experiments.report import figures, table
from experiments.report import robustness as robust
from experiments.report.looks import look_at_cells
from experiments.report.page import CURVES, Answer, page, shown_rows
from experiments.runs.retry import retry
from experiments.tracking import Result
from experiments.tracking.view import runs_page
from experiments.training.job import Job, is_done, is_finished, say

LONGEST_NOTE = 5000
"""Characters. MLflow refuses a description of an experiment above 20 000 of them (older servers: 5000), and cuts a run's."""


def robustness_of(job: Job, results: Mapping[str, Result]) -> list[robust.Cell]:
    """The table of a grid that names a protocol."""
    assert job.grid.robustness is not None
    paper = paper_numbers(job.grid.table) if job.grid.table else {}
    return robust.cells_of_grid(PROTOCOLS[job.grid.robustness], job.trials, results, paper)


def table_of(job: Job, results: Mapping[str, Result]) -> list[table.Line]:
    """The table of what is finished."""
    printed = paper_rows(job.grid.table) if job.grid.table else {}
    return table.lines(job.grid, job.trials, results, printed, counts_at_paper_setting(job.full_size))


def tables(job: Job, results: Mapping[str, Result]) -> dict[str, str]:
    """The grid's table in each of its forms: text, markdown, latex, csv."""
    if job.grid.robustness:
        cells = robustness_of(job, results)
        return {name: form(cells) for name, form in robust.FORMS.items()}
    lines = table_of(job, results)
    return {name: form(lines) for name, form in table.FORMS.items()}


def to_measure(job: Job, results: Mapping[str, Result]) -> dict[str, Work]:
    """What finished cells lack of the numbers of the grid's protocol."""
    return works(job.workspace, job.grid.robustness, _finished(job, results)) if job.grid.robustness else {}


def _finished(job: Job, results: Mapping[str, Result]) -> list[tuple[Trial, Result]]:
    return [(trial, results[trial.key]) for trial in job.trials if is_finished(results, trial)]


def show(job: Job, results: Mapping[str, Result]) -> tuple[list[Path], bool]:
    """Prints the table of what is finished, writes it beside plot and page where that can be done, and tells what is left;
    returns the files, and whether nothing is left."""
    forms = tables(job, results)
    print(f"\n{_caption(job)}\n\n{forms['text']}\n", flush=True)
    folder = job.workspace.runs / f"{job.name}-{job.profile}"
    try:
        files = _files(job, results, forms, folder)
    except OSError as error:
        say(f"{folder}: cannot write the table, plot and page ({error.strerror or error})")
        files = []
    for file in files:
        retry(functools.partial(job.workspace.store.upload, file))
    say(f"browse the runs: {job.kept_there(f'{_command()} ui')}")
    return files, tell_what_is_left(job, results)


def tell_what_is_left(job: Job, results: Mapping[str, Result]) -> bool:
    """Names the cells that are not finished; returns whether there is none."""
    stopped = [trial.name for trial in job.trials if is_done(job, results, trial) and not is_finished(results, trial)]
    if stopped:
        say(f"stopped early: {', '.join(stopped)}; to train these cells fully, remove early_stopping and run the grid again")
    unmeasured = to_measure(job, results)
    unfinished = [trial.name for trial in job.trials if not is_done(job, results, trial) or trial.key in unmeasured]
    if unfinished:
        say(f"not finished: {', '.join(unfinished)}; to resume, run `{job.kept_there(job.command)}`")
    return not unfinished


def _files(job: Job, results: Mapping[str, Result], forms: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes table, plot and page into a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "table.md", folder / "table.csv"]
    files[0].write_text(f"{_caption(job)}\n\n{forms['markdown']}\n", encoding="utf-8")
    files[1].write_text(forms["csv"], encoding="utf-8")
    lines = table_of(job, results)
    if any(line.top1 is not None for line in lines):
        if not job.grid.robustness:
            files.append(folder / "plot.png")
            figures.draw(job.grid.plot, job.trials, lines, job.grid.question, files[-1])
            say(f"plot: {job.workspace.uri(files[-1])}")
        files.append(folder / "report.html")
        files[-1].write_text(_page(job, results), encoding="utf-8")
        say(f"report: {job.workspace.uri(files[-1])}")
    return files


def write_page(job: Job, results: Mapping[str, Result], path: Path) -> None:
    """Writes the answer as an HTML page; a cell that is not finished has curves too.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(_page(job, results), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the page ({error.strerror}); choose another file with --html") from None


def _page(job: Job, results: Mapping[str, Result]) -> str:
    lines = table_of(job, results)
    shown, curves = shown_rows(lines), {}
    for trial in job.trials:
        if trial.key in results and trial.row in shown:
            run_id = results[trial.key].run_id
            ask = functools.partial(job.tracker.history, run_id)
            curves[trial.key] = {metric: retry(functools.partial(ask, metric)) for metric in CURVES}
    return page(
        Answer(
            grid=job.grid,
            name=job.name,
            caption=_setting(job),
            command=job.command,
            overrides=job.overrides,
            trials=job.trials,
            results=results,
            lines=lines,
            curves=curves,
            store=job.workspace.tracking_uri,
            looks=look_at_cells(job.workspace, _finished(job, results)),
            cells=robustness_of(job, results) if job.grid.robustness else (),
        )
    )


def _command() -> str:
    """How to call `san` from here."""
    beside = Path(sys.executable).parent / "san"
    on_path = shutil.which("san")
    return "san" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)


def _caption(job: Job) -> str:
    return f"{job.grid.question} {_setting(job)}"


def measured(job: Job) -> list[str]:
    """The metrics of which MLflow shows a column for the grid's protocol: the first number of each condition but none."""
    if job.grid.robustness is None:
        return []
    return [f"robustness/{one.key}/{one.numbers[0]}" for one in PROTOCOLS[job.grid.robustness].conditions[1:]]


def note(job: Job, results: Mapping[str, Result]) -> str:
    """What MLflow shows of the grid, as Markdown: where cells are that are not here, a table without top-5; of one that is too
    long for that, the first rows."""
    if job.grid.robustness:
        rows = robust.as_markdown([cell for cell in robustness_of(job, results) if cell.number != "top5"])
    else:
        rows = table.as_markdown(table_of(job, results), table.SHORT)
    heading, rule, *others = rows.splitlines()
    spaced = [line.replace(" | ", "&nbsp; | ") for line in (heading, *others)]  # MLflow leaves no room between columns
    # Of the first paragraph one line is seen before it is unfolded: the way to cells elsewhere must be in it.
    first = f"{_elsewhere(job, results)}**{job.grid.question}** {_setting(job)}"
    text = "\n".join([first, "", spaced[0], rule, *spaced[1:]])
    if len(text) <= LONGEST_NOTE:
        return text
    kept = text[: LONGEST_NOTE - 100].rpartition("\n")[0]
    return f"{kept}\n\n{len(text.splitlines()) - len(kept.splitlines())} more rows are in `table.md`."


def _elsewhere(job: Job, results: Mapping[str, Result]) -> str:
    """In which grids' experiments the runs of cells are that those trained first, with links from any page of the server."""
    known = [results[trial.key] for trial in job.trials if trial.key in results]
    places = Counter((result.tags["san.grid"], result.experiment_id) for result in known)
    links = [
        f"{cells} of {len(job.trials)} in [{grid}]({runs_page(experiment_id)})"
        for (grid, experiment_id), cells in places.items()
        if grid != job.name
    ]
    return f"Cells: {', '.join(links)}. " if links else ""


def _setting(job: Job) -> str:
    epochs = job.trials[0].config.recipe.epochs
    lacking = unprinted(job.grid.table, (trial.row for trial in job.trials))
    paper = f"Paper: ImageNet, table `{job.grid.table}`{lacking}. " if job.grid.table else ""
    ours = f"Ours: profile `{job.profile}`, {epochs} {'epoch' if epochs == 1 else 'epochs'}"
    if job.grid.robustness:
        return f"{PROTOCOLS[job.grid.robustness].caption} {paper}{ours}."
    return f"{paper}{ours}; params and FLOPs for 224 x 224 images and 1000 classes."
