"""A sweep calls a function for many values, as many at a time as fit on the cluster.

Ray Tune runs the trials and retries failed ones, and Ray Train starts the workers of a trial. This file decides how many trials
run, because Tune does not count the resources that Train uses.
"""

import math
import os
import pickle
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.train
import ray.tune
import ray.tune.search
import ray.util.queue
from ray.tune.progress_reporter import TrialProgressCallback

from cluster.errors import ClusterError, LostError
from cluster.placement import Placement, Resources, concurrency, workers_that_fit
from cluster.serial import Observer, Outcome, ReportFn, described, one_line
from cluster.session import resources

V = TypeVar("V")

# With several workers, a trial's driver computes nothing itself. It asks for a small part of a resource that only the head node
# has, so that all CPUs are left for the workers and the driver does not run on a node that may be preempted.
DRIVER_RESOURCES = {"node:__internal_head__": 0.001}

_OUT_OF_MEMORY = (
    "a node's memory is used up, and Ray has ended trials there; end other programs, or run fewer trials at a time (a larger "
    "resources.cpus). Finished epochs are kept; run the same command again to resume"
)
_AHEAD = 4
"""Minimum number of trials that wait for new nodes on a cluster that grows."""
_SECONDS_BETWEEN_CHECKS = 1.0
"""Interval between two requests for the cluster's resources."""
_SECONDS_TO_START = 60.0
"""Time that a trial may take to start before the observer gets a notice."""
_SECONDS_BETWEEN_NOTICES = 60.0


def sweep(
    function: Callable[[V, ReportFn], object],
    values: Mapping[str, V],
    placement: Placement,
    *,
    storage: Path | str,
    observer: Observer,
    retries: int = 3,
    non_retryable: tuple[type[Exception], ...] = (),
    fatal: tuple[type[Exception], ...] = (),
    is_interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Outcome]:
    """Calls `function(value, report)` for every value, in other processes of the session, and returns how each call ended.

    Args:
        function: runs in every worker of a trial. All workers must call `report(metrics)` equally often, because a report waits
            for all workers; it takes about 5 ms, or up to 0.2 s with several workers. Trials with one worker share processes,
            so the function must not leave anything behind that changes the next result.
        values: by key; trials start in this order, limited by the free resources of the cluster.
        placement: resources of a trial. Several workers share a process group of `torch.distributed`.
        storage: a folder for this sweep that all nodes share, or a URI that Ray supports.
        observer: receives starts, progress and ends of trials.
        retries: how often a trial that raises, dies or loses a node is called again, from the beginning; the function itself
            must resume. Without nodes, the trial waits for new ones. Announced losses of nodes do not count.
        non_retryable: exceptions after which a trial is not retried, because it would raise them again.
        fatal: exceptions after which no other trial starts, because all trials would raise them.
        is_interrupted: once it returns true, no other trial starts; the sweep waits for those that run (see `interruptible`).

    Raises:
        ClusterError: a trial does not fit on the cluster, or raised a `fatal` exception.
        LostError: Ray has ended trials because a node's memory is used up.
        KeyboardInterrupt: `is_interrupted` has returned true.

    A failed trial does not affect the others. Ctrl-C and exceptions of the observer end all trials and the session.
    """
    if not values:
        return {}
    concurrency(placement, resources())
    queue = _Queue(values, placement, is_interrupted)
    collector = _OutcomeCollector(observer, queue)
    trainable = _trainable(function, dict(values), placement, str(storage), non_retryable, fatal)
    of_a_trial = DRIVER_RESOURCES if placement.workers > 1 else {"CPU": placement.cpus, "GPU": placement.gpus}
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(trainable, of_a_trial),
        tune_config=ray.tune.TuneConfig(search_alg=queue, num_samples=-1, reuse_actors=placement.workers == 1),
        run_config=ray.tune.RunConfig(
            name="tune",
            storage_path=str(storage),
            failure_config=ray.tune.FailureConfig(max_failures=retries),
            verbose=0,
            callbacks=[collector, _WaitNotice(observer, placement), _Silent()],
        ),
    )
    try:
        tuner.fit()
        if is_interrupted():
            raise KeyboardInterrupt
    except BaseException as error:
        ray.shutdown()  # otherwise Tune leaves its trials running
        if isinstance(error.__cause__, ray.exceptions.OutOfMemoryError):  # which Tune does not handle
            raise LostError(_OUT_OF_MEMORY) from None
        raise
    if collector.fatal is not None:
        raise ClusterError(collector.fatal)
    return {key: collector.outcomes[key] for key in values}


