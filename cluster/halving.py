"""Early stopping by asynchronous successive halving (ASHA, arXiv 1810.05934), with the decisions of Ray Tune's scheduler.

Tune itself would kill the process of a stopped trial. Instead, a trial asks whether to continue, so that it can save its work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from cluster.sweep import DRIVER_RESOURCES


class SuccessiveHalving:
    """The scores of the trials at the rungs, which are the epochs `first`, `first * reduction`, ... below `last`. About the
    best 1/`reduction` of the trials at a rung continue. `known` contains the scores of finished trials by key."""

    def __init__(self, first: int, reduction: int, last: int, known: Mapping[str, Sequence[float]]) -> None:
        self._last = last
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="time",
            metric="score",
            mode="max",
            max_t=last,
            grace_period=first,
            reduction_factor=reduction,
        )
        self._trials: dict[str, Any] = {}
        self._stopped: set[str] = set()
        for key, scores in known.items():
            self._record(key, scores)

    def should_continue(self, key: str, scores: Sequence[float]) -> bool:
        """Whether a trial with these scores, one per epoch, continues.

        Only the last score is compared, and only at a rung: a resumed trial has passed the earlier rungs. The best trial so far
        continues, and so does the first.
        """
        if self._record(key, scores):
            self._stopped.add(key)
        return key not in self._stopped

    def _record(self, key: str, scores: Sequence[float]) -> bool:
        """Whether the last score is too low."""
        tune: Any = None  # the scheduler's controller, which it does not use
        if key not in self._trials:
            self._trials[key] = SimpleNamespace(trial_id=key)  # the only attribute of a trial that the scheduler uses
            self._scheduler.on_trial_add(tune, self._trials[key])
        decision = TrialScheduler.CONTINUE
        for time, score in enumerate(scores[: self._last - 1], 1):
            result = {"time": time, "score": score}
            decision = self._scheduler.on_trial_result(tune, self._trials[key], result)
        return decision == TrialScheduler.STOP


@contextmanager
def on_the_head(
    first: int, reduction: int, last: int, known: Mapping[str, Sequence[float]]
) -> Iterator[Callable[[str, Sequence[float]], bool]]:
    """`SuccessiveHalving.should_continue` of rungs in a process on the head, which all trials of this session can call."""
    start: Any = ray.remote(SuccessiveHalving)
    actor = start.options(num_cpus=0, resources=DRIVER_RESOURCES).remote(first, reduction, last, dict(known))
    try:
        yield lambda key, scores: ray.get(actor.should_continue.remote(key, list(scores)))  # takes a few milliseconds
    finally:
        if ray.is_initialized():  # an interrupted sweep ends the session
            ray.kill(actor)
