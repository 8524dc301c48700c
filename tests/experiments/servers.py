"""Servers for tests, in processes on this machine: MLflow and an object store."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.experiments.drivers import PATIENCE, wait_until

LOOPBACK = "127.0.0.1"


def responds(address: str, method: str = "GET", data: bytes | None = None) -> bool:
    request = urllib.request.Request(address, data, {"Content-Type": "text/plain"}, method=method)
    try:
        urllib.request.urlopen(request, timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def port_in(log: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that a server has chosen itself, from its log."""
    wait_until(lambda: re.search(rf"[Rr]unning on http://{LOOPBACK}:[1-9]\d*", log.read_text()), process, log)
    return int(re.findall(rf"[Rr]unning on http://{LOOPBACK}:(\d+)", log.read_text())[-1])


class Server:
    """`mlflow server` with a database, which can be killed and restarted at the same address."""

    def __init__(self, folder: Path, database: str, *options: str, environment: Mapping[str, str] = {}) -> None:
        self.folder, self.port = folder, 0
        self.command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, *options]
        self.command += ["--artifacts-destination", str(folder / "artifacts")]
        self.command += ["--host", LOOPBACK, "--workers", "1", "--port"]
        self.environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
        self.environment.pop("MLFLOW_TRACKING_URI", None)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """The address of the server, known after its first start."""
        return f"http://{LOOPBACK}:{self.port}"

    def launch(self) -> None:
        """Starts the server; `wait` waits until it responds."""
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                [*self.command, str(self.port)],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        assert self.process is not None
        log = self.folder / "server.log"
        self.port = self.port or port_in(log, self.process)
        wait_until(lambda: responds(f"{self.uri}/health"), self.process, log)

    def kill(self) -> None:
        """Kills all processes of the server."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class ObjectStore:
    """moto's S3 server, which keeps everything in memory, with one bucket, `runs`."""

    KEYS: ClassVar = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "open sesame"}

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", "0"]
        with open(log, "w") as out:
            self.process = subprocess.Popen(command, env={**os.environ, **self.KEYS}, stdout=out, stderr=out)
        self.address = f"http://{LOOPBACK}:{port_in(log, self.process)}"
        wait_until(lambda: responds(f"{self.address}/moto-api/"), self.process, log)
        assert responds(f"{self.address}/runs", "PUT")

    def uri(self, prefix: str, bucket: str = "runs") -> str:
        """Value for `--runs`."""
        return f"s3://{bucket}/{prefix}?endpoint_override={self.address}"

    def refuse(self, wanted: bool = True) -> None:
        """Rejects all credentials from now on, or accepts all of them again."""
        assert responds(f"{self.address}/moto-api/reset-auth", "POST", b"0" if wanted else b"inf")

    def stop(self) -> None:
        """Stops responding until `resume`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