def _trainable(
    function: Callable[[V, ReportFn], object],
    values: dict[str, V],
    placement: Placement,
    folder: str,
    non_retryable: tuple[type[Exception], ...],
    fatal: tuple[type[Exception], ...],
) -> Callable[[dict[str, str]], None]:
    """The function that Tune runs once per trial. It contains the values, because Tune would search them for parameters.

    A single worker runs in the trial's process, because starting a worker group would take 15 s of CPU time per trial. Ray
    does not set RANK and WORLD_SIZE there. Ray Train's local mode would end the process group of torch.distributed with each
    trial, and DeepSpeed cannot use a second one in the same process.
    """

    here = os.getcwd()

    def worker(value: V, send: Callable[[dict[str, Any]], None]) -> None:
        with suppress(OSError):  # another machine may not have it
            os.chdir(here)
        if not placement.gpus:  # Ray hides the GPUs only if the cluster was started with a setting for this
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Nested, to distinguish metrics from Tune's own entries in a result.
        function(value, lambda metrics: send({"metrics": dict(metrics)}))

    def train_one(config: dict[str, str]) -> None:
        key = config["key"]
        value = values[key]
        try:
            if placement.workers == 1:
                worker(value, ray.tune.report)
            else:
                # Every attempt has a new name, because Train would resume a run with the same name.
                name = f"{key}-{uuid.uuid4().hex[:8]}"
                _start_workers(lambda: worker(value, ray.train.report), placement, name, folder)
        except Exception as error:
            cause = _cause(error)
            if not isinstance(cause, (*non_retryable, *fatal)):
                raise
            # Tune would retry an exception.
            failure = {"error": one_line(str(cause)), "traceback": traceback.format_exc(), "is_fatal": isinstance(cause, fatal)}
            ray.tune.report({"failure": failure})

    return train_one


def _start_workers(worker: Callable[[], None], placement: Placement, name: str, folder: str) -> None:
    """Runs the workers of a trial with Ray Train, and sends the first worker's reports to Ray Tune.

    Not with Ray's `TuneReportCallback`: it hangs if this function raises, and its caller reports that, before Tune has taken
    the last report of the workers.
    """
    from ray.train.torch import TorchConfig, TorchTrainer  # imports torch, which the driver of a sweep does not need

    # NCCL starts with the first tensor on a GPU, so the function can first check the GPU and explain what is wrong.
    torch_config = TorchConfig("cpu:gloo,cuda:nccl" if placement.gpus else "gloo")
    scaling = ray.train.ScalingConfig(
        num_workers=placement.workers,
        use_gpu=placement.gpus > 0,
        resources_per_worker={"CPU": placement.cpus, "GPU": placement.gpus},
    )
    reports = ray.util.queue.Queue(actor_options={"num_cpus": 0})
    callbacks: list[Any] = [_Forwarding(reports)]
    run = ray.train.RunConfig(name=name, storage_path=folder, callbacks=callbacks)
    sender = threading.Thread(target=lambda: [ray.tune.report(metrics) for metrics in iter(reports.get, None)], daemon=True)
    sender.start()
    try:
        TorchTrainer(worker, torch_config=torch_config, scaling_config=scaling, run_config=run).fit()
    finally:
        reports.put(None)
        sender.join()
        reports.shutdown()


class _Forwarding(ray.train.UserCallback):
    """Puts the reports of a trial's first worker into a queue."""

    def __init__(self, reports: ray.util.queue.Queue) -> None:
        self._reports = reports

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self._reports.put(metrics[0])


class _NotPickled:
    """Is pickled without its content: Tune pickles the queue and the callbacks for a restart that never happens."""

    def __getstate__(self) -> dict[str, object]:
        return {}


