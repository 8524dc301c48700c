"""Tracking servers for tests, in processes of their own on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`mlflow server` on a database; it may be killed and started again, at the same address."""

    def __init__(self, folder: Path, database: str, *options: str, environment: Mapping[str, str] = {}) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, *options]
        self.command += ["--artifacts-destination", str(folder / "artifacts"), "--port", str(self.port), "--workers", "1"]
        self.environment = {**os.environ, **environment}
        self.environment.pop("MLFLOW_TRACKING_URI", None)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def launch(self) -> None:
        """Starts it; `wait` waits until it answers."""
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        limit = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self.process is not None and self.process.poll() is None and time.monotonic() < limit, self.log
                time.sleep(0.2)

    def kill(self) -> None:
        """At once, and all of its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
