"""A sweep: one function called for each of many values, as many at a time as the cluster holds.

Ray Tune runs the cells; inside each cell Ray Train starts the workers and connects them. Tune does not see what
Train takes in its trials, nor tells a lost node from a mistake: which cell is next, and whether one is started
again, is decided here.
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

from cluster.errors import ClusterError, ClusterLostError
from cluster.placement import Placement, Resources, concurrency
from cluster.session import alive, resources, session

Report = Callable[[Mapping[str, float]], None]
V = TypeVar("V")

# A driver of several workers computes nothing: it takes a sliver of a resource that only the head node has,
# which leaves all CPUs to the workers and keeps the driver away from nodes that may be taken back.
DRIVER_RESOURCES = {"node:__internal_head__": 0.001}

_LOSSES = 10
"""So many nodes may be lost under a cell that comes no further. Not without bound: it may be what brings its nodes down."""
_FAILURES = 10
"""So often a cell that comes further each time is started again after failures of its own."""
_SECONDS_TO_NOTICE = 30.0
"""Ray misses a node whose processes are gone after 15 s; workers on others see their broken connections at once."""
_AHEAD = 4
"""So many cells at least, and up to as many as run, wait for nodes where the cluster grows."""
_LONGEST_REASON = 800
"""Characters of the line that tells why a cell failed."""
_SECONDS_BETWEEN_LOOKS = 1.0
"""At what the cluster has."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended: `error` is None or one line, `traceback` is the whole story of that line."""

    key: str
    error: str | None = None
    traceback: str = ""


class Observer(Protocol):
    """Follows a sweep. All methods are called in the driver process, by the thread that called `sweep`."""

    def started(self, key: str) -> None:
        """A cell has its resources; called again when it is retried."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        """The first worker of a cell has reported."""

    def finished(self, outcome: Outcome) -> None:
        """A cell has ended for good."""


def sweep(
    function: Callable[[V, Report], object],
    values: Mapping[str, V],
    placement: Placement,
    *,
    storage: Path | str,
    observer: Observer,
    retries: int = 1,
    progress: str | None = None,
    final: tuple[type[Exception], ...] = (),
    fatal: tuple[type[Exception], ...] = (),
) -> dict[str, Outcome]:
    """Calls `function(value, report)` for every value, in processes of its own, and says how each ended.

    Lone workers take one cell after another in the same process, which spares each the start of Python and all
    imports: a function must leave nothing behind that changes what the next one computes. Where a cell has failed
    or died, its process is not used again.

    The function runs in each worker of its cell and calls `report(metrics)` equally often in all of them, for
    a report waits for all; it takes some 5 ms, several workers up to 0.2 s after another. A cell that raises or
    dies is started again up to `retries` times, from the beginning: continuing is the function's own business.
    One that raises any of `final` is not: it would again. After one that raises any of `fatal`, no other cell is started: the
    next would have the same to say, or be sent to the same broken node. One that loses a node, or is pre-empted, is started
    again on other nodes, up to 10 times besides; it waits where there are none. Where the metric `progress`, such
    as whole epochs, has become greater than it was at the failure before, both counts begin anew, for 10 failures
    of its own at most. A cell that fails for good does not disturb the others. Ctrl-C, or an observer that raises,
    ends the cells and the session, and is raised on.

    Raises:
        ClusterError: a cell does not fit into the cluster; or one has raised what is `fatal`, and those beside it have ended.
        ClusterLostError: Ray on this machine has died, so no cell can start or end any more.

    Cells start in the order of `values`, as many at a time as the cluster holds just then. Where an autoscaler adds
    nodes, some more are handed to Ray and wait there: what waits is what it adds nodes for, and nothing of that
    outlives the sweep. (`ray.autoscaler.sdk.request_resources` would: it stays until somebody takes it back, there is
    one for all jobs of a cluster, and one that cannot be met in full brings no node at all.)

    `storage` is a directory that all nodes can reach, or a URI that Ray knows. The sweep's own files in a directory are gone
    when it returns; below a URI they are the caller's to remove. A later sweep with the same keys starts afresh.

    Several workers find the rank variables and the first one's address set, for `torch.distributed.init_process_group`; a lone
    worker does not. Where `placement` has no GPUs, cells see none, whatever the node has.
    """
    if not values:
        return {}
    with session() as found, _own_folder(storage) as folder:
        concurrency(placement, found)
        queue = _Queue(values, placement)
        follower = _Follower(observer, queue, retries, progress)
        trainable = _trainable(function, dict(values), placement, folder, final, fatal)
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(trainable, _trial_resources(placement)),
            tune_config=ray.tune.TuneConfig(search_alg=queue, num_samples=-1, reuse_actors=placement.workers == 1),
            run_config=ray.tune.RunConfig(
                name="tune", storage_path=folder, verbose=0, callbacks=[follower, _NodeWatch(), _Silent()]
            ),
        )
        try:
            tuner.fit()
        except BaseException:
            ray.shutdown()  # Tune leaves its trials running
            raise
        if follower.fatal is not None:
            raise ClusterError(follower.fatal)
    return {key: follower.outcomes[key] for key in values}


@contextmanager
def _own_folder(storage: Path | str) -> Iterator[str]:
    """A place in `storage` that no other sweep has."""
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
    final: tuple[type[Exception], ...],
    fatal: tuple[type[Exception], ...],
) -> Callable[[dict[str, str]], None]:
    """The function that Tune runs once per cell. Values stay out of Tune's grid, which looks into them."""

    def cell(config: dict[str, str]) -> None:
        key = config["key"]
        # Train resumes a run whose name it has seen, so each attempt has a name of its own.
        name = f"{key}-{uuid.uuid4().hex[:8]}"
        nodes = alive() if placement.workers > 1 else frozenset()
        try:
            _train(functools.partial(function, values[key]), placement, name, folder)
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, (*final, *fatal)):
                raise _FinalError(_line(str(cause)), traceback.format_exc(), isinstance(cause, fatal)) from None
            elif _loses_one(nodes):
                raise _NodeLostError("a node was lost") from error
            else:
                raise

    return cell


