"""The progress of long work: a bar and a line per running trial on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from experiments.training.reporter import metrics_in_words

if TYPE_CHECKING:
    from cluster import Outcome

SECONDS_BETWEEN_LINES = 10.0
"""Between two lines of a log about the same trial, at least."""
SECONDS_BETWEEN_DRAWINGS = 0.1
NARROWEST = 50
"""Narrower terminals show plain lines, in columns."""


class Display:
    """Messages, and on a terminal, unless `live` is False, a bar and rows of text below them that are redrawn in place."""

    def __init__(self, out: TextIO, live: bool = True) -> None:
        self.out, self.live = out, self._live(out) if live else None

    @staticmethod
    def _live(out: TextIO) -> Any:
        """The bar and rows; None without a terminal that can redraw lines."""
        if not out.isatty():
            return None
        from rich.console import Console
        from rich.live import Live

        console = Console(file=out, force_terminal=True, highlight=False)
        if console.is_dumb_terminal or console.width < NARROWEST:
            return None
        return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    def write(self, line: str) -> None:
        """Prints a line, above the bar on a terminal."""
        with suppress(OSError):  # training goes on without a terminal
            if self.live is not None and self.live.is_started:
                self.live.console.out(line)
            else:
                print(line, file=self.out, flush=True)

    def show(self, before: str, done: float, total: float | None, after: str, rows: Sequence[tuple[str, str]] = ()) -> None:
        """Redraws the bar between two texts, and rows of a name and a text; does nothing in a log."""
        if self.live is None:
            return
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 2))
        for _ in range(3):
            bar.add_column(no_wrap=True)
        bar.add_row(before, ProgressBar(total, done, width=20), after)
        width = min(max((len(name) for name, _ in rows), default=0), self.live.console.width // 3)
        lines = [f"{name if len(name) <= width else f'{name[: width - 2]}..':{width}s}  {text}" for name, text in rows]
        with suppress(OSError):
            self.live.start()
            texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
            self.live.update(Group(bar, *texts), refresh=True)

    def close(self) -> None:
        """Removes the bar and the rows."""
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()


class CountFn(Protocol):
    def __call__(self, more: int = 1, note: str = "") -> None:
        """Adds to the count; the note, for example `, 2 broken`, follows it."""


@contextmanager
def counting(what: str, total: int | None, unit: str) -> Iterator[CountFn]:
    """Shows on stderr how much is done."""
    display, start = Display(sys.stderr), time.monotonic()
    done, shown = 0, start

    def count(more: int = 1, note: str = "") -> None:
        nonlocal done, shown
        done, now = done + more, time.monotonic()
        if now - shown < (SECONDS_BETWEEN_LINES if display.live is None else SECONDS_BETWEEN_DRAWINGS):
            return
        shown = now
        text = f"{done}{'' if total is None else f' of {total}'} {unit}{note}"
        if display.live is None:
            display.write(f"[{now - start:4.0f} s] {f'{what}: ' if what else ''}{text}")
        left = (total - done) * (now - start) / done if total and done else None
        display.show(what, done, total, text + _left(left))

    try:
        yield count
    finally:
        display.close()


@dataclass(slots=True)
class _TrialProgress:
    name: str
    epochs: int
    begun: float
    """Start of the latest attempt; of the sweep if there is none."""
    attempts: int = 0
    running: bool = False
    failed: bool = False
    logged: float = 0.0
    """Time of the latest line in the log."""
    latest: Mapping[str, float] | None = None
    done: float = 0.0
    """Epochs, with the trained part of the current one."""
    first: tuple[float, float] | None = None
    """Time of the first report of the latest attempt, and epochs done by then."""
    seen: float = 0.0
    """Time of the latest report."""

    def report(self, metrics: Mapping[str, float], now: float) -> None:
        self.done = metrics["epoch"]
        if "step" in metrics:
            self.done += metrics["step"] / metrics["steps"]
        self.first = self.first or (now, self.done)
        self.latest, self.seen = metrics, now

    def end(self, failed: bool) -> None:
        self.running, self.failed = False, failed
        if self.stopped:
            self.epochs = round(self.done)  # the others will not be trained
        elif not failed:
            self.done = self.epochs

    @property
    def stopped(self) -> bool:
        """Whether early stopping ended the trial."""
        return self.latest is not None and "stopped" in self.latest

    def text(self, now: float) -> str:
        if self.latest is None or self.first is None:
            return "starts"
        where, *others = metrics_in_words(self.latest)
        return ", ".join([where + _left(self.seconds_left(now)), *others])

    def seconds_left(self, now: float) -> float | None:
        """By the speed of the latest attempt. None at its beginning, and in the last validation, whose time is unknown."""
        if self.pace is None or self.done >= self.epochs:
            return None
        return max((self.epochs - self.done) * self.pace - (now - self.seen), 0)

    @property
    def pace(self) -> float | None:
        """Seconds per epoch since the first report of the latest attempt; None at its beginning."""
        if self.first is None or self.done <= self.first[1]:
            return None
        return (self.seen - self.first[0]) / (self.done - self.first[1])


class Progress:
    """Observes a sweep over trials. `names` and `epochs` give each key's name and length, `start` the time from which seconds
    are counted, by default now. `live` as in `Display`."""

    def __init__(
        self,
        names: Mapping[str, str],
        epochs: Mapping[str, int],
        out: TextIO,
        clock: Callable[[], float] = time.monotonic,
        start: float | None = None,
        live: bool = True,
    ) -> None:
        self.clock, self.start, self.display = clock, clock() if start is None else start, Display(out, live)
        self.trials = {key: _TrialProgress(name, epochs[key], self.start) for key, name in names.items()}
        self.ended = 0
        self.failures: list[Outcome] = []

    def started(self, key: str) -> None:
        trial, now = self.trials[key], self.clock()
        again = "resumes after a failure" if trial.attempts else "starts"
        trial.attempts += 1
        trial.running, trial.begun, trial.logged, trial.first = True, now, now, None
        self._write(f"{trial.name} {again}")

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        trial, now = self.trials[key], self.clock()
        is_first = trial.latest is None
        trial.report(metrics, now)
        finished = int(trial.done) - ("step" not in metrics)  # before this report
        if "interrupted" in metrics:
            self._write(f"{trial.name} {metrics_in_words(metrics)[0]}")
            return
        if is_first and metrics.get("step", 1) > 1:
            self._write(f"{trial.name} resumes at {metrics_in_words(metrics)[0]}")
        elif is_first and finished >= 1:
            self._write(f"{trial.name} resumes after epoch {finished}")
        # Lines from inside an epoch become rarer, down to one per minute.
        pause = min(max((now - trial.begun) / 10, SECONDS_BETWEEN_LINES), 60) if "step" in metrics else SECONDS_BETWEEN_LINES
        if self.display.live is None and now - trial.logged >= pause:
            trial.logged = now
            self._write(f"{trial.name} {trial.text(now)}")
        self._show()

    def failed(self, key: str, reason: str) -> None:
        self._write(f"{self.trials[key].name} failed and will be retried: {reason}")

    def finished(self, outcome: Outcome) -> None:
        trial = self.trials[outcome.key]
        if trial.latest is not None and "interrupted" in trial.latest:
            return
        self.ended += 1
        trial.end(outcome.error is not None)
        seconds = f"{self.clock() - trial.begun:.0f} s"
        if outcome.error is not None:
            self.failures.append(outcome)
            self._write(f"{trial.name} FAILED after {seconds}: {outcome.error}")
        elif trial.latest is None:
            self._write(f"{trial.name} finished in {seconds}: already complete")
        elif trial.stopped:
            self._write(f"{trial.name} {', '.join(metrics_in_words(trial.latest)[:2])}, after {seconds}")
        else:
            self._write(f"{trial.name} finished in {seconds}: {', '.join(metrics_in_words(trial.latest))}")

    def waiting(self, reason: str) -> None:
        self._write(f"waiting: {reason}")

    def interrupted(self) -> None:
        self._write("interrupted; asking the trials to save their work. Press Ctrl-C again to end at once")

    def close(self) -> None:
        self.display.close()

    def seconds_left(self) -> float | None:
        """For the remaining epochs of the sweep, at the speed of the trials without their starts, if as many trials run at a
        time as now; None before there is a speed."""
        paces = [pace for trial in self.trials.values() if (pace := trial.pace) is not None]
        trials = [trial for trial in self.trials.values() if not trial.failed and trial.done < trial.epochs]
        if not paces or not trials:
            return None
        mean = sum(paces) / len(paces)
        left = [(trial.epochs - trial.done) * (mean if trial.pace is None else trial.pace) for trial in trials]
        return max(sum(left) / max(sum(trial.running for trial in trials), 1), *left)

    def _write(self, text: str) -> None:
        seconds = self.clock() - self.start
        self.display.write(f"[{seconds:4.0f} s, {self.ended}/{len(self.trials)} done{_left(self.seconds_left())}] {text}")
        self._show()

    def _show(self) -> None:
        trials, now = self.trials.values(), self.clock()
        failed = sum(trial.failed for trial in trials)
        before = f"{self.ended}/{len(trials)} trials{f' ({failed} FAILED)' if failed else ''}"
        done, total = sum(trial.done for trial in trials), sum(trial.epochs for trial in trials)
        rows = [(trial.name, trial.text(now)) for trial in trials if trial.running]
        self.display.show(before, done, total, f"{int(done)}/{total} epochs{_left(self.seconds_left())}", rows)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 100:
        return f", {seconds:.0f} s left"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f", {minutes} min left"
    hours, minutes = divmod(minutes, 60)
    return f", {hours} h {minutes:02d} min left" if hours < 48 else f", {hours / 24:.1f} d left"


def trial_count(number: int) -> str:
    """For example `1 trial` or `3 trials`."""
    return f"{number} trial{'s'[: number != 1]}"


def duration(seconds: float) -> str:
    """For example `3 h 20 min`, `2 min 40 s` or `50 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours / 24:.0f} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
