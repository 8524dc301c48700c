"""How far a trial is: when that is told, and in which words."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from experiments.runs.summary import Epoch
from experiments.training.metrics import RunningEpoch
from pipelines import Loader

_log = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 10.0
"""Inside an epoch; the end of an epoch is always told."""
SECONDS_BETWEEN_LOG_LINES = 60.0
"""As well, in the trial's log."""


class Pulse:
    """When something is told inside an epoch: after the trial's first step, then every `seconds`, and before the validation of
    an epoch that was trained for so long."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self._told_at, self._began_at = -math.inf, clock()

    def due(self, is_last_step: bool) -> bool:
        since = self._began_at if is_last_step else self._told_at
        return self.clock() - since >= self.seconds

    def told(self) -> None:
        self._told_at = self.clock()

    def epoch_told(self) -> None:
        self._told_at = self._began_at = self.clock()


class Teller:
    """Tells how far a trial is: `report`, in all workers together, and the trial's log, in the first alone.

    What is told of an epoch are its metrics with `epoch` of `epochs`; inside an epoch `step` of `steps`, the loss so far,
    images per second, waiting share, and top-1 of the epoch before. `epoch` counts whole epochs in both.

    Args:
        report: waits for all workers; only what the first says counts.
        epochs: of the trial.
        train: what an epoch trains on.
        history: the epochs so far.
    """

    def __init__(
        self, report: Callable[[Mapping[str, float]], None], epochs: int, train: Loader, history: Sequence[Epoch]
    ) -> None:
        self.report, self.epochs, self.train, self.history = report, epochs, train, history
        self._pulse, self._log_pulse = Pulse(SECONDS_BETWEEN_REPORTS), Pulse(SECONDS_BETWEEN_LOG_LINES)

    def due(self, is_last_step: bool) -> bool:
        """Whether it is time to tell of a step, by this worker's clock."""
        return self._pulse.due(is_last_step)

    def tell_step(self, running: RunningEpoch) -> None:
        seen = self.train.seen_after(running.steps)
        metrics = {
            "epoch": running.number,
            "epochs": self.epochs,
            "step": running.steps,
            "steps": self.train.steps,
            "train/loss": running.loss / seen,
            "train/images_per_second": seen / running.seconds,
            "train/wait_share": running.waited / running.seconds,
        }
        if self.history:
            metrics["val/top1"] = self.history[-1].top1
        self.report(metrics)
        self._pulse.told()
        if self._log_pulse.due(is_last_step=False):
            self._say(metrics)
            self._log_pulse.told()

    def tell_epoch(self, history: Sequence[Epoch]) -> None:
        self.history = history
        metrics = {"epoch": len(history), "epochs": self.epochs, **history[-1].metrics()}
        self.report(metrics)
        self._pulse.epoch_told()
        self._say(metrics)
        self._log_pulse.epoch_told()

    def tell_end(self) -> None:
        """Of a trial that is stopped early; the last epoch has told the others'."""
        if len(self.history) == self.epochs:
            return
        self.report({"epoch": len(self.history), "epochs": self.epochs, "stopped": 1, **self.history[-1].metrics()})
        if dist.get_rank() == 0:
            _log.info("%s: other cells had a higher top-1 at this epoch", stopped(len(self.history), self.epochs))

    def _say(self, metrics: Mapping[str, float]) -> None:
        if dist.get_rank() == 0:
            _log.info(", ".join(words(metrics)))


def stopped(epoch: int, epochs: int) -> str:
    """What is said of a trial that did not come to its end."""
    return f"stopped at epoch {epoch} of {epochs} by early stopping"


def words(metrics: Mapping[str, float]) -> list[str]:
    """What a report says, the most important first."""
    where = f"epoch {metrics['epoch']:.0f}/{metrics['epochs']:.0f}"
    if "stopped" in metrics:
        where = stopped(round(metrics["epoch"]), round(metrics["epochs"]))
    if "step" in metrics:
        is_trained = metrics["step"] == metrics["steps"]
        step = "validating" if is_trained else f"step {metrics['step']:.0f}/{metrics['steps']:.0f}"
        where = f"epoch {metrics['epoch'] + 1:.0f}/{metrics['epochs']:.0f}, {step}"
    top1 = [f"top-1 {metrics['val/top1']:.1f} %"] if "val/top1" in metrics else []
    return [
        where,
        *top1,
        f"loss {metrics['train/loss']:.3f}",
        f"{metrics['train/images_per_second']:.0f} images/s",
        f"waiting {100 * metrics['train/wait_share']:.0f} %",
    ]
