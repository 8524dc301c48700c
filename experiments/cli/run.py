"""`san run` and `san study`: train unfinished cells, measure robustness, print the table."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import concurrency
from experiments.cli.options import duration
from experiments.cli.plan import cells_that_fit, room, to_train
from experiments.errors import MachineError, UserError
from experiments.evaluation.cells import Watch, Work, measure
from experiments.grids.expand import GRIDS_DIR
from experiments.grids.grid import Trial
from experiments.paper.tables import paper_claims
from experiments.report.build import missing_measurements, note, show
from experiments.report.study import section_of, write_study
from experiments.runs.locks import WhileLocked, claimed_cells, mlflow_lock
from experiments.runs.retry import retry
from experiments.runs.store import Lock, StorageError, Store
from experiments.runs.summary import read_top1
from experiments.tracking import Result, TrackerError
from experiments.tracking.results_file import add_results, read_results
from experiments.training.device import require_gpu, training_device
from experiments.training.images import open_data
from experiments.training.job import Job, is_done, is_finished, known_results, open_job, say
from experiments.training.progress import Progress
from experiments.training.trainer import run_trial
from pipelines import DataError

if TYPE_CHECKING:
    from cluster.halving import Judge
    from cluster.sweep import Outcome
    from experiments.cli.restart import Restart


def run(job: Job, address: str | None) -> bool:
    """Trains unfinished cells, prints the table and draws the plot. Returns whether all cells are finished.

    Raises:
        UserError, ClusterError: the grid cannot run here; nothing was written.
        KeyboardInterrupt: the user stopped the run; the next call resumes.
    """
    results = known_results(job)
    missing = {trial.key: trial for trial, _ in to_train(job, results)}
    done = sum(is_finished(results, trial) for trial in job.wanted)
    stopped = sum(is_done(job, results, trial) for trial in job.wanted) - done
    equal = len(job.wanted) - done - stopped - len(missing)
    found = f", {done} already finished" if done else ""
    found += f", {stopped} already stopped early" if stopped else ""
    found += f", {equal} identical to another cell" if equal else ""
    say(f"grid {job.name}, profile {job.profile}: {len(job.wanted)} cells{found}, {len(missing)} to train")
    if not missing and not missing_measurements(job, results):
        files, complete = show(job, results)
        _refresh(job, results, files, complete)
        return complete
    try:
        trained = _train(job, missing, address) if missing else []
        results = retry(lambda: known_results(job))
        unsent = [missing[key].name for key in trained if not is_done(job, results, missing[key])]
        if unsent:
            say(
                f"{', '.join(unsent)}: trained, but MLflow did not accept all results; "
                "run the same command again to send the rest"
            )
        if unmeasured := missing_measurements(job, results):
            _measure(job, unmeasured, results, address)
            results = retry(lambda: known_results(job))
        files, complete = show(job, results)
        retry(lambda: job.tracker.log_report(files, complete and job.wanted == job.trials))
        retry(lambda: job.tracker.describe(note(job, results)))
    except TrackerError as error:
        raise TrackerError(
            f"{error}\ntrained cells are kept; run the same command again to resume and to send the missing results"
        ) from None
    return complete


def study(
    profile: str, seeds: int, runs: str | Path | None, address: str | None, page: Path, kept: Path, train: bool = True
) -> bool:
    """Trains the paper's ablation grids and writes a page with the results. Returns whether all cells are finished.

    Results are added to the file `kept` after each grid. Its cells count as finished, wherever they were trained. Without
    `train`, nothing is trained: finished cells are added to the file, and the page is written.

    Raises:
        UserError: as `open_job` and `run`, before training starts.
    """
    for path, option in ((page, "--page"), (kept, "--results")):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"{path}: cannot write this file; choose another one with {option}")
    jobs = [open_job(GRIDS_DIR / f"{name}.yaml", profile, (), runs, seeds) for name in paper_claims()]
    for job in jobs:
        results = known_results(job) | read_results(kept)
        missing = {trial.key: trial for trial, _ in to_train(job, results)}
        if missing and train:
            say(f"grid {job.name}, profile {job.profile}: {len(missing)} cells to train")
            _train(job, missing, address)
            results = retry(functools.partial(known_results, job)) | read_results(kept)
        add_results(kept, job.trials, results)
    results = read_results(kept)
    training, validation = open_data(jobs[0].trials[0].config.data)
    sections = [section_of(job.grid, job.trials, results) for job in jobs]
    files = write_study(sections, page, len(training), len(validation))
    say(f"study: {files[0]}")
    return all(is_finished(results, trial) for job in jobs for trial in job.trials)


def _train(job: Job, missing: dict[str, Trial], address: str | None) -> list[str]:
    """Trains cells that no other process is training. Returns the keys of the cells that did not fail."""
    from cluster.session import is_local, session  # imports Ray
    from experiments.cli.restart import Restart

    start = time.monotonic()
    on_this_machine = is_local(address)
    restart = Restart(job, missing.values(), on_this_machine)
    with session(address, restart) as resources:
        if on_this_machine:  # Fail before any cell starts if none can run.
            require_gpu(job.trials[0].config)
        at_once = min(cells_that_fit(job, resources), len(missing))
        if on_this_machine:
            training_device(job.trials[0].config)
        say(room(job, resources, at_once))
        with claimed_cells(job.workspace.store, f"{job.name}-{job.profile}", missing) as (claimed, lock):
            others = [trial.name for key, trial in missing.items() if key not in claimed]
            if others:
                say(f"skipped, because another `san run` is training the same cells: {', '.join(others)}")
            results = known_results(job)  # another run may have finished cells in the meantime
            claimed = {key: trial for key, trial in claimed.items() if not is_done(job, results, trial)}
            with _early_stopping(job, results) as should_continue:
                outcomes = _sweep(job, claimed, results, lock, should_continue, restart, start)
            for key, outcome in outcomes.items():
                if outcome.error is not None:
                    _store_traceback(job, missing[key], outcome.traceback)
                    retry(functools.partial(job.tracker.failed, missing[key], outcome.error))
    trained = [key for key, outcome in outcomes.items() if outcome.error is None]
    failed = [missing[key].name for key, outcome in outcomes.items() if outcome.error is not None]
    say(_summary("trained", len(trained), failed, time.monotonic() - start))
    return trained


def _summary(done: str, finished: int, failed: Sequence[str], seconds: float) -> str:
    """A summary such as `trained 3 of 4 cells in 2 min 40 s; failed: footprint9`."""
    total = finished + len(failed)
    text = f"{done} {finished}{f' of {total}' if failed else ''} {'cell' if total == 1 else 'cells'} in {duration(seconds)}"
    return f"{text}; failed: {', '.join(failed)}" if failed else text


@contextmanager
def _early_stopping(job: Job, results: Mapping[str, Result]) -> Iterator[Judge | None]:
    """The judge that stops cells early, if the grid enables it. It also knows the results of earlier calls."""
    wanted = job.grid.early_stopping
    if wanted is None:
        yield None
        return
    from cluster.halving import Halving, judge  # imports Ray Tune

    halving = Halving(wanted.grace_epochs, wanted.reduction, job.trials[0].config.recipe.epochs)
    before = [trial for trial in job.trials if is_done(job, results, trial)]
    workspace = job.workspace
    known = {trial.key: read_top1(workspace.store.read(workspace.summary(trial))) for trial in before}
    with judge(halving, known) as should_continue:
        yield should_continue


def _prepare(job: Job, results: Mapping[str, Result]) -> None:
    """Creates the grid's experiment and describes the results so far."""
    with mlflow_lock(job.workspace.store):
        job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
        job.tracker.describe(note(job, results))


