"""Asynchronous successive halving (ASHA, arXiv 1810.05934): which cells of a sweep are worth going on with.

The rungs and their cutoffs are those of Ray Tune's scheduler. It is not Tune that stops a cell, for Tune would end its
process at once: the cell asks, and ends by itself.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from cluster.sweep import DRIVER_RESOURCES

_log = logging.getLogger(__name__)

_SECONDS = 60.0
"""So long a cell waits for an answer."""


@dataclass(frozen=True, slots=True)
class Halving:
    """Of the cells that come to a rung about the best 1/`reduction` go on; rungs are at `first`, `first * reduction`, ...
    below `last`, in units of whatever is scored."""

    first: int
    reduction: int
    last: int


class Rungs:
    """What the cells of a sweep have scored at the rungs. `known` are the scores, by key, of cells that do not run."""

    def __init__(self, halving: Halving, known: Mapping[str, Sequence[float]]) -> None:
        self._last = halving.last
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="time",
            metric="score",
            mode="max",
            max_t=halving.last,
            grace_period=halving.first,
            reduction_factor=halving.reduction,
        )
        self._cells: dict[str, Any] = {}
        self._stopped: set[str] = set()
        for key, scores in known.items():
            self._record(key, scores)

    def goes_on(self, key: str, scores: Sequence[float]) -> bool:
        """Whether a cell does that has these scores, from its first on, one after each unit of time.

        Only the last of them is judged, where it stands at a rung, and once: a cell that goes on, from a checkpoint or after
        a failure, has passed those below. The best so far goes on, and so does the first.
        """
        if self._record(key, scores):
            self._stopped.add(key)
        return key not in self._stopped

    def _record(self, key: str, scores: Sequence[float]) -> bool:
        """Whether the last score is too low."""
        tune: Any = None  # the scheduler wants to hear of its controller, and asks nothing of it
        if key not in self._cells:
            self._cells[key] = SimpleNamespace(trial_id=key)  # all that the scheduler knows of Tune's trials
            self._scheduler.on_trial_add(tune, self._cells[key])
        decision = TrialScheduler.CONTINUE
        for time, score in enumerate(scores[: self._last - 1], 1):
            result = {"time": time, "score": score}
            decision = self._scheduler.on_trial_result(tune, self._cells[key], result)
        return decision == TrialScheduler.STOP


@dataclass(frozen=True, slots=True)
class Judge:
    """Asks the rungs, from any process of the session; a cell goes on where nobody answers."""

    actor: Any

    def __call__(self, key: str, scores: Sequence[float]) -> bool:
        """As `Rungs.goes_on`; takes some milliseconds."""
        try:
            return ray.get(self.actor.goes_on.remote(key, list(scores)), timeout=_SECONDS)
        except (RayActorError, GetTimeoutError) as error:
            _log.warning("cannot compare %s with the other cells (%s); the cell continues", key, error)
            return True


@contextmanager
def judge(halving: Halving, known: Mapping[str, Sequence[float]]) -> Iterator[Judge]:
    """Rungs that all cells of this session can ask, in a process on the head, which is as safe as the sweep is."""
    start: Any = ray.remote(Rungs)
    actor = start.options(num_cpus=0, resources=DRIVER_RESOURCES).remote(halving, dict(known))
    try:
        yield Judge(actor)
    finally:
        if ray.is_initialized():  # an interrupted sweep ends the session
            ray.kill(actor)
