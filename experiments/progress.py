"""What a person sees while a grid runs: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from cluster import Outcome

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Observes a sweep over trials; `names` gives each key's name, `epochs` its length."""

    def __init__(self, names: Mapping[str, str], epochs: Mapping[str, int]) -> None:
        self.names, self.epochs = names, epochs
        self.start = time.monotonic()
        self.begun: dict[str, float] = {}
        self.told: dict[str, float] = {}
        self.latest: dict[str, Mapping[str, float]] = {}
        self.ended = 0
        self.bar: tqdm[None] | None = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=sum(epochs.values()), unit="epoch", dynamic_ncols=True, leave=False)

    def started(self, key: str) -> None:
        again = "continues after a failure" if key in self.begun else "starts"
        self.begun[key] = time.monotonic()
        self._say(f"{self.names[key]} {again}")

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        self.latest[key] = metrics
        if self.bar is not None:
            done = sum(int(m["epoch"]) for m in self.latest.values())
            self.bar.update(done - self.bar.n)
            self.bar.set_postfix_str(f"{self.names[key]} top-1 {metrics['val/top1']:.1f}%")
        elif time.monotonic() - self.told.get(key, self.begun.get(key, 0.0)) >= SECONDS_BETWEEN_LINES:
            self.told[key] = time.monotonic()
            self._say(f"{self.names[key]} {_epoch(metrics)}")

    def finished(self, outcome: Outcome) -> None:
        self.ended += 1
        name = self.names[outcome.key]
        seconds = time.monotonic() - self.begun.get(outcome.key, self.start)
        if outcome.error is not None:
            self._say(f"{name} FAILED after {seconds:.0f} s: {outcome.error}")
        elif outcome.key in self.latest:
            self._say(f"{name} finished in {seconds:.0f} s: {_epoch(self.latest[outcome.key])}")
        else:
            self._say(f"{name} finished in {seconds:.0f} s: it was complete already")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self.start
        line = f"[{elapsed:4.0f} s, {self.ended}/{len(self.names)} done] {text}"
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


def _epoch(metrics: Mapping[str, float]) -> str:
    return (
        f"epoch {metrics['epoch']:.0f}/{metrics['epochs']:.0f}, loss {metrics['train/loss']:.3f}, "
        f"top-1 {metrics['val/top1']:.1f} %, {metrics['train/images_per_second']:.0f} images/s, "
        f"waiting {100 * metrics['train/wait_share']:.0f} %"
    )