class _Queue(_NotPickled, ray.tune.search.Searcher):
    """The queue of trials, from which Tune gets the next one."""

    def __init__(self, keys: Iterable[str], placement: Placement, is_interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self.waiting, self.placement, self.is_interrupted = deque(keys), placement, is_interrupted
        self.running: set[str] = set()
        """Ids of Tune's trials."""
        self._limit, self._checked_at = 0, -math.inf

    def suggest(self, trial_id: str) -> dict[str, str] | None:
        if not self.waiting or self.is_interrupted():
            return None if self.running else self.FINISHED  # type: ignore[return-value]
        if len(self.running) >= self._limit_now():
            return None
        self.running.add(trial_id)
        return {"key": self.waiting.popleft()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.running.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Does nothing, because sweeps are not restored."""

    def _limit_now(self) -> int:
        """The number of trials that may run or wait; nodes may be added or lost at any time."""
        if time.monotonic() - self._checked_at >= _SECONDS_BETWEEN_CHECKS:
            self._limit, self._checked_at = _trials_to_start(self.placement, resources()), time.monotonic()
        return self._limit


def _trials_to_start(placement: Placement, available: Resources) -> int:
    """How many trials Ray gets, including those that wait for nodes."""
    try:
        fits = concurrency(placement, available)
    except ClusterError:
        return 1  # it waits until a node is available again
    return fits + max(fits, _AHEAD) if available.grows else fits


class _WaitNotice(_NotPickled, ray.tune.Callback):
    """Sends the observer a notice every minute while no trial can run."""

    def __init__(self, observer: Observer, placement: Placement) -> None:
        self._observer, self._placement = observer, placement
        self._checked_at = self._told_at = -math.inf
        self._idle_since: float | None = None

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        if now - self._checked_at < _SECONDS_BETWEEN_CHECKS:
            return
        self._checked_at, available = now, resources()
        fits = workers_that_fit(self._placement, available) >= self._placement.workers
        if any(trial.status == "RUNNING" for trial in trials) or not any(trial.status == "PENDING" for trial in trials):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_idle = self._idle_since is not None and now - self._idle_since > _SECONDS_TO_START
        if (not fits or is_idle) and now - self._told_at >= _SECONDS_BETWEEN_NOTICES:
            self._told_at = now
            free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            self._observer.waiting(
                f"no trial runs: one needs {self._placement}; the cluster has {available}, of which {free.get('CPU', 0):g} "
                f"CPUs and {free.get('GPU', 0):g} GPUs are free"
            )


class _Silent(TrialProgressCallback):
    """Replaces Tune's reporter, which prints a line on stdout for each trial without reports."""

    def _print(self, msg: str) -> None: ...


class _OutcomeCollector(_NotPickled, ray.tune.Callback):
    """Passes Tune's events to the observer, and collects how the trials end."""

    def __init__(self, observer: Observer, queue: _Queue) -> None:
        self.observer, self.queue = observer, queue
        self.outcomes: dict[str, Outcome] = {}
        self.fatal: str | None = None
        """Message of the fatal exception, if there was one."""
        self._failures: dict[str, Outcome] = {}
        """Trials that raised an exception after which they are not retried."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.observer.started(trial.config["key"])

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        key = trial.config["key"]
        if failure := result.get("failure"):
            self._failures[key] = Outcome(key, failure["error"], failure["traceback"])
            if failure["is_fatal"]:
                self.fatal = failure["error"]
                self.queue.waiting.clear()
        elif "metrics" in result:
            self.observer.progress(key, result["metrics"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key = trial.config["key"]
        self._finish(self._failures.get(key, Outcome(key)))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.observer.failed(trial.config["key"], _failure(trial)[0])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._finish(Outcome(trial.config["key"], *_failure(trial)))

    def _finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.key] = outcome
        self.observer.finished(outcome)


def _failure(trial: Any) -> tuple[str, str]:
    """The reason for which one of Tune's trials has failed, and its tracebacks."""
    # The trial's files on this machine, because the copies for `trial.get_error()` are written later.
    tracebacks, pickled = Path(trial.error_file).read_text(), trial.pickled_error_file
    error = pickle.loads(Path(pickled).read_bytes()) if pickled else None
    return _reason(error, tracebacks), tracebacks


def _reason(error: Exception | None, tracebacks: str) -> str:
    """One line with the reason for a failure."""
    if error is None:
        return one_line(tracebacks.strip().splitlines()[-1])
    if "its node has died" in str(error):
        return "its node was lost; if this happens again and again, check the trial's memory use"
    if "Worker exit type" in str(error):
        return (
            "a worker process died without an exception; it ran out of memory, was killed, or crashed (`san data check` finds "
            "images that crash the decoder)"
        )
    return described(_cause(error))


def _cause(error: Exception) -> Exception:
    """The exception of the first worker that failed, without the exceptions that Ray wraps around it."""
    cause = getattr(error, "cause", None) or error
    if failures := getattr(cause, "worker_failures", None):
        cause = failures[min(failures)]
    return cause
