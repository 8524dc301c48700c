"""Executes what a plan lacks: trains trials and measures trained ones, each once, however many commands run."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster import concurrency
from experiments.errors import MachineError, UserError
from experiments.grids.grid import Trial
from experiments.runner.grid_run import GridRun, is_done, known_results, print_status
from experiments.runner.measure import MeasureProgress, MeasureTask, measure_trial
from experiments.runner.plan import room, trials_that_fit
from experiments.runner.progress import Progress, duration
from experiments.runs.claims import Claim, StopRequest, claimed_trials
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


def train(grid_run: GridRun, missing: dict[str, Trial], address: str | None, description: str) -> list[str]:
    """Trains trials that no other process is training, and describes the grid in MLflow. Returns the keys of the trials that
    did not fail."""
    from cluster.session import alone, is_local, session  # imports Ray
    from experiments.runner.restart import Restart

    start = time.monotonic()
    on_this_machine = is_local(address)
    restart = Restart(grid_run, missing.values(), on_this_machine)
    with session(address, restart) as resources, alone() if on_this_machine else nullcontext(True) as is_alone:
        if not is_alone:
            print_status(
                "another `san run` is using this machine: each takes all CPUs, so both are slower. To share the CPUs, start "
                "each with some of them, such as `taskset --cpu-list 0-3 san run ...`"
            )
        if on_this_machine:  # Fail before any trial starts if none can run.
            require_gpu(grid_run.trials[0].config)
        at_once = min(trials_that_fit(grid_run, resources), len(missing))
        if on_this_machine:
            training_device(grid_run.trials[0].config)
        print_status(room(grid_run, resources, at_once))
        name = grid_run.title
        with claimed_trials(grid_run.workspace.store, name, missing, grid_run.take_over) as (claimed, claim):
            others = [trial.name for key, trial in missing.items() if key not in claimed]
            if others:
                print_status(f"skipped, because another `san run` is training the same trials: {', '.join(others)}")
            results = known_results(grid_run)  # another run may have finished trials in the meantime
            claimed = {key: trial for key, trial in claimed.items() if not is_done(grid_run, results, trial)}
            with _early_stopping(grid_run, results) as should_continue:
                outcomes = _sweep(grid_run, claimed, description, claim, should_continue, restart, start)
            for key, outcome in outcomes.items():
                if outcome.error is not None:
                    _store_traceback(grid_run, missing[key], outcome.traceback)
                    retry(functools.partial(grid_run.tracker.failed, missing[key], outcome.error))
    trained = [key for key, outcome in outcomes.items() if outcome.error is None]
    failed = [missing[key].name for key, outcome in outcomes.items() if outcome.error is not None]
    print_status(_summary("trained", len(trained), failed, time.monotonic() - start))
    return trained


def _summary(done: str, finished: int, failed: Sequence[str], seconds: float) -> str:
    """A summary such as `trained 3 of 4 trials in 2 min 40 s; failed: footprint9`."""
    total = finished + len(failed)
    text = f"{done} {finished}{f' of {total}' if failed else ''} {'trial' if total == 1 else 'trials'} in {duration(seconds)}"
    return f"{text}; failed: {', '.join(failed)}" if failed else text


@contextmanager
def _early_stopping(grid_run: GridRun, results: Mapping[str, Result]) -> Iterator[Judge | None]:
    """The judge that stops trials early, if the grid enables it. It also knows the results of earlier calls."""
    wanted = grid_run.grid.early_stopping
    if wanted is None:
        yield None
        return
    from cluster.halving import Halving, judge  # imports Ray Tune

    halving = Halving(wanted.grace_epochs, wanted.reduction, grid_run.trials[0].config.recipe.epochs)
    before = [trial for trial in grid_run.trials if is_done(grid_run, results, trial)]
    workspace = grid_run.workspace
    known = {trial.key: read_top1(workspace.store.read(workspace.summary(trial))) for trial in before}
    with judge(halving, known) as should_continue:
        yield should_continue


def prepare(grid_run: GridRun, description: str) -> None:
    """Creates the grid's experiment in MLflow and describes the results so far."""
    with node_lock(grid_run.workspace.store.folder, "mlflow", OUTAGE_TIMEOUT):  # two grids may be the first in a store
        grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
        grid_run.tracker.describe(description)


