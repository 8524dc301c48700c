"""Ends a process in which nothing goes on any more: what it waits for may never come, and it holds a GPU."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from types import TracebackType
from typing import TextIO

_log = logging.getLogger(__name__)

EXIT_CODE = 70
"""Of a process that was ended for hanging."""


class Watchdog:
    """Inside the block, ends the process where `step_ended` is not called for `seconds`.

    The log gets a sentence, `log` the stacks of all threads. Python's threads must be able to run for it: nearly everything
    that waits (collectives, files, kernels) lets them.
    """

    def __init__(self, seconds: float, log: TextIO) -> None:
        self.seconds, self.log = seconds, log
        self._alive_at = time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def step_ended(self) -> None:
        self._alive_at = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._left.wait(max(self._alive_at + self.seconds - time.monotonic(), 0)):
            if time.monotonic() - self._alive_at >= self.seconds:
                _log.error("no step has ended for %.3g minutes; this worker is ended, its threads were at:", self.seconds / 60)
                faulthandler.dump_traceback(self.log, all_threads=True)
                os._exit(EXIT_CODE)
