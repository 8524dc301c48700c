"""Reports the progress of a trial, puts reports into words, and ends a worker without progress."""

from __future__ import annotations

import faulthandler
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TextIO

import torch.distributed as dist

from cluster import ReportFn
from experiments.runs.summary import Epoch
from experiments.training.metrics import RunningEpoch
from pipelines import Loader

_log = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 10.0
"""Within an epoch; the end of an epoch is always reported."""
SECONDS_BETWEEN_LOG_LINES = 60.0
"""The same, in the trial's log."""


class Throttle:
    """Whether something is due: at the first step, then every `seconds`, and before the validation of an epoch that took so
    long."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self._last, self._epoch_began = -math.inf, clock()

    def is_due(self, is_last_step: bool = False) -> bool:
        return self.clock() - (self._epoch_began if is_last_step else self._last) >= self.seconds

    def step_done(self) -> None:
        self._last = self.clock()

    def epoch_done(self) -> None:
        self._last = self._epoch_began = self.clock()


class ProgressReporter:
    """Reports the progress of a trial: with `report` on all workers together, and in the log on the first one.

    At the end of an epoch, a report has its metrics, and `epoch` of `epochs`. Within an epoch, it has `step` of `steps`, the
    mean loss, images per second and waiting share, and the top-1 of the epoch before. `epoch` counts finished epochs.

    Args:
        report: waits for all workers; only the values of the first one count.
        epochs: of the trial.
        train: the training images.
    """

    def __init__(self, report: ReportFn, epochs: int, train: Loader) -> None:
        self.report, self.epochs, self.train = report, epochs, train
        self._reports, self._lines = Throttle(SECONDS_BETWEEN_REPORTS), Throttle(SECONDS_BETWEEN_LOG_LINES)

    def is_due(self, is_last_step: bool) -> bool:
        """Whether to report a step, by this worker's clock."""
        return self._reports.is_due(is_last_step)

    def report_step(self, running: RunningEpoch, history: Sequence[Epoch]) -> None:
        metrics = self._step_metrics(running, history)
        self.report(metrics)
        self._reports.step_done()
        if self._lines.is_due():
            self._log(metrics)
            self._lines.step_done()

    def report_interrupted(self, running: RunningEpoch, history: Sequence[Epoch]) -> None:
        """Reports that the trial was asked to stop and has saved its work."""
        metrics = {**self._step_metrics(running, history), "interrupted": 1}
        self.report(metrics)
        self._log(metrics)

    def _step_metrics(self, running: RunningEpoch, history: Sequence[Epoch]) -> dict[str, float]:
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
        return metrics | _last_top1(history)

    def report_epoch(self, history: Sequence[Epoch]) -> None:
        metrics = self._epoch_metrics(history)
        self.report(metrics)
        self._log(metrics)
        self._reports.epoch_done()
        self._lines.epoch_done()

    def report_stopped(self, history: Sequence[Epoch]) -> None:
        """Reports that early stopping has ended the trial."""
        self.report({**self._epoch_metrics(history), "stopped": 1})
        if dist.get_rank() == 0:
            _log.info("%s: other trials had a higher top-1 at this epoch", stopped(len(history), self.epochs))

    def _epoch_metrics(self, history: Sequence[Epoch]) -> dict[str, float]:
        return {"epoch": len(history), "epochs": self.epochs, **_last_top1(history), **history[-1].metrics()}

    def _log(self, metrics: Mapping[str, float]) -> None:
        if dist.get_rank() == 0:
            _log.info(", ".join(metrics_in_words(metrics)))


def _last_top1(history: Sequence[Epoch]) -> dict[str, float]:
    """Of the last validation; empty before the first one."""
    top1 = [epoch.top1 for epoch in history if epoch.top1 is not None]
    return {"val/top1": top1[-1]} if top1 else {}


def stopped(epoch: int, epochs: int) -> str:
    """How reports call a trial that early stopping has ended."""
    return f"stopped at epoch {epoch} of {epochs} by early stopping"


def metrics_in_words(metrics: Mapping[str, float]) -> list[str]:
    """The parts of a report as text, the most important first."""
    where = f"epoch {metrics['epoch']:.0f}/{metrics['epochs']:.0f}"
    if "stopped" in metrics:
        where = stopped(round(metrics["epoch"]), round(metrics["epochs"]))
    if "step" in metrics:
        is_trained = metrics["step"] == metrics["steps"]
        step = "validating" if is_trained else f"step {metrics['step']:.0f}/{metrics['steps']:.0f}"
        where = f"epoch {metrics['epoch'] + 1:.0f}/{metrics['epochs']:.0f}, {step}"
    if "interrupted" in metrics:
        where = f"saved at {where}"
    top1 = [f"top-1 {metrics['val/top1']:.1f} %"] if "val/top1" in metrics else []
    return [
        where,
        *top1,
        f"loss {metrics['train/loss']:.3f}",
        f"{metrics['train/images_per_second']:.0f} images/s",
        f"waiting {100 * metrics['train/wait_share']:.0f} %",
    ]


class Watchdog:
    """Inside the block, ends the process with exit code 1 if `step_ended` is not called for `seconds`, which may be infinite:
    what it waits for may never come, and it occupies a GPU.

    `faulthandler` writes the stacks of all threads to `log` first. Its timer also works while C code holds Python's lock.
    """

    def __init__(self, seconds: float, log: TextIO) -> None:
        self.seconds, self.log = seconds, log
        self._armed_at = 0.0

    def step_ended(self) -> None:
        if time.monotonic() - self._armed_at >= min(self.seconds / 50, 1.0):  # starting the timer takes 0.1 ms
            self._arm()

    def __enter__(self) -> Watchdog:
        self._arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        self._armed_at = time.monotonic()
        if self.seconds < math.inf:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.log)
