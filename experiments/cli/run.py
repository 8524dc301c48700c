"""`san run` and `san study`: train unfinished trials, measure robustness, print and write the results."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from experiments.config.expand import profile_path
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.evaluation.robustness import PROTOCOLS, ROBUSTNESS_METRICS
from experiments.paper.tables import paper_claims
from experiments.report.data import grid_report
from experiments.report.study import Section, write_study
from experiments.report.write import print_report
from experiments.runner.execute import execute, prepare
from experiments.runner.grid_run import GridRun, is_finished, known_results, open_grid_run, print_status
from experiments.tracking import TrackerError
from experiments.tracking.results_file import ResultsFile
from experiments.training.images import open_data


def run(request: GridRequest, address: str | None) -> bool:
    """Trains and measures what is missing, prints the table, draws the plot and writes the page. Returns whether all trials are
    finished.

    The report in MLflow is updated even if nothing was missing, because another grid or version may have trained its trials. A
    user without write access still gets the table.
    """
    grid_run = open_grid_run(request)
    results = execute(grid_run, address)
    files, complete = print_report(grid_report(grid_run, results), has_page=True)
    try:
        prepare(grid_run)
        grid_run.tracker.log_report(files, grid_run.suffix[1:] or None, complete)
    except (TrackerError, UserError) as error:
        print_status(f"the report in MLflow was not updated: {error}")
    return complete


def study(request: GridRequest, address: str | None, page: Path, kept: Path, trains: bool = True) -> bool:
    """Trains the grids with claims of the paper, which are in the folder `request.grid`, and writes a page with the results.
    Returns whether all trials are finished. Of grids with a protocol, only the rows in claims are trained and measured.

    Results are added to the file `kept` after each grid, and those with all numbers of the protocols to a file beside it, as in
    `trials-robustness.csv`. Trials in these files count as finished, wherever they were trained; a network that is only in the
    first one is trained again to measure it, unless its checkpoint is in the store. Without `trains`, nothing is trained or
    measured: finished trials are added to the files, and the page is written.

    Raises:
        UserError: as `open_grid_run` and `run`, before training starts.
    """
    profile_path(request.profile)  # before a folder of its name is made
    trained, measured = ResultsFile(kept), ResultsFile(kept.with_stem(f"{kept.stem}-robustness"), ROBUSTNESS_METRICS)
    for path, option in ((page, "--page"), (kept, "--results"), (measured.path, "--results")):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"{path}: cannot write this file; choose another one with {option}")
    for file in (trained, measured):
        file.read()
    grid_runs, files = list[GridRun](), dict[str, ResultsFile]()
    for name, claims in paper_claims().items():
        compared = dict.fromkeys(row for claim in claims for row in (claim.better, claim.worse))
        only, files[name] = (tuple(compared), measured) if name in PROTOCOLS else ((), trained)
        grid_runs.append(open_grid_run(replace(request, grid=request.grid / f"{name}.yaml", only=only)))
    for grid_run in grid_runs:
        file = files[grid_run.name]
        results = execute(grid_run, address, file.read()) if trains else known_results(grid_run)
        file.add(grid_run.selected, results)
    training, validation = open_data(grid_runs[0].trials[0].config.data)
    sections = [Section(grid_run, files[grid_run.name].read()) for grid_run in grid_runs]
    write_study(sections, page, len(training), len(validation))
    print_status(f"study: {page}")
    return all(is_finished(section.results, trial) for section in sections for trial in section.grid_run.selected)