def _refresh(job: Job, results: Mapping[str, Result], files: list[Path], complete: bool) -> None:
    """Updates MLflow's pages of a finished grid, because another grid or version may have trained its cells.

    A user without write access still gets the table.
    """
    try:
        _prepare(job, results)
        job.tracker.log_report(files, complete and job.wanted == job.trials)
    except UserError as error:
        say(f"MLflow's pages of the grid were not updated: {error}")


def _sweep(
    job: Job,
    missing: dict[str, Trial],
    results: Mapping[str, Result],
    lock: Lock,
    should_continue: Judge | None,
    restart: Restart,
    start: float,
) -> dict[str, Outcome]:
    from cluster.sweep import sweep  # imports Ray Tune and Train

    _prepare(job, results)
    job.tracker.begin()
    names = {key: trial.name for key, trial in missing.items()}
    progress = Progress(names, {key: trial.config.recipe.epochs for key, trial in missing.items()}, sys.stderr, start=start)
    restart.has_advanced = progress.has_advanced
    train = functools.partial(run_trial, job.workspace, should_continue=should_continue)
    try:
        with _sweep_storage(job.workspace.store, f"{job.name}-{job.profile}") as storage:
            return sweep(
                train,
                missing,
                job.placement,
                storage=storage,
                observer=WhileLocked(progress, lock),
                non_retryable=(UserError, DataError, FloatingPointError),
                fatal=(MachineError,),
            )
    except KeyboardInterrupt:
        with suppress(TrackerError):
            job.tracker.interrupted(missing.values())
        raise
    finally:
        progress.close()


