"""Ends a process in which nothing goes on any more: what it waits for may never come, and it holds a GPU."""

from __future__ import annotations

import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO

_log = logging.getLogger(__name__)

EXIT_CODE = 70
"""Of a process that was ended for hanging, where it could still do that itself."""

GUARD = """
import os, select, signal, sys
while select.select([0], [], [], float(sys.argv[2]))[0]:
    if not os.read(0, 4096):
        sys.exit()
if os.getppid() == int(sys.argv[1]):
    os.kill(os.getppid(), signal.SIGKILL)
"""


class Watchdog:
    """Inside the block, ends the process where `step_ended` is not called for `seconds`.

    The log gets a sentence, `log` the stacks of all threads. Where not even Python's threads can run for so long (the process
    is stopped, or something keeps the interpreter's lock), a guard, a process of its own, kills it without them.
    """

    def __init__(self, seconds: float, log: TextIO) -> None:
        self.seconds, self.log = seconds, log
        self._alive_at = time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # Its input ends with this process, however that ends.
        command = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(seconds)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)

    def step_ended(self) -> None:
        self._alive_at = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _watch(self) -> None:
        assert self._guard.stdin is not None
        while not self._left.wait(max(min(self._alive_at + self.seconds - time.monotonic(), self.seconds / 10), 0)):
            with suppress(BrokenPipeError):  # somebody has ended the guard
                self._guard.stdin.write(b".")
            if time.monotonic() - self._alive_at >= self.seconds:
                _log.error("no step finished for %.3g minutes; stopping this worker. Stack of each thread:", self.seconds / 60)
                faulthandler.dump_traceback(self.log, all_threads=True)
                os._exit(EXIT_CODE)
