"""Restarts the command if Ray dies on this machine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from experiments.config.grid import Trial
from experiments.runner.grid_run import GridRun, print_status
from experiments.tracking import TrackerError

LIMIT = 10
"""Restarts without progress, after which the command gives up."""
RESTARTS = "SAN_RESTARTS"
"""Environment variable with the number of restarts so far."""
SECONDS = 10.0
"""How long the command tries to update MLflow before it exits."""


@dataclass(slots=True)
class Restart:
    """Called in a thread when Ray has died. Replaces this process with a new one that resumes the grid.

    Exits with code 1 on a cluster that this command did not start, after `LIMIT` restarts without progress, and after an
    interruption: a signal to the whole process group, as from `timeout`, ends Ray as well.
    """

    grid_run: GridRun
    trials: Iterable[Trial]
    local: bool
    has_advanced: Callable[[], bool] = lambda: False
    """Whether this process has made progress, so that restarts are counted from zero."""
    is_interrupted: Callable[[], bool] = lambda: False
    """Whether the user has interrupted this process."""

    def __call__(self, message: str) -> NoReturn:
        from cluster.supervision import exit_lost, kill_descendants  # imports Ray

        count = 0 if self.has_advanced() else int(os.environ.get(RESTARTS, "0"))
        if self.local and count < LIMIT and not self.is_interrupted():
            print_status(f"{message}; restarting Ray ({count + 1} of {LIMIT}); finished epochs are kept")
            os.environ[RESTARTS] = str(count + 1)
            kill_descendants()
            _close_files_on_exec()
            os.execv(sys.executable, sys.orig_argv)
        update = threading.Thread(target=self._mark_interrupted, daemon=True)
        update.start()
        update.join(SECONDS)
        exit_lost(f"{message}. Finished epochs are kept; run the same command again to resume")

    def _mark_interrupted(self) -> None:
        with suppress(TrackerError):
            self.grid_run.tracker.interrupted(self.trials)


def _close_files_on_exec() -> None:
    """Makes `execv` close all files; otherwise Ray's shared memory would stay allocated. Closing them earlier would disturb
    threads that read from them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # closed meanwhile, as the listing itself
                os.set_inheritable(int(name), False)