@contextmanager
def _sweep_storage(store: Store, name: str) -> Iterator[str]:
    """Location for Ray's files of a sweep; deletes those of an earlier, killed run."""
    folder = f"sweeps/{name}"
    store.delete_folder(folder)
    yield store.uri(folder)
    with suppress(StorageError):
        store.delete_folder(folder)


def _measure(job: Job, missing: dict[str, Work], results: Mapping[str, Result], address: str | None) -> None:
    """Measures the robustness of trained cells and tracks each result at once."""
    from cluster.session import is_local, session  # imports Ray
    from cluster.sweep import sweep
    from experiments.cli.restart import Restart

    start, placement, name = time.monotonic(), replace(job.placement, workers=1), f"{job.name}-{job.profile}"

    def keep(work: Work, metrics: dict[str, float]) -> None:
        retry(lambda: job.tracker.add(work.run_id, metrics))

    trials = {key: work.trial for key, work in missing.items()}
    restart = Restart(job, trials.values(), is_local(address))
    with session(address, restart) as resources, claimed_cells(job.workspace.store, name, trials) as (claimed, lock):
        values = {key: missing[key] for key in claimed}
        at_once = min(concurrency(placement, resources), len(values))
        say(f"robustness ({job.grid.robustness}): {len(values)} cells to measure, {at_once} at a time, {placement} per cell")
        _prepare(job, results)
        job.tracker.begin()
        watch = Watch(values, keep, sys.stderr)
        restart.has_advanced = watch.has_advanced
        try:
            with _sweep_storage(job.workspace.store, name) as storage:
                observer = WhileLocked(watch, lock)
                non_retryable = (UserError, DataError)
                outcomes = sweep(measure, values, placement, storage=storage, observer=observer, non_retryable=non_retryable)
        finally:
            watch.close()
    failed = [key for key, outcome in outcomes.items() if outcome.error is not None]
    for key in failed:
        _store_traceback(job, missing[key].trial, outcomes[key].traceback)
    names = [missing[key].trial.name for key in failed]
    say(_summary("measured", len(outcomes) - len(failed), names, time.monotonic() - start))


def _store_traceback(job: Job, trial: Trial, text: str) -> None:
    workspace = job.workspace
    path = workspace.runs / "failures" / f"{trial.name}-{trial.key}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        say(f"{path}: cannot write the traceback of {trial.name} ({error.strerror}); the traceback follows\n{text}")
        return
    retry(lambda: workspace.store.upload(path))
    log = workspace.uri(workspace.log(trial, node="*"))
    say(f"{trial.name}: traceback in {workspace.uri(path)}, log in {log}")