def _train(call: Callable[[Report], object], placement: Placement, name: str, folder: str) -> None:
    """Runs one cell inside its Tune trial; the only place where one worker and several differ.

    A lone worker *is* the trial's process. A worker group for it would add actors that only wait, and some 15 s of CPU
    time per cell to start them. The price: Ray does not set RANK, WORLD_SIZE and so on there; a function that needs them
    sets them itself. Nor does it go through Ray Train's local mode, which ends the process group of torch.distributed with
    each cell: the next one in the process would need a second, with which DeepSpeed cannot do.
    """

    def worker(send: Callable[[dict[str, Any]], None]) -> None:
        if not placement.gpus:  # Ray hides a node's GPUs only where the cluster was started with a setting for that
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # One level down, so that Tune's own entries in a result cannot be taken for metrics.
        call(lambda metrics: send({"metrics": dict(metrics)}))

    if placement.workers == 1:
        return worker(ray.tune.report)

    from ray.train.torch import TorchTrainer  # brings torch, which the driver of a sweep can do without
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


class _FinalError(Exception):
    """The function raised what it would raise again: its text, its story, and whether no other cell may start."""


class _NodeLostError(Exception):
    """Several workers failed while a node of the cluster was lost."""


def _loses_one(nodes: frozenset[str]) -> bool:
    """Whether one of several nodes is gone, or goes while the others' errors are ahead of the news."""
    limit = time.monotonic() + (_SECONDS_TO_NOTICE if len(nodes) > 1 else 0)
    while nodes <= alive():
        if time.monotonic() >= limit:
            return False
        time.sleep(0.5)
    return True


class _Queue(ray.tune.search.Searcher):
    """The cells that wait, which Tune asks for the next one."""

    def __init__(self, keys: Iterable[str], placement: Placement) -> None:
        super().__init__()
        self.waiting, self.placement = deque(keys), placement
        self.running: set[str] = set()
        """Tune's names of the trials."""
        self._room, self._looked_at = 0, -math.inf

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
        """Nothing: a sweep is not restored."""

    def _room_now(self) -> int:
        """Nodes come and go."""
        if time.monotonic() - self._looked_at >= _SECONDS_BETWEEN_LOOKS:
            self._room, self._looked_at = _room(self.placement, resources()), time.monotonic()
        return self._room


def _room(placement: Placement, has: Resources) -> int:
    """How many cells Ray is given, with those that wait for nodes."""
    try:
        cells = concurrency(placement, has)
    except ClusterError:
        return 1  # it waits for a node that comes back
    return cells + max(cells, _AHEAD) if has.grows else cells


