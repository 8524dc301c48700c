"""A sweep calls a function for many values, as many at a time as fit on the cluster.

Ray Tune runs the cells, and Ray Train starts the workers of a cell. This file decides which cell runs next and whether a
failed cell is retried, because Tune does not count the resources that Train uses, and does not distinguish a lost node from
an error in a cell.
"""

import functools
import math
import os
import pickle
import tempfile
import textwrap
import time
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
import ray.train
import ray.tune
import ray.tune.search
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.tune.progress_reporter import TrialProgressCallback

from cluster.errors import ClusterError
from cluster.placement import Placement, Resources, concurrency, workers_that_fit
from cluster.session import alive, resources, session

Report = Callable[[Mapping[str, float]], None]
V = TypeVar("V")

# With several workers, a cell's driver computes nothing itself. It asks for a small part of a resource that only the head node
# has, so that all CPUs are left for the workers and the driver does not run on a node that may be preempted.
DRIVER_RESOURCES = {"node:__internal_head__": 0.001}

_LOSSES = 10
"""How many nodes a cell may lose without making progress. Limited, because the cell may be crashing its nodes."""
_FAILURES = 10
"""How often a cell is retried after its own failures, even if it makes progress every time."""
_SECONDS_TO_NOTICE = 30.0
"""Ray notices a lost node after 15 s; workers on other nodes notice lost connections at once."""
_AHEAD = 4
"""Minimum number of cells that wait for new nodes on a cluster that grows."""
_LONGEST_REASON = 800
"""Maximum length of the reason for a failure, in characters."""
_SECONDS_BETWEEN_CHECKS = 1.0
"""Interval between two requests for the cluster's resources."""
_SECONDS_TO_START = 15.0
"""How long a cell may take to start before the observer is told that it waits."""
_SECONDS_BETWEEN_NOTICES = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended: `error` is one line, or None for success; `traceback` contains the details."""

    key: str
    error: str | None = None
    traceback: str = ""


class Observer(Protocol):
    """Observes a sweep. Its methods are called in the process and thread that called `sweep`."""

    def started(self, key: str) -> None:
        """A cell starts, for the first time or as a retry."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        """The first worker of a cell has reported metrics."""

    def finished(self, outcome: Outcome) -> None:
        """A cell has ended and will not be retried."""

    def waiting(self, reason: str) -> None:
        """No cell can run, for example because nodes were lost. Called at once, and then every minute."""


def sweep(
    function: Callable[[V, Report], object],
    values: Mapping[str, V],
    placement: Placement,
    *,
    storage: Path | str,
    observer: Observer,
    retries: int = 1,
    progress: str | None = None,
    non_retryable: tuple[type[Exception], ...] = (),
    fatal: tuple[type[Exception], ...] = (),
) -> dict[str, Outcome]:
    """Calls `function(value, report)` for every value, in other processes, and returns how each call ended.

    Args:
        function: runs in every worker of a cell. All workers must call `report(metrics)` equally often, because a report waits
            for all workers; it takes about 5 ms, or up to 0.2 s with several workers. Cells with one worker share processes,
            so the function must not leave anything behind that changes the next result. A process in which a cell failed is
            not used again.
        values: by key; cells start in this order, limited by the free resources of the cluster. If the cluster grows, a few
            more are queued in Ray, because its autoscaler adds nodes for queued work.
        placement: resources of a cell. Without GPUs, a cell sees none. With several workers, the rank variables of
            `torch.distributed` are set.
        storage: a folder that all nodes share, or a URI that Ray supports. Files in a folder are deleted at the end.
        observer: receives starts, progress and ends of cells.
        retries: how often a cell that raises or dies is called again, from the beginning; the function itself must resume. A
            cell that loses a node or is preempted is retried up to 10 times in addition, and waits for nodes if there are none.
        progress: a metric, such as the number of epochs. If it has increased since the last failure, retries are counted from
            zero again, up to 10 failures in total.
        non_retryable: exceptions after which a cell is not retried, because it would raise them again.
        fatal: exceptions after which no other cell starts, because all cells would raise them.

    Raises:
        ClusterError: a cell does not fit on the cluster, or raised a `fatal` exception.

    A failed cell does not affect the others. Ctrl-C and exceptions of the observer end all cells and the session.
    """
    if not values:
        return {}
    with session() as found, _own_folder(storage) as folder:
        concurrency(placement, found)
        queue = _Queue(values, placement)
        follower = _Follower(observer, queue, retries, progress)
        trainable = _trainable(function, dict(values), placement, folder, non_retryable, fatal)
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(trainable, _trial_resources(placement)),
            tune_config=ray.tune.TuneConfig(search_alg=queue, num_samples=-1, reuse_actors=placement.workers == 1),
            run_config=ray.tune.RunConfig(
                name="tune", storage_path=folder, verbose=0, callbacks=[follower, _WaitNotice(observer, placement), _Silent()]
            ),
        )
        try:
            tuner.fit()
        except BaseException:
            ray.shutdown()  # otherwise Tune leaves its trials running
            raise
        if follower.fatal is not None:
            raise ClusterError(follower.fatal)
    return {key: follower.outcomes[key] for key in values}


@contextmanager
def _own_folder(storage: Path | str) -> Iterator[str]:
    """A folder in `storage` for this sweep only."""
    place, mark, options = str(storage).partition("?")
    if "://" in place:
        yield f"{place}/sweep-{uuid.uuid4().hex}{mark}{options}"
        return
    path = Path(storage).resolve()
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sweep-", dir=path) as folder:
        yield folder


def _trial_resources(placement: Placement) -> dict[str, float]:
    if placement.workers > 1:
        return DRIVER_RESOURCES
    return {"CPU": placement.cpus, "GPU": placement.gpus}


def _trainable(
    function: Callable[[V, Report], object],
    values: dict[str, V],
    placement: Placement,
    folder: str,
    non_retryable: tuple[type[Exception], ...],
    fatal: tuple[type[Exception], ...],
) -> Callable[[dict[str, str]], None]:
    """The function that Tune runs once per cell. It contains the values, because Tune would search them for parameters."""

    def cell(config: dict[str, str]) -> None:
        key = config["key"]
        # Every attempt has a new name, because Train would resume a run with the same name.
        name = f"{key}-{uuid.uuid4().hex[:8]}"
        nodes = alive() if placement.workers > 1 else frozenset()
        try:
            _train(functools.partial(function, values[key]), placement, name, folder)
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, (*non_retryable, *fatal)):
                raise _NonRetryableError(_line(str(cause)), traceback.format_exc(), isinstance(cause, fatal)) from None
            elif _loses_one(nodes):
                raise _NodeLostError("a node was lost") from error
            else:
                raise

    return cell


def _train(call: Callable[[Report], object], placement: Placement, name: str, folder: str) -> None:
    """Runs one cell inside its Tune trial. Only this function distinguishes one worker from several.

    A single worker runs in the trial's process, because starting a worker group would take 15 s of CPU time per cell. Ray
    does not set RANK and WORLD_SIZE there. Ray Train's local mode would end the process group of torch.distributed with each
    cell, and DeepSpeed cannot use a second one in the same process.
    """

    def worker(send: Callable[[dict[str, Any]], None]) -> None:
        if not placement.gpus:  # Ray hides the GPUs only if the cluster was started with a setting for this
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Nested, to distinguish metrics from Tune's own entries in a result.
        call(lambda metrics: send({"metrics": dict(metrics)}))

    if placement.workers == 1:
        return worker(ray.tune.report)

    from ray.train.torch import TorchTrainer  # imports torch, which the driver of a sweep does not need
    from ray.tune.integration.ray_train import TuneReportCallback

    from cluster.ranks import Ranks

    scaling = ray.train.ScalingConfig(
        num_workers=placement.workers,
        use_gpu=placement.gpus > 0,
        resources_per_worker={"CPU": placement.cpus, "GPU": placement.gpus},
    )
    callbacks: list[Any] = [TuneReportCallback()]  # type: ignore[no-untyped-call]
    run = ray.train.RunConfig(name=name, storage_path=folder, callbacks=callbacks)
    TorchTrainer(lambda: worker(ray.train.report), torch_config=Ranks(), scaling_config=scaling, run_config=run).fit()


class _NonRetryableError(Exception):
    """The function raised an exception that it would raise again: message, traceback, and whether the sweep must end."""


class _NodeLostError(Exception):
    """Workers failed because a node of the cluster was lost."""


def _loses_one(nodes: frozenset[str]) -> bool:
    """Whether one of several nodes is lost. Waits, because errors of other workers arrive before Ray notices the loss."""
    limit = time.monotonic() + (_SECONDS_TO_NOTICE if len(nodes) > 1 else 0)
    while nodes <= alive():
        if time.monotonic() >= limit:
            return False
        time.sleep(0.5)
    return True


class _Queue(ray.tune.search.Searcher):
    """The queue of cells, from which Tune gets the next one."""

    def __init__(self, keys: Iterable[str], placement: Placement) -> None:
        super().__init__()
        self.waiting, self.placement = deque(keys), placement
        self.running: set[str] = set()
        """Ids of Tune's trials."""
        self._room, self._checked_at = 0, -math.inf

    def suggest(self, trial_id: str) -> dict[str, str] | None:
        if not self.waiting:
            return None if self.running else self.FINISHED  # type: ignore[return-value]
        if len(self.running) >= self._room_now():
            return None
        self.running.add(trial_id)
        return {"key": self.waiting.popleft()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.running.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Does nothing, because sweeps are not restored."""

    def _room_now(self) -> int:
        """The number of cells that may run or wait; nodes may be added or lost at any time."""
        if time.monotonic() - self._checked_at >= _SECONDS_BETWEEN_CHECKS:
            self._room, self._checked_at = _room(self.placement, resources()), time.monotonic()
        return self._room


def _room(placement: Placement, has: Resources) -> int:
    """How many cells Ray gets, including those that wait for nodes."""
    try:
        cells = concurrency(placement, has)
    except ClusterError:
        return 1  # it waits until a node is available again
    return cells + max(cells, _AHEAD) if has.grows else cells


@dataclass(slots=True)
class _RetryState:
    """Failures of one cell, which limit its retries."""

    tracebacks: str = ""
    reached: float = 0.0
    """Highest reported progress, and its value at the last failure."""
    reached_before: float = 0.0
    failures: int = 0
    """Failures and losses of nodes since the last progress."""
    losses: int = 0
    failures_ever: int = 0

    def fail(self, traceback: str, lost: bool) -> None:
        """Counts a failure, which was caused by the loss of a node or by the cell itself."""
        self.tracebacks += traceback
        if self.reached > self.reached_before:
            self.failures = self.losses = 0
        self.reached_before = self.reached
        if lost:
            self.losses += 1
        else:
            self.failures += 1
            self.failures_ever += 1

    def may_retry(self, retries: int) -> bool:
        # An explicit number of retries overrides the limit.
        return self.losses <= _LOSSES and self.failures <= retries and self.failures_ever <= max(_FAILURES, retries)


class _WaitNotice(ray.tune.Callback):
    """Tells the observer every minute if no cell can run."""

    def __init__(self, observer: Observer, placement: Placement) -> None:
        self._observer, self._placement = observer, placement
        self._checked_at = self._told_at = -math.inf
        self._idle_since: float | None = None

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        if now - self._checked_at < _SECONDS_BETWEEN_CHECKS:
            return
        self._checked_at, has = now, resources()
        fits = workers_that_fit(self._placement, has) >= self._placement.workers
        if any(trial.status == "RUNNING" for trial in trials) or not any(trial.status == "PENDING" for trial in trials):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_idle = self._idle_since is not None and now - self._idle_since > _SECONDS_TO_START
        if (not fits or is_idle) and now - self._told_at >= _SECONDS_BETWEEN_NOTICES:
            self._told_at = now
            free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            self._observer.waiting(
                f"a cell needs {self._placement}; the cluster has {has}, of which {free.get('CPU', 0):g} CPUs and "
                f"{free.get('GPU', 0):g} GPUs are free"
            )


class _Silent(TrialProgressCallback):
    """Replaces Tune's reporter, which prints a line on stdout for each cell without reports."""

    def _print(self, msg: str) -> None: ...


class _Follower(ray.tune.Callback):
    """Handles Tune's events about trials, which are attempts at a cell, and notifies the observer."""

    def __init__(self, observer: Observer, queue: _Queue, retries: int, progress: str | None) -> None:
        self.observer, self.queue, self.retries, self.progress = observer, queue, retries, progress
        self.outcomes: dict[str, Outcome] = {}
        self.fatal: str | None = None
        """Message of the fatal exception, if there was one."""
        self._states: defaultdict[str, _RetryState] = defaultdict(_RetryState)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.observer.started(trial.config["key"])

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        if "metrics" in result:
            key, metrics = trial.config["key"], result["metrics"]
            if self.progress in metrics:
                self._states[key].reached = max(self._states[key].reached, metrics[self.progress])
            self.observer.progress(key, metrics)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._finish(Outcome(trial.config["key"]))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # The trial's files on this machine, because the copies for `trial.get_error()` are written later.
        text, pickled = Path(trial.error_file).read_text(), trial.pickled_error_file
        error = pickle.loads(Path(pickled).read_bytes()) if pickled else None
        key = trial.config["key"]
        if isinstance(cause := getattr(error, "cause", None), _NonRetryableError):
            text, details, is_fatal = cause.args
            if is_fatal:
                self.fatal = text
                self.queue.waiting.clear()
            return self._finish(Outcome(key, text, details))
        state = self._states[key]
        state.fail(text, _is_lost(error))
        if state.may_retry(self.retries):
            self.queue.waiting.appendleft(key)
        else:
            self._finish(Outcome(key, _reason(error, text), state.tracebacks))

    def _finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.key] = outcome
        self.observer.finished(outcome)


def _is_lost(error: Exception | None) -> bool:
    """Whether a cell failed because a node was lost or preempted."""
    cause = getattr(error, "cause", None) or error
    # Unavailable: a worker does not respond, and Ray does not know yet whether the worker or its node has died.
    if isinstance(cause, _NodeLostError | ActorUnavailableError):
        return True
    return isinstance(cause, RayActorError) and (cause.preempted or "its node has died" in str(cause))


def _reason(error: Exception | None, text: str) -> str:
    """One line with the reason for a failure."""
    if _is_lost(error):
        return f"this cell lost more than {_LOSSES} nodes and may be crashing the nodes; check the cell's memory use"
    if "Worker exit type" in text:
        return "a worker process died without an exception; it ran out of memory, was killed, or crashed"
    return _line("".join(traceback.format_exception_only(_cause(error))) if error else text.strip().splitlines()[-1])


def _line(text: str) -> str:
    return textwrap.shorten(text, _LONGEST_REASON)


def _cause(error: Exception) -> Exception:
    """The exception of the first worker that failed, without the exceptions that Ray wraps around it."""
    cause = getattr(error, "cause", None) or error
    if failures := getattr(cause, "worker_failures", None):
        cause = failures[min(failures)]
    return cause
