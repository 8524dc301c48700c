"""Executes what a plan lacks: trains trials and measures trained ones, each once, however many commands run."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster import ClusterError, Observer, Outcome, Placement, ReportFn, Resources, concurrency, this_machine
from cluster.interrupt import interruptible
from cluster.serial import sweep as serial_sweep
from experiments.config.grid import Trial
from experiments.errors import MachineError, UserError
from experiments.runner.grid_run import GridRun, check_init, is_done, is_finished, known_results, print_status
from experiments.runner.measure import MeasureProgress, MeasureTask, measure_trial
from experiments.runner.plan import concurrency_in_words, images_in_words, missing_measurements, to_train
from experiments.runner.progress import Progress, duration, trial_count
from experiments.runs.claims import Claim, StopRequest, claim_of, claimed_trials
from experiments.runs.store import ClaimedError, StorageError, Store, node_lock, retry
from experiments.tracking import Result, TrackerError
from experiments.training.device import training_device
from experiments.training.trainer import Control, ShouldContinue, run_trial
from pipelines import DataError
from san import CheckpointError


class Sweep(Protocol):
    """`cluster.sweep.sweep` or `cluster.serial.sweep`, whose docstrings explain the arguments."""

    def __call__(
        self,
        function: Callable[[Any, ReportFn], object],
        values: Mapping[str, Any],
        *,
        observer: Observer,
        non_retryable: tuple[type[Exception], ...] = (),
        fatal: tuple[type[Exception], ...] = (),
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, Outcome]: ...


def execute(grid_run: GridRun, address: str | None, elsewhere: Mapping[str, Result] = {}) -> dict[str, Result]:
    """Trains the unfinished trials of a grid and measures what its protocol lacks. Returns the results, with those of trials
    that were finished `elsewhere`.

    Raises:
        UserError, ClusterError: the grid cannot run here; nothing was written.
        KeyboardInterrupt: the user stopped the run; the next call resumes.
    """
    if grid_run.request.serial:
        _require_one_process(grid_run, address)

    def known() -> dict[str, Result]:
        return {**known_results(grid_run), **elsewhere}

    results = known()
    missing = {trial.key: trial for trial, _ in to_train(grid_run, results)}
    done = sum(is_finished(results, trial) for trial in grid_run.selected)
    stopped = sum(is_done(grid_run, results, trial) for trial in grid_run.selected) - done
    equal = len(grid_run.selected) - done - stopped - len(missing)
    skipped = f", {done} already finished" if done else ""
    skipped += f", {stopped} already stopped early" if stopped else ""
    skipped += f", {equal} identical to another trial" if equal else ""
    first, *notes = images_in_words(grid_run)
    print_status(f"{first}: {trial_count(len(grid_run.selected))}{skipped}, {len(missing)} to train")
    for note in notes:
        print_status(note)
    try:
        if missing:
            trained = _train(grid_run, missing, address)
            results = retry(known)
            unsent = [missing[key].name for key in trained if not is_done(grid_run, results, missing[key])]
            if unsent:
                print_status(
                    f"{', '.join(unsent)}: trained, but MLflow did not accept all results; "
                    "run the same command again to send the rest"
                )
        if unmeasured := missing_measurements(grid_run, results):
            _measure(grid_run, unmeasured, address)
            results = retry(known)
    except TrackerError as error:
        raise TrackerError(
            f"{error}\ntrained trials are kept; run the same command again to resume and to send the missing results"
        ) from None
    return results


def _require_one_process(grid_run: GridRun, address: str | None) -> None:
    if (workers := grid_run.placement.workers) > 1:
        raise UserError(f"--serial trains in one process, but resources.workers={workers}; set resources.workers=1")
    if address is not None:
        raise UserError(f"--serial and --address {address}: give only one of them, because --serial trains in this process")


def _train(grid_run: GridRun, missing: dict[str, Trial], address: str | None) -> list[str]:
    """Trains trials that no other process is training. Returns the keys of the trials that did not fail."""
    start, store = time.monotonic(), grid_run.workspace.store
    check_init(grid_run, missing.values())
    with _on_cluster(grid_run, address) as cluster:
        if cluster.is_local:  # Fail before any trial starts if none can run.
            training_device(grid_run.trials[0].config)
        at_once = _at_once(grid_run, grid_run.placement, cluster.resources, len(missing))
        print_status(concurrency_in_words(grid_run, cluster.resources, at_once))
        with claimed_trials(store, grid_run.full_name, missing, grid_run.request.take_over) as (claimed, claim):
            cluster.at_loss.append(claim.release)
            _print_skipped(store, missing, claimed)
            results = known_results(grid_run)  # another run may have finished trials in the meantime
            claimed = {key: trial for key, trial in claimed.items() if not is_done(grid_run, results, trial)}
            prepare(grid_run)
            outcomes = _train_claimed(grid_run, claimed, claim, results, cluster.at_loss, start)
            _conclude(grid_run, "trained", outcomes, missing, start)
            for key, outcome in outcomes.items():
                if outcome.error is not None:
                    retry(functools.partial(grid_run.tracker.failed, missing[key], outcome.error))
    return [key for key, outcome in outcomes.items() if outcome.error is None]


def _train_claimed(
    grid_run: GridRun,
    trials: dict[str, Trial],
    claim: Claim,
    results: Mapping[str, Result],
    at_loss: list[Callable[[], object]],
    start: float,
) -> dict[str, Outcome]:
    """Trains trials and shows their progress. On Ctrl-C, the trials save their work first."""
    epochs = {key: trial.config.recipe.epochs for key, trial in trials.items()}
    serial = grid_run.request.serial
    # A bar that is redrawn would write over a debugger's prompt.
    progress = Progress({key: trial.name for key, trial in trials.items()}, epochs, sys.stderr, start=start, live=not serial)

    def mark_interrupted() -> None:
        """And records the failures until then, which the sweep does not return."""
        _mark_interrupted(grid_run, trials.values())
        for outcome in progress.failures:
            with suppress(TrackerError):
                grid_run.tracker.failed(trials[outcome.key], str(outcome.error))
            with suppress(OSError):
                _write_traceback(grid_run, trials[outcome.key], outcome.traceback)

    at_loss += [mark_interrupted, progress.close]
    stop = StopRequest(grid_run.workspace.store, grid_run.full_name)

    def ask_trials() -> None:
        progress.interrupted()
        stop.send()

    stop.withdraw()  # that of a run that was killed
    try:
        with (
            _early_stopping(grid_run, results) as should_continue,
            _sweep(grid_run, grid_run.placement) as sweep,
            interruptible(ask_trials) as is_interrupted,
        ):
            control = Control(should_continue, stop, claim, may_stand_still=serial)
            return sweep(
                functools.partial(run_trial, grid_run.workspace, control=control),
                trials,
                observer=progress,
                non_retryable=(UserError, DataError, FloatingPointError),
                fatal=(MachineError, ClaimedError),
                is_interrupted=is_interrupted,
            )
    except (KeyboardInterrupt, ClusterError):
        mark_interrupted()
        raise
    finally:
        progress.close()
        stop.withdraw()


def _measure(grid_run: GridRun, missing: dict[str, MeasureTask], address: str | None) -> None:
    """Measures the robustness of trained trials and tracks each result at once. `missing` holds the tasks by key."""
    start, store, placement = time.monotonic(), grid_run.workspace.store, replace(grid_run.placement, workers=1)
    trials = {key: task.trial for key, task in missing.items()}
    with (
        _on_cluster(grid_run, address) as cluster,
        claimed_trials(store, grid_run.full_name, trials, grid_run.request.take_over) as (claimed, claim),
    ):
        cluster.at_loss.append(claim.release)
        _print_skipped(store, trials, claimed)
        tasks = {key: missing[key] for key in claimed}
        at_once, protocol = _at_once(grid_run, placement, cluster.resources, len(tasks)), grid_run.grid.robustness
        number = trial_count(len(tasks))
        print_status(f"robustness ({protocol}): {number} to measure, {at_once} at a time, {placement} per trial")

        def keep(task: MeasureTask, metrics: dict[str, float]) -> None:
            retry(lambda: grid_run.tracker.add(task.run_id, metrics))

        prepare(grid_run)
        progress = MeasureProgress(tasks, keep, sys.stderr, live=not grid_run.request.serial)
        errors = UserError, DataError, CheckpointError
        mark_interrupted = functools.partial(_mark_interrupted, grid_run, ())
        cluster.at_loss.extend((mark_interrupted, progress.close))
        try:
            with _sweep(grid_run, placement) as sweep:
                outcomes = sweep(measure_trial, tasks, observer=progress, non_retryable=errors)
        except (KeyboardInterrupt, ClusterError):
            mark_interrupted()
            raise
        finally:
            progress.close()
        _conclude(grid_run, "measured", outcomes, trials, start)


def _mark_interrupted(grid_run: GridRun, trials: Iterable[Trial]) -> None:
    with suppress(TrackerError):
        grid_run.tracker.interrupted(trials)


class _Cluster(NamedTuple):
    resources: Resources
    is_local: bool
    """Whether it is this machine."""
    at_loss: list[Callable[[], object]]
    """Called if Ray dies, before this process ends, the last one first."""


@contextmanager
def _on_cluster(grid_run: GridRun, address: str | None) -> Iterator[_Cluster]:
    """Starts Ray on this machine, or joins a cluster. With `--serial`, this process is all there is."""
    if grid_run.request.serial:
        if grid_run.placement.gpus == 0:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as Ray does
        yield _Cluster(this_machine(), True, [])
        return
    from cluster.session import is_local, only_session, session  # imports Ray

    at_loss, local = list[Callable[[], object]](), is_local(address)
    print_status("starting Ray on this machine" if local else "joining the Ray cluster")
    with session(address, at_loss) as resources, only_session() if local else nullcontext(True) as is_only:
        if not is_only:
            print_status(
                "another `san run` is using this machine: each takes all CPUs, so both are slower. To share the CPUs, start "
                f"each with some of them, such as `taskset --cpu-list 0-{max(resources.cpus // 2 - 1, 0)} san run ...`"
            )
        yield _Cluster(resources, local, at_loss)


def _print_skipped(store: Store, trials: Mapping[str, Trial], claimed: Mapping[str, Trial]) -> None:
    if others := {key: trial.name for key, trial in trials.items() if key not in claimed}:
        claim = claim_of(store, next(iter(others))) or "it has just ended"
        remedy = "" if store.shared else "; if it was killed, run its grid with --take-over"
        print_status(f"skipped, because another `san run` uses the same trials ({claim}): {', '.join(others.values())}{remedy}")


def _at_once(grid_run: GridRun, placement: Placement, resources: Resources, trials: int) -> int:
    """How many trials run at once."""
    fits = concurrency(placement, resources)
    return 1 if grid_run.request.serial else min(fits, trials)


@contextmanager
def _sweep(grid_run: GridRun, placement: Placement) -> Iterator[Sweep]:
    """The sweep in this process with `--serial`, else Ray's. The folder for Ray's files is deleted at the end, and before if a
    killed run has left it."""
    if grid_run.request.serial:
        yield serial_sweep
        return
    from cluster.sweep import sweep  # imports Ray

    store, folder = grid_run.workspace.store, f"sweeps/{grid_run.full_name}"
    store.delete_folder(folder)
    yield functools.partial(sweep, placement=placement, storage=store.uri(folder))
    with suppress(StorageError):
        store.delete_folder(folder)


def _conclude(grid_run: GridRun, verb: str, outcomes: Mapping[str, Outcome], trials: Mapping[str, Trial], start: float) -> None:
    """Stores the tracebacks of failed trials, and prints `trained 3 of 4 trials in 2 min 40 s; failed: footprint9`."""
    failed = [key for key, outcome in outcomes.items() if outcome.error is not None]
    for key in failed:
        _store_traceback(grid_run, trials[key], outcomes[key].traceback)
    total = len(outcomes)
    number = f"{total - len(failed)} of {trial_count(total)}" if failed else trial_count(total)
    names = f"; failed: {', '.join(trials[key].name for key in failed)}" if failed else ""
    print_status(f"{verb} {number} in {duration(time.monotonic() - start)}{names}")


@contextmanager
def _early_stopping(grid_run: GridRun, results: Mapping[str, Result]) -> Iterator[ShouldContinue | None]:
    """Decides which trials continue, if the grid has early stopping. It also knows the results of earlier calls."""
    stopping = grid_run.grid.early_stopping
    if stopping is None:
        yield None
        return
    from cluster.halving import SuccessiveHalving, on_the_head  # imports Ray Tune

    before = {trial.key: results[trial.key].run_id for trial in grid_run.trials if is_done(grid_run, results, trial)}
    tracker = grid_run.tracker
    histories = {key: retry(functools.partial(tracker.history, run_id, "val/top1")) for key, run_id in before.items()}
    known = {key: [top1 for _, top1 in history] for key, history in histories.items()}
    settings = stopping.grace_epochs, stopping.reduction, grid_run.trials[0].config.recipe.epochs, known
    with (
        nullcontext(SuccessiveHalving(*settings).should_continue)
        if grid_run.request.serial
        else on_the_head(*settings) as should_continue
    ):
        yield should_continue


def prepare(grid_run: GridRun) -> None:
    """Creates the grid's experiment and parent run in MLflow, if they are missing."""
    with node_lock(grid_run.workspace.store.folder, "mlflow"):  # two grids may be the first in a store
        grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.artifacts)


def _write_traceback(grid_run: GridRun, trial: Trial, text: str) -> Path:
    path = grid_run.workspace.runs / "failures" / f"{trial.name}-{trial.key}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")  # names of images need not be text
    return path


def _store_traceback(grid_run: GridRun, trial: Trial, text: str) -> None:
    workspace = grid_run.workspace
    try:
        path = _write_traceback(grid_run, trial, text)
    except OSError as error:
        print_status(f"cannot write the traceback of {trial.name} ({error}); the traceback follows\n{text}")
        return
    retry(lambda: workspace.store.upload(path))
    log = workspace.uri(workspace.log(trial, node="*"))
    print_status(f"{trial.name}: traceback in {workspace.uri(path)}, log in {log}")
