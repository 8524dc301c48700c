"""What a person sees while a grid runs: a bar and a line for each cell on a terminal, lines in a log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from experiments.training.reporter import words

if TYPE_CHECKING:
    from cluster.sweep import Outcome

SECONDS_BETWEEN_LINES = 10.0
"""Of a log, on one cell, at least."""
BAR = 30
"""Characters at most."""


class Screen:
    """Lines at the bottom of a terminal, redrawn in place; what is said scrolls above them."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._drawn: list[int] = []

    def size(self) -> tuple[int, int]:
        """Columns and rows; a terminal that does not know, or is gone, has 80 and 24."""
        try:
            columns, rows = os.get_terminal_size(self.out.fileno())
        except OSError:
            return 80, 24
        return columns or 80, rows or 24

    def draw(self, lines: Sequence[str], said: str = "") -> None:
        """Puts these lines in the place of those before. Each must be shorter than the terminal is wide."""
        columns, _ = self.size()
        up = sum(-(-max(length, 1) // columns) for length in self._drawn)  # a terminal made narrower has broken some
        self._drawn = [len(line) for line in lines]
        text = said + "".join(f"{line}\n" for line in lines)
        _write(self.out, (f"\x1b[{up}A" if up else "") + f"\r\x1b[J{text}")


@dataclass(slots=True)
class _Cell:
    name: str
    epochs: int
    begun: float
    """When the latest attempt was; the sweep's begin before there is one."""
    attempts: int = 0
    running: bool = False
    failed: bool = False
    told: float = 0.0
    """When the log was told of it."""
    heard: float | None = None
    """When the latest attempt was first heard of; and where it was then, in epochs."""
    heard_at: float = 0.0
    latest: Mapping[str, float] | None = None
    seen: float = 0.0
    """When the latest report came."""
    done: float = 0.0
    """Epochs, with the part of the running one."""
    done_before: float | None = None
    """Epochs that were done before this sweep, None until that is known."""

    def start(self, now: float) -> None:
        self.attempts += 1
        self.running, self.begun, self.told, self.heard = True, now, now, None

    def report(self, metrics: Mapping[str, float], now: float) -> None:
        begun_at = metrics["epoch"] - 1  # of the epoch that is told
        self.done = metrics["epoch"]
        if "step" in metrics:
            begun_at = self.done = metrics["epoch"] + metrics["step"] / metrics["steps"]
        if self.done_before is None or begun_at < self.done_before:
            self.done_before = begun_at
        if self.heard is None:
            self.heard, self.heard_at = now, self.done
        self.latest, self.seen = metrics, now

    def end(self, failed: bool) -> None:
        self.running, self.failed = False, failed
        if self.stopped:
            self.epochs = round(self.done)  # the others are not to come
        elif not failed:
            self.done = self.epochs
        if self.done_before is None:
            self.done_before = self.done

    @property
    def stopped(self) -> bool:
        """Whether it has ended early."""
        return self.latest is not None and "stopped" in self.latest

    def seconds_left(self, now: float) -> float | None:
        """By the speed of the latest attempt; None before there is one, and in the last validation, whose time is not known."""
        if self.heard is None or self.done <= self.heard_at or self.done >= self.epochs:
            return None
        pace = (self.seen - self.heard) / (self.done - self.heard_at)
        return max((self.epochs - self.done) * pace - (now - self.seen), 0)


class Progress:
    """Observes a sweep over trials; `names` gives each key's name, `epochs` its length."""

    def __init__(
        self,
        names: Mapping[str, str],
        epochs: Mapping[str, int],
        out: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out, self.clock, self.start = out, clock, clock()
        self.cells = {key: _Cell(name, epochs[key], self.start) for key, name in names.items()}
        self.ended = 0
        has_places = out.isatty() and os.environ.get("TERM") != "dumb"
        self.screen = Screen(out) if has_places else None

    def started(self, key: str) -> None:
        cell = self.cells[key]
        again = "resumes after a failure" if cell.attempts else "starts"
        cell.start(self.clock())
        self._say(f"{cell.name} {again}")

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        cell, now = self.cells[key], self.clock()
        cell.report(metrics, now)
        if self.screen is not None:
            self.screen.draw(self._lines())
        elif now - cell.told >= (_pause(now - cell.begun) if "step" in metrics else SECONDS_BETWEEN_LINES):
            cell.told = now
            self._say(f"{cell.name} {', '.join(self._words(cell))}")

    def finished(self, outcome: Outcome) -> None:
        self.ended += 1
        cell = self.cells[outcome.key]
        cell.end(outcome.error is not None)
        seconds = self.clock() - cell.begun
        if outcome.error is not None:
            self._say(f"{cell.name} FAILED after {seconds:.0f} s: {outcome.error}")
        elif cell.latest is not None and cell.stopped:
            self._say(f"{cell.name} {', '.join(words(cell.latest)[:2])}, after {seconds:.0f} s")
        elif cell.latest is not None:
            self._say(f"{cell.name} finished in {seconds:.0f} s: {', '.join(words(cell.latest))}")
        else:
            self._say(f"{cell.name} finished in {seconds:.0f} s: already complete")

    def close(self) -> None:
        """Leaves nothing behind but what was said."""
        if self.screen is not None:
            self.screen.draw([])

    def seconds_left(self) -> float | None:
        """Of the sweep: as many epochs as are left, at the speed of those done here; None before there are any."""
        here = sum(cell.done - cell.done_before for cell in self.cells.values() if cell.done_before is not None)
        left = sum(cell.epochs - cell.done for cell in self.cells.values() if not cell.failed)
        return left * (self.clock() - self.start) / here if here > 0 and left > 0 else None

    def _say(self, text: str) -> None:
        line = f"[{self.clock() - self.start:4.0f} s, {self.ended}/{len(self.cells)} done{_left(self.seconds_left())}] {text}\n"
        if self.screen is not None:
            self.screen.draw(self._lines(), line)
        else:
            _write(self.out, line)

    def _words(self, cell: _Cell) -> list[str]:
        if cell.latest is None or cell.heard is None:
            return ["starts"]
        where, *others = words(cell.latest)
        return [where + _left(cell.seconds_left(self.clock())), *others]

    def _lines(self) -> list[str]:
        """The bar, and a line for every cell that runs, cut to the terminal's size."""
        assert self.screen is not None
        columns, rows = self.screen.size()
        columns -= 1  # a full line may be broken
        running = [cell for cell in self.cells.values() if cell.running]
        hidden = max(len(running) - max(rows - 3, 0), 0)
        shown = running[: len(running) - hidden]
        width = min(max((len(cell.name) for cell in shown), default=0), columns // 3)
        lines = [self._bar(columns)]
        for cell in shown:
            parts = self._words(cell)
            while len(", ".join(parts)) > columns - width - 2 and len(parts) > 1:
                parts.pop()
            lines.append(_cut(f"{_cut(cell.name, width):{width}s}  {', '.join(parts)}", columns))
        return [*lines, _cut(f"and {hidden} more", columns)] if hidden else lines

    def _bar(self, columns: int) -> str:
        done, total = (sum(values) for values in zip(*((cell.done, cell.epochs) for cell in self.cells.values()), strict=True))
        failed = sum(cell.failed for cell in self.cells.values())
        cells = f"{self.ended}/{len(self.cells)} cells" + (f" ({failed} FAILED)" if failed else "")
        epochs = f"{int(done)}/{total} epochs{_left(self.seconds_left())}"
        width = min(columns - len(cells) - len(epochs) - 6, BAR)
        bar = "#" * int(width * done / total)
        return _cut(f"{cells}  [{bar:-<{width}s}]  {epochs}" if width > 0 else f"{cells}, {epochs}", columns)


def _write(out: TextIO, text: str) -> None:
    with suppress(OSError):  # nobody is there any more: no reason to stop training
        out.write(text)
        out.flush()


def _pause(seconds: float) -> float:
    """Between two lines of a log from inside an epoch of a cell that has run for so long."""
    return min(max(seconds / 10, SECONDS_BETWEEN_LINES), 60)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: max(columns - 2, 0)]}.."


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 100:
        return f", {seconds:.0f} s left"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f", {minutes} min left"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f", {hours} h {minutes:02d} min left"
    return f", {hours / 24:.1f} d left"
