"""Executes what a plan lacks: trains trials and measures trained ones, each once, however many commands run."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster import concurrency
from experiments.errors import MachineError, UserError
from experiments.grids.grid import Trial
from experiments.runner.job import Job, is_done, known_results, say
from experiments.runner.measure import MeasureProgress, MeasureTask, measure_trial
from experiments.runner.plan import room, trials_that_fit
from experiments.runner.progress import Progress, duration
from experiments.runs.claims import Claim, claimed_trials
from experiments.runs.retry import OUTAGE_TIMEOUT, retry
from experiments.runs.store import ClaimedError, StorageError, Store, node_lock
from experiments.runs.summary import read_top1
from experiments.tracking import Result, TrackerError
from experiments.training.device import require_gpu, training_device
from experiments.training.trainer import run_trial
from pipelines import DataError

if TYPE_CHECKING:
    from cluster.halving import Judge
    from cluster.sweep import Outcome
    from experiments.runner.restart import Restart


def train(job: Job, missing: dict[str, Trial], address: str | None, description: str) -> list[str]:
    """Trains trials that no other process is training, and describes the grid in MLflow. Returns the keys of the trials that
    did not fail."""
    from cluster.session import is_local, session  # imports Ray
    from experiments.runner.restart import Restart

    start = time.monotonic()
    on_this_machine = is_local(address)
    restart = Restart(job, missing.values(), on_this_machine)
    with session(address, restart) as resources:
        if on_this_machine:  # Fail before any trial starts if none can run.
            require_gpu(job.trials[0].config)
        at_once = min(trials_that_fit(job, resources), len(missing))
        if on_this_machine:
            training_device(job.trials[0].config)
        say(room(job, resources, at_once))
        name = f"{job.name}-{job.profile}"
        with claimed_trials(job.workspace.store, name, missing, job.take_over) as (claimed, claim):
            others = [trial.name for key, trial in missing.items() if key not in claimed]
            if others:
                say(f"skipped, because another `san run` is training the same trials: {', '.join(others)}")
            results = known_results(job)  # another run may have finished trials in the meantime
            claimed = {key: trial for key, trial in claimed.items() if not is_done(job, results, trial)}
            with _early_stopping(job, results) as should_continue:
                outcomes = _sweep(job, claimed, description, claim, should_continue, restart, start)
            for key, outcome in outcomes.items():
                if outcome.error is not None:
                    _store_traceback(job, missing[key], outcome.traceback)
                    retry(functools.partial(job.tracker.failed, missing[key], outcome.error))
    trained = [key for key, outcome in outcomes.items() if outcome.error is None]
    failed = [missing[key].name for key, outcome in outcomes.items() if outcome.error is not None]
    say(_summary("trained", len(trained), failed, time.monotonic() - start))
    return trained


def _summary(done: str, finished: int, failed: Sequence[str], seconds: float) -> str:
    """A summary such as `trained 3 of 4 trials in 2 min 40 s; failed: footprint9`."""
    total = finished + len(failed)
    text = f"{done} {finished}{f' of {total}' if failed else ''} {'trial' if total == 1 else 'trials'} in {duration(seconds)}"
    return f"{text}; failed: {', '.join(failed)}" if failed else text


@contextmanager
def _early_stopping(job: Job, results: Mapping[str, Result]) -> Iterator[Judge | None]:
    """The judge that stops trials early, if the grid enables it. It also knows the results of earlier calls."""
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


def prepare(job: Job, description: str) -> None:
    """Creates the grid's experiment in MLflow and describes the results so far."""
    with node_lock(job.workspace.store.folder, "mlflow", OUTAGE_TIMEOUT):  # two grids may be the first in a store
        job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
        job.tracker.describe(description)


def _sweep(
    job: Job,
    missing: dict[str, Trial],
    description: str,
    claim: Claim,
    should_continue: Judge | None,
    restart: Restart,
    start: float,
) -> dict[str, Outcome]:
    from cluster.sweep import sweep  # imports Ray Tune and Train

    prepare(job, description)
    job.tracker.begin()
    names = {key: trial.name for key, trial in missing.items()}
    progress = Progress(names, {key: trial.config.recipe.epochs for key, trial in missing.items()}, sys.stderr, start=start)
    restart.has_advanced = progress.has_advanced
    train_one = functools.partial(run_trial, job.workspace, should_continue=should_continue, grid_claim=claim)
    try:
        with _sweep_storage(job.workspace.store, f"{job.name}-{job.profile}") as storage:
            return sweep(
                train_one,
                missing,
                job.placement,
                storage=storage,
                observer=progress,
                non_retryable=(UserError, DataError, FloatingPointError),
                fatal=(MachineError, ClaimedError),
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


def measure(job: Job, missing: dict[str, MeasureTask], address: str | None, description: str) -> None:
    """Measures the robustness of trained trials and tracks each result at once. The arguments are as in `train`."""
    from cluster.session import is_local, session  # imports Ray
    from cluster.sweep import sweep
    from experiments.runner.restart import Restart

    start, placement, name = time.monotonic(), replace(job.placement, workers=1), f"{job.name}-{job.profile}"

    def keep(task: MeasureTask, metrics: dict[str, float]) -> None:
        retry(lambda: job.tracker.add(task.run_id, metrics))

    trials = {key: task.trial for key, task in missing.items()}
    restart = Restart(job, trials.values(), is_local(address))
    store = job.workspace.store
    with session(address, restart) as resources, claimed_trials(store, name, trials, job.take_over) as (claimed, _):
        values = {key: missing[key] for key in claimed}
        at_once = min(concurrency(placement, resources), len(values))
        say(f"robustness ({job.grid.robustness}): {len(values)} trials to measure, {at_once} at a time, {placement} per trial")
        prepare(job, description)
        job.tracker.begin()
        watch = MeasureProgress(values, keep, sys.stderr)
        restart.has_advanced = watch.has_advanced
        try:
            with _sweep_storage(store, name) as storage:
                non_retryable = (UserError, DataError)
                outcomes = sweep(measure_trial, values, placement, storage=storage, observer=watch, non_retryable=non_retryable)
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
