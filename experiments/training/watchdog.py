"""Ends a worker that makes no progress: what it waits for may never come, and it occupies a GPU."""

from __future__ import annotations

import faulthandler
import math
import time
from types import TracebackType
from typing import TextIO


class Watchdog:
    """Inside the block, ends the process with exit code 1 if `step_ended` is not called for `seconds`, which may be infinite.

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