def _sweep(
    grid_run: GridRun,
    missing: dict[str, Trial],
    description: str,
    claim: Claim,
    should_continue: Judge | None,
    restart: Restart,
    start: float,
) -> dict[str, Outcome]:
    from cluster.interrupt import interruptible
    from cluster.sweep import sweep  # imports Ray Tune and Train

    prepare(grid_run, description)
    grid_run.tracker.begin()
    names = {key: trial.name for key, trial in missing.items()}
    progress = Progress(names, {key: trial.config.recipe.epochs for key, trial in missing.items()}, sys.stderr, start=start)
    restart.has_advanced = progress.has_advanced
    store = grid_run.workspace.store.with_outage_timeout(0)  # training goes on while a bucket is away
    stop = StopRequest(store, grid_run.title)
    stop.withdraw()  # that of a run that was killed

    def ask_trials() -> None:
        progress.interrupted()
        stop.send()

    try:
        with (
            _sweep_storage(grid_run.workspace.store, grid_run.title) as storage,
            interruptible(ask_trials) as is_interrupted,
        ):
            train_one = functools.partial(
                run_trial, grid_run.workspace, should_continue=should_continue, should_stop=stop, grid_claim=claim
            )
            return sweep(
                train_one,
                missing,
                grid_run.placement,
                storage=storage,
                observer=progress,
                non_retryable=(UserError, DataError, FloatingPointError),
                fatal=(MachineError, ClaimedError),
                is_interrupted=is_interrupted,
            )
    except KeyboardInterrupt:
        with suppress(TrackerError):
            grid_run.tracker.interrupted(missing.values())
        raise
    finally:
        progress.close()
        stop.withdraw()


@contextmanager
def _sweep_storage(store: Store, name: str) -> Iterator[str]:
    """Location for Ray's files of a sweep; deletes those of an earlier, killed run."""
    folder = f"sweeps/{name}"
    store.delete_folder(folder)
    yield store.uri(folder)
    with suppress(StorageError):
        store.delete_folder(folder)


def measure(grid_run: GridRun, missing: dict[str, MeasureTask], address: str | None, description: str) -> None:
    """Measures the robustness of trained trials and tracks each result at once. The arguments are as in `train`."""
    from cluster.session import is_local, session  # imports Ray
    from cluster.sweep import sweep
    from experiments.runner.restart import Restart

    start, placement, name = time.monotonic(), replace(grid_run.placement, workers=1), grid_run.title

    def keep(task: MeasureTask, metrics: dict[str, float]) -> None:
        retry(lambda: grid_run.tracker.add(task.run_id, metrics))

    trials = {key: task.trial for key, task in missing.items()}
    restart = Restart(grid_run, trials.values(), is_local(address))
    store = grid_run.workspace.store
    with session(address, restart) as resources, claimed_trials(store, name, trials, grid_run.take_over) as (claimed, _):
        values = {key: missing[key] for key in claimed}
        at_once = min(concurrency(placement, resources), len(values))
        protocol = grid_run.grid.robustness
        print_status(f"robustness ({protocol}): {len(values)} trials to measure, {at_once} at a time, {placement} per trial")
        prepare(grid_run, description)
        grid_run.tracker.begin()
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
        _store_traceback(grid_run, missing[key].trial, outcomes[key].traceback)
    names = [missing[key].trial.name for key in failed]
    print_status(_summary("measured", len(outcomes) - len(failed), names, time.monotonic() - start))


def _store_traceback(grid_run: GridRun, trial: Trial, text: str) -> None:
    workspace = grid_run.workspace
    path = workspace.runs / "failures" / f"{trial.name}-{trial.key}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print_status(f"{path}: cannot write the traceback of {trial.name} ({error.strerror}); the traceback follows\n{text}")
        return
    retry(lambda: workspace.store.upload(path))
    log = workspace.uri(workspace.log(trial, node="*"))
    print_status(f"{trial.name}: traceback in {workspace.uri(path)}, log in {log}")
