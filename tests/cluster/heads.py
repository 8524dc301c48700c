"""Ray heads started by `ray start`, each with its own ports and folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.test_supervision import MARK, marked
from tests.experiments.drivers import PATIENCE, clean_environment
from tests.experiments.servers import free_port

RAY = Path(sys.executable).parent / "ray"


@contextmanager
def ray_head(port: int, *options: str, environment: Mapping[str, str] = {}) -> Iterator[Path]:
    """A running head; yields its folder. All of its processes end with the block."""
    folder = Path(tempfile.mkdtemp(prefix="san-"))  # a short path, because the paths of Ray's sockets must be short
    command = [str(RAY), "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}", *options]
    command += [f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
    variables = clean_environment() | {"PATH": f"{RAY.parent}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray would require a token if an earlier session has left one in the home folder.
    variables |= {MARK: str(folder), "RAY_AUTH_MODE": "disabled", **environment}
    log = folder / "head.log"
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        limit = time.monotonic() + PATIENCE
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.3)
        yield folder
    finally:
        process.terminate()  # `ray start --block` ends the processes that it started
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        for pid in marked(str(folder)):
            with suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
