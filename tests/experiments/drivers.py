"""Runs `san run` in a process that a test can kill."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from experiments.config.config import PROJECT_DIR

PATIENCE = 480.0
"""Seconds after which a test assumes that a process hangs: longer than it takes on a busy machine, and less than the limit of
`pytest-timeout`."""
LEFT_OUT = (
    *("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    *("MLFLOW_TRACKING_URI", "SAN_RUNS"),
)


def clean_environment() -> dict[str, str]:
    """The environment without settings for Ray, MLflow or `san`: a local session in this process leaves some of Ray's."""
    return {name: value for name, value in os.environ.items() if name not in LEFT_OUT}


def wait_until(happened: Callable[[], object], process: subprocess.Popen[Any] | None = None, log: Path | None = None) -> None:
    """Fails if that takes too long or if the process ends before; with the log, if there is one."""
    limit = time.monotonic() + PATIENCE
    while not happened():
        ended = process is not None and process.poll() is not None
        assert not ended and time.monotonic() < limit, log and log.read_text()
        time.sleep(0.05)


class Driver:
    """A `san run` in its own process group, which is killed at the end of a `with` block.

    The output goes to a file next to the folder of runs. With `uri`, the runs are stored there instead of in the folder.
    """

    def __init__(
        self,
        grid: Path,
        runs: Path,
        overrides: Sequence[str],
        environment: Mapping[str, str],
        module: str = "experiments",
        uri: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.log = log or runs.with_suffix(f".{time.monotonic_ns()}.log")
        command = [sys.executable, "-m", module, "run", str(grid), *overrides, "--runs", uri or str(runs)]
        variables = {**clean_environment(), **environment}
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                command, cwd=PROJECT_DIR, env=variables, stdout=out, stderr=out, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> None:
        """Waits until the output matches."""
        wait_until(lambda: re.search(pattern, self.said), self.process, self.log)

    def finish(self) -> int:
        return self.process.wait(timeout=PATIENCE)
