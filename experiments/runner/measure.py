"""Measures networks under a protocol: the trained trials of a grid on the machines that trained them, or any checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from cluster import Outcome, ReportFn
from experiments.config.grid import ProtocolName, Trial
from experiments.config.imports import import_sources
from experiments.errors import UserError
from experiments.evaluation.evaluate import open_checkpoint, open_images
from experiments.evaluation.robustness import PROTOCOLS, Condition, Numbers, measured, percentages
from experiments.runner.progress import SECONDS_BETWEEN_LINES, Display, counting
from experiments.runs.workspace import Workspace, open_store
from experiments.training.checkpoint import CHECKPOINT, last_of, resolve_checkpoint
from experiments.training.trainer import trial_log


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """The missing measurements of a trial."""

    workspace: Workspace
    trial: Trial
    run_id: str
    """The trial's run in the tracker."""
    conditions: tuple[Condition, ...]
    epochs: int
    """The trained epochs."""


def measure_trial(task: MeasureTask, report: ReportFn) -> None:
    """Measures a trial after its last epoch. Reports contain `condition`, an index into `task.conditions`, and either `done`,
    the finished fraction, or the metrics of the finished condition.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        UserError: the checkpoint is gone, or memory does not suffice.
        DataError: an image cannot be used.
    """
    workspace, config = task.workspace, task.trial.config
    import_sources(task.trial.imports)
    checkpoint = last_of(workspace.checkpoints(task.trial), task.epochs)
    workspace.store.download(checkpoint)
    if not checkpoint.exists():
        raise UserError(
            f"{checkpoint}: this checkpoint is gone; `san delete {task.trial.key}`, with --runs as here, and the same command "
            "trains this network again"
        )
    with trial_log(workspace, task.trial, rank=0):
        opened = replace(open_checkpoint(checkpoint), config=config)
        images = open_images(opened)
        for index, condition in enumerate(task.conditions):
            numbers = measured(opened, images, condition, _reporting(report, index, opened.batch / len(images)))
            report({"condition": float(index), **condition.metrics(numbers)})


def _reporting(report: ReportFn, index: int, per_batch: float) -> Callable[[], None]:
    """Reports the finished fraction of a condition from time to time, when called after each batch."""
    done, reported_at = 0.0, time.monotonic()

    def ended() -> None:
        nonlocal done, reported_at
        done += per_batch
        if time.monotonic() - reported_at >= SECONDS_BETWEEN_LINES:
            reported_at = time.monotonic()
            report({"condition": float(index), "done": min(done, 1.0)})

    return ended


class MeasureProgress:
    """Observes a sweep of `measure_trial`; `keep` gets the metrics of a trial as they arrive. `live` as in `Display`."""

    def __init__(
        self,
        tasks: Mapping[str, MeasureTask],
        keep: Callable[[MeasureTask, dict[str, float]], None],
        out: TextIO,
        live: bool = True,
    ) -> None:
        self.tasks, self.keep, self.display, self.start = tasks, keep, Display(out, live), time.monotonic()
        self.left = {(key, condition.name) for key, task in tasks.items() for condition in task.conditions}
        self.total = len(self.left)
        self.running: dict[str, tuple[str, str]] = {}

    def started(self, key: str) -> None:
        """Does nothing: the first condition is reported soon."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        task, values = self.tasks[key], dict(metrics)
        condition = task.conditions[int(values.pop("condition"))]
        what = f"{task.trial.name} {condition.name}"
        if "done" in values:
            self.running[key] = task.trial.name, f"{condition.name} {values['done']:.0%}"
            if self.display.live is None:
                self._write(f"{what}: {values['done']:.0%}")
        else:
            self.keep(task, values)
            self.left.discard((key, condition.name))  # a trial that is retried measures some again
            self._write(f"{what}: {percentages(condition.numbers_in(values))}")
        self._show()

    def failed(self, key: str, reason: str) -> None:
        self._write(f"{self.tasks[key].trial.name} failed and will be retried: {reason}")

    def finished(self, outcome: Outcome) -> None:
        self.running.pop(outcome.key, None)
        if outcome.error is not None:
            self._write(f"{self.tasks[outcome.key].trial.name} FAILED: {outcome.error}")
        self._show()

    def waiting(self, reason: str) -> None:
        self._write(f"waiting: {reason}")

    def close(self) -> None:
        self.display.close()

    def _write(self, text: str) -> None:
        self.display.write(f"[{time.monotonic() - self.start:4.0f} s, {len(self.left)} left] {text}")

    def _show(self) -> None:
        done = self.total - len(self.left)
        self.display.show("robustness", done, self.total, f"{done}/{self.total} conditions", list(self.running.values()))


def measure_all(
    names: Sequence[str],
    overrides: Sequence[str],
    protocol: ProtocolName,
    profile: str | None,
    split: str | None,
    runs: str | Path | None,
) -> dict[str, list[dict[str, Numbers]]]:
    """Measures the numbers of each checkpoint under each condition. All checkpoints and their images are checked before the
    first is measured.

    Raises:
        UserError, DataError: as in `open_checkpoint` and `open_images`; or no checkpoint is given, or one twice.
    """
    if not names:
        raise UserError(f"no checkpoint given; expected {CHECKPOINT}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]}: given more than once; give each checkpoint once")
    ours: dict[str, list[dict[str, Numbers]]] = {}
    with ExitStack() as reached:
        paths = {name: reached.enter_context(resolve_checkpoint(name, open_store(runs)))[0] for name in names}
        for path in paths.values():
            open_images(open_checkpoint(path, overrides, profile), split)
        for name, path in paths.items():
            opened = open_checkpoint(path, overrides, profile)  # again: they may be too many for the memory
            images, by_condition = open_images(opened, split), {}
            for condition in PROTOCOLS[protocol].conditions:
                with counting(f"{name} {condition.name}", -(-len(images) // opened.batch), "batches") as count:
                    numbers = by_condition[condition.name] = measured(opened, images, condition, count)
                print(f"{name} {condition.name}: {percentages(numbers)}", file=sys.stderr, flush=True)
            ours[name if opened.row is None else f"{opened.row} ({name})"] = [by_condition]
    return ours
