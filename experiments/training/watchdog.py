"""Ends a worker that makes no progress: what it waits for may never come, and it occupies a GPU."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO

GUARD = """
import os, select, signal, sys
while select.select([0], [], [], float(sys.argv[2]))[0]:
    if not os.read(0, 4096):
        sys.exit()
if os.getppid() == int(sys.argv[1]):
    os.kill(os.getppid(), signal.SIGKILL)
"""


class Watchdog:
    """Inside the block, ends the process with exit code 1 if `step_ended` is not called for `seconds`.

    `faulthandler` writes the stacks of all threads to `log` first; its timer also works while C code holds Python's lock. A
    process that was stopped (SIGSTOP) runs no timer, so a second process, the guard, kills it a little later.
    """

    def __init__(self, seconds: float, log: TextIO) -> None:
        self.seconds, self.log = seconds, log
        self._margin = min(seconds / 10, 5.0)
        # The guard's input ends with this process, however that ends.
        command = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(seconds + 2 * self._margin)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self._armed_at = 0.0

    def step_ended(self) -> None:
        if time.monotonic() - self._armed_at >= self._margin / 5:  # starting the timer takes 0.1 ms
            self._arm()

    def __enter__(self) -> Watchdog:
        self._arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _arm(self) -> None:
        self._armed_at = time.monotonic()
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.log)
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):  # somebody has ended the guard
            self._guard.stdin.write(b".")
