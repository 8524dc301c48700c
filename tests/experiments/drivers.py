"""Runs `san run` in a process that a test can kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.grids.config import PROJECT_DIR

PATIENCE = 1800.0
"""Seconds after which a test assumes that a process hangs: much longer than any test takes, even on a busy machine."""
LEFT_OUT = (
    *("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    *("MLFLOW_TRACKING_URI", "SAN_RUNS"),
)


def clean_environment() -> dict[str, str]:
    """The environment without settings for Ray, MLflow or `san`: a local session in this process leaves some of Ray's."""
    return {name: value for name, value in os.environ.items() if name not in LEFT_OUT}


class Driver:
    """A `san run` in its own process group, which is killed at the end of a `with` block.

    The output goes to a file next to the folder of runs. With `uri`, the runs are stored there instead of in the folder.
    """

    def __init__(
        self,
        grid: Path,
        runs: Path,
        overrides: Sequence[str],
        environment: Mapping[str, str] = {},
        module: str = "experiments",
        uri: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.log = log or runs.with_suffix(f".{time.monotonic_ns()}.log")
        command = [sys.executable, "-m", module, "run", str(grid), *overrides, "--runs", uri or str(runs)]
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=PROJECT_DIR,
                env=clean_environment() | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, seconds: float = PATIENCE) -> None:
        limit = time.monotonic() + seconds
        while not re.search(pattern, self.said):
            assert self.process.poll() is None, f"ended before it printed {pattern!r}:\n{self.said}"
            assert time.monotonic() < limit, f"did not print {pattern!r} in {seconds} s:\n{self.said}"
            time.sleep(0.05)

    def finish(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(timeout=seconds)
