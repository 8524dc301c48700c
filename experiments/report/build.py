"""A grid's tables and texts, from its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from experiments.evaluation.protocols import PROTOCOLS
from experiments.paper.tables import counts_at_paper_setting, note_on_missing_rows, paper_numbers, paper_rows
from experiments.report.data import (
    Measurement,
    TableRow,
    counts_of_trained,
    grid_measurements,
    table_rows,
)
from experiments.report.tables import SHORT, csv_text, grid_table, protocol_table
from experiments.runner.job import Job
from experiments.tracking import Result
from experiments.tracking.result import runs_page

LONGEST_NOTE = 5000
"""Characters. MLflow rejects longer descriptions of experiments (20 000 in newer versions) and truncates those of runs."""


def rows_of(job: Job, results: Mapping[str, Result]) -> list[TableRow]:
    """The rows of a grid's table, with the numbers of finished trials."""
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


def caption(job: Job) -> str:
    return f"{job.grid.question} {setting(job)}"


def setting(job: Job) -> str:
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
    """The description of the grid in MLflow, as Markdown: links to trials of other grids, and the table without top-5,
    truncated if necessary."""
    if job.grid.robustness:
        table = protocol_table([one for one in measurements_of(job, results) if one.number != "top5"])
    else:
        table = grid_table(rows_of(job, results), SHORT)
    heading, rule, *others = table.markdown().splitlines()
    spaced = [line.replace(" | ", "&nbsp; | ") for line in (heading, *others)]  # MLflow leaves no room between columns
    # MLflow shows only the first line of the first paragraph until it is unfolded, so the links are at its beginning.
    first = f"{_links_elsewhere(job, results)}**{job.grid.question}** {setting(job)}"
    text = "\n".join([first, "", spaced[0], rule, *spaced[1:]])
    if len(text) <= LONGEST_NOTE:
        return text
    kept = text[: LONGEST_NOTE - 100].rpartition("\n")[0]
    return f"{kept}\n\n{len(text.splitlines()) - len(kept.splitlines())} more rows are in `table.md`."


def _links_elsewhere(job: Job, results: Mapping[str, Result]) -> str:
    """Links to the experiments of other grids that trained some of the trials; they work on any page of the server."""
    known = [results[trial.key] for trial in job.trials if trial.key in results]
    # Results from the file of a study have no tags.
    places = Counter((result.tags["san.grid"], result.experiment_id) for result in known if result.tags)
    links = [
        f"{cells} of {len(job.trials)} in [{grid}]({runs_page(experiment_id)})"
        for (grid, experiment_id), cells in places.items()
        if grid != job.name
    ]
    return f"Trials: {', '.join(links)}. " if links else ""