@dataclass(slots=True)
class _Past:
    """How a cell has failed so far."""

    story: str = ""
    reached: float = 0.0
    """The most that it has told of its progress; and what that was at its last failure."""
    reached_before: float = 0.0
    failures: int = 0
    """Since it came further, as are the losses."""
    losses: int = 0
    failures_ever: int = 0

    def fail(self, story: str, lost: bool) -> None:
        """By the loss of a node, or by its own doing."""
        self.story += story
        if self.reached > self.reached_before:
            self.failures = self.losses = 0
        self.reached_before = self.reached
        if lost:
            self.losses += 1
        else:
            self.failures += 1
            self.failures_ever += 1

    def may_go_on(self, retries: int) -> bool:
        # Who asks for more retries than the bound gets them.
        return self.losses <= _LOSSES and self.failures <= retries and self.failures_ever <= max(_FAILURES, retries)


class _NodeWatch(ray.tune.Callback):
    """Ends the sweep when the node of this process is dead: Tune would wait for it forever."""

    def __init__(self) -> None:
        self._node: str = ray.get_runtime_context().get_node_id()
        self._looked_at = -math.inf

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if time.monotonic() - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at = time.monotonic()
        if self._node not in alive():
            raise ClusterLostError(
                "Ray died on this machine: its raylet process was killed, perhaps because memory ran out (see `dmesg`). "
                "Finished epochs are kept; rerun the same command to resume"
            )


class _Silent(TrialProgressCallback):
    """In place of Tune's own, which prints a line for each cell that reported nothing, where the caller's tables go."""

    def _print(self, msg: str) -> None: ...


class _Follower(ray.tune.Callback):
    """Translates what Tune says about trials, of which each attempt at a cell is one, into what the observer hears."""

    def __init__(self, observer: Observer, queue: _Queue, retries: int, progress: str | None) -> None:
        self.observer, self.queue, self.retries, self.progress = observer, queue, retries, progress
        self.outcomes: dict[str, Outcome] = {}
        self.fatal: str | None = None
        """Why no other cell may start."""
        self._pasts: defaultdict[str, _Past] = defaultdict(_Past)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.observer.started(trial.config["key"])

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        if "metrics" in result:
            key, metrics = trial.config["key"], result["metrics"]
            if self.progress in metrics:
                self._pasts[key].reached = max(self._pasts[key].reached, metrics[self.progress])
            self.observer.progress(key, metrics)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._finish(Outcome(trial.config["key"]))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # The trial's files on this machine; their copies in storage, for trial.get_error(), come later.
        text, pickled = Path(trial.error_file).read_text(), trial.pickled_error_file
        error = pickle.loads(Path(pickled).read_bytes()) if pickled else None
        key = trial.config["key"]
        if isinstance(cause := getattr(error, "cause", None), _FinalError):
            text, story, is_fatal = cause.args
            if is_fatal:
                self.fatal = text
                self.queue.waiting.clear()
            return self._finish(Outcome(key, text, story))
        past = self._pasts[key]
        past.fail(text, _is_lost(error))
        if past.may_go_on(self.retries):
            self.queue.waiting.appendleft(key)
        else:
            self._finish(Outcome(key, _reason(error, text), past.story))

    def _finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.key] = outcome
        self.observer.finished(outcome)


def _is_lost(error: Exception | None) -> bool:
    """Whether a cell failed because a node was lost or taken back, not by what it did."""
    cause = getattr(error, "cause", None) or error
    # Unavailable: a worker does not answer, and for a second nobody could tell that it has died on a node that lives.
    if isinstance(cause, _NodeLostError | ActorUnavailableError):
        return True
    return isinstance(cause, RayActorError) and (cause.preempted or "its node has died" in str(cause))


def _reason(error: Exception | None, text: str) -> str:
    """One line that says why a cell failed, from what Ray wrapped around it and its text."""
    if _is_lost(error):
        return f"this cell lost more than {_LOSSES} nodes and may be crashing the nodes; check the cell's memory use"
    if "Worker exit type" in text:
        return "a worker process died without an exception; it ran out of memory, was killed, or crashed"
    return _line("".join(traceback.format_exception_only(_cause(error))) if error else text.strip().splitlines()[-1])


def _line(text: str) -> str:
    return textwrap.shorten(text, _LONGEST_REASON)


def _cause(error: Exception) -> Exception:
    """What the function itself raised, in the first worker that failed, from what Ray wrapped around it."""
    cause = getattr(error, "cause", None) or error
    if failures := getattr(cause, "worker_failures", None):
        cause = failures[min(failures)]
    return cause
