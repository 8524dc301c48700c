"""Takes the trained cells of a grid through a protocol, on the machines that trained them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from experiments.evaluation.evaluate import SECONDS_BETWEEN_LINES, open_checkpoint, open_images
from experiments.evaluation.protocol import Condition, measured, percentages
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.grid import ProtocolName, Trial
from experiments.runs.workspace import Workspace
from experiments.tracking import Result
from experiments.training.checkpoint import last_of
from experiments.training.trainer import kept_log, logging_to

if TYPE_CHECKING:
    from cluster.sweep import Outcome

Report = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be measured of a cell."""

    workspace: Workspace
    trial: Trial
    run_id: str
    """Of its run in the tracker."""
    protocol: ProtocolName
    missing: tuple[str, ...]
    """Names of conditions."""

    @property
    def name(self) -> str:
        return self.trial.name

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(condition for condition in PROTOCOLS[self.protocol].conditions if condition.name in self.missing)


def works(workspace: Workspace, protocol: ProtocolName, finished: Iterable[tuple[Trial, Result]]) -> dict[str, Work]:
    """What is to be measured of trained cells after their last epoch, by their keys; of one that has all numbers nothing."""
    found = {}
    for trial, result in finished:
        missing = tuple(condition.name for condition in PROTOCOLS[protocol].missing(result.metrics))
        if missing:
            found[trial.key] = Work(workspace, trial, result.run_id, protocol, missing)
    return found


def measure(work: Work, report: Report) -> None:
    """Measures a cell; what is reported is `condition`, its place in `work.conditions`, with its metrics when it is done, and
    with `done`, a part of 1, on the way.

    Raises:
        UserError: there is no checkpoint that can be used, or no memory.
        DataError: an image cannot be used.
    """
    workspace, config = work.workspace, work.trial.config
    checkpoint = last_of(workspace.checkpoints(work.trial), config.recipe.epochs)
    workspace.store.download(checkpoint)
    with kept_log(workspace, work.trial) as log, logging_to(log, rank=0):
        opened = replace(open_checkpoint(checkpoint), config=config)
        places = {condition.name: float(place) for place, condition in enumerate(work.conditions)}

        @contextmanager
        def shown(name: str, images: int, batch: int) -> Iterator[Callable[[], None]]:
            done, told = 0, time.monotonic()

            def ended() -> None:
                nonlocal done, told
                done = min(done + batch, images)
                if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
                    told = time.monotonic()
                    report({"condition": places[name], "done": done / images})

            yield ended

        for condition, numbers in measured(opened, open_images(opened), work.conditions, shown):
            report({"condition": places[condition.name], **condition.metrics(numbers)})


class Watch:
    """Observes a sweep of `measure`: `keep` gets the metrics of a cell as they come; a bar on a terminal, lines in a log."""

    def __init__(self, works: Mapping[str, Work], keep: Callable[[Work, dict[str, float]], None], out: TextIO) -> None:
        self.works, self.keep, self.out, self.start = works, keep, out, time.monotonic()
        self.left = sum(len(work.missing) for work in works.values())
        is_terminal = out.isatty()
        self.bar = tqdm(total=self.left, unit="condition", file=out, dynamic_ncols=True, leave=False) if is_terminal else None

    def __getstate__(self) -> dict[str, object]:
        """Nothing: Ray writes down who observes a sweep, for a restart that never comes."""
        return {}

    def started(self, key: str) -> None:
        """Its first condition tells."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        work, values = self.works[key], dict(metrics)
        condition = work.conditions[int(values.pop("condition"))]
        what = f"{work.name} {condition.name}"
        if "done" in values:
            if self.bar is not None:
                self.bar.set_postfix_str(f"{what} {values['done']:.0%}")
            else:
                self._say(f"{what}: {values['done']:.0%}")
            return
        self.keep(work, values)
        self.left -= 1
        if self.bar is not None:
            self.bar.update()
        self._say(f"{what}: {percentages(condition.found(values))}")

    def finished(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._say(f"{self.works[outcome.key].name} FAILED: {outcome.error}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.start:4.0f} s, {self.left} left] {text}"
        tqdm.write(line, file=self.out)
        self.out.flush()
