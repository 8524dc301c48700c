"""Servers for tests, in processes on this machine: MLflow, an object store and PostgreSQL."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from tests.experiments.drivers import PATIENCE

LOOPBACK = "127.0.0.1"
# See docs/guides/tracking.md: a worker of the server has 40 threads, and a request uses two connections.
POOL = {"MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "40", "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "40"}


def free_port(host: str = LOOPBACK) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """`mlflow server` with a database, which can be killed and restarted at the same address."""

    def __init__(
        self,
        folder: Path,
        database: str,
        *options: str,
        environment: Mapping[str, str] = {},
        workers: int = 1,
        host: str = LOOPBACK,
    ) -> None:
        self.folder, self.port = folder, free_port(host)
        self.uri = f"http://{host}:{self.port}"
        self.command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, *options]
        self.command += ["--artifacts-destination", str(folder / "artifacts")]
        self.command += ["--host", host, "--port", str(self.port), "--workers", str(workers)]
        self.environment = {**os.environ, **environment}
        self.environment.pop("MLFLOW_TRACKING_URI", None)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def launch(self) -> None:
        """Starts the server; `wait` waits until it responds."""
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        limit = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self.process is not None and self.process.poll() is None and time.monotonic() < limit, self.log
                time.sleep(0.2)

    def kill(self) -> None:
        """Kills all processes of the server."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class ObjectStore:
    """moto's S3 server, which keeps everything in memory, with one bucket, `runs`. Skips the test if moto is not installed."""

    KEYS: ClassVar = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "open sesame"}

    def __init__(self, log: Path, host: str = LOOPBACK) -> None:
        if importlib.util.find_spec("moto") is None:
            pytest.skip("moto, an S3 server, is missing: install requirements.txt")
        self.log, self.port = log, free_port(host)
        self.address = f"http://{host}:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(self.port)]
        with open(log, "w") as out:
            self.process = subprocess.Popen(command, env={**os.environ, **self.KEYS}, stdout=out, stderr=out)
        limit = time.monotonic() + PATIENCE
        while not self._answers("moto-api/"):
            assert self.process.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.05)
        assert self._answers("runs", method="PUT")

    def uri(self, prefix: str, bucket: str = "runs") -> str:
        """Value for `--runs`."""
        return f"s3://{bucket}/{prefix}?endpoint_override={self.address}"

    def refuse(self, wanted: bool = True) -> None:
        """Rejects all credentials from now on, or accepts all of them again."""
        assert self._answers("moto-api/reset-auth", method="POST", data=b"0" if wanted else b"inf")

    def stop(self) -> None:
        """Stops responding until `resume`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self, path: str, method: str = "GET", data: bytes | None = None) -> bool:
        try:
            request = urllib.request.Request(f"{self.address}/{path}", data, {"Content-Type": "text/plain"}, method=method)
            urllib.request.urlopen(request, timeout=PATIENCE).close()
        except OSError:
            return False
        return True


def postgres_folder() -> Path:
    """Folder of PostgreSQL's programs. Skips the test if they or a package that a server needs are missing."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and not on_path:
        pytest.skip("PostgreSQL is missing: no initdb in /usr/lib/postgresql/*/bin or on PATH (Debian's package postgresql)")
    for module, package in {"psycopg": "psycopg[binary]", "flask_wtf": "Flask-WTF"}.items():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the server needs {package}, which is missing: install requirements.txt")
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL cannot run as root, and the user postgres does not exist")
    return found[-1].parent if found else Path(on_path or "").resolve().parent


@contextmanager
def postgres(password: str) -> Iterator[str]:
    """An empty PostgreSQL database: its address without the password, which clients take from PGPASSWORD."""
    programs, port = postgres_folder(), free_port()
    who = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as name:  # other users cannot read pytest's folders
        folder = Path(name)
        (folder / "password").write_text(password)
        if who:
            for path in (folder, folder / "password"):
                shutil.chown(path, "postgres", "postgres")
        data = folder / "data"
        initdb = [programs / "initdb", "-D", data, "-A", "scram-sha-256", "-U", "tracker", "--no-sync"]
        subprocess.run([*initdb, "--pwfile", folder / "password"], cwd=folder, check=True, capture_output=True, **who)
        server = [programs / "postgres", "-D", data, "-p", str(port), "-k", folder, "-h", "127.0.0.1", "-F", "-N", "400"]
        with open(folder / "log", "w") as log, subprocess.Popen(server, cwd=folder, stdout=log, stderr=log, **who) as process:
            try:
                limit = time.monotonic() + PATIENCE
                while "ready to accept connections" not in (folder / "log").read_text():
                    assert process.poll() is None and time.monotonic() < limit, (folder / "log").read_text()
                    time.sleep(0.05)
                yield f"postgresql://tracker@127.0.0.1:{port}/postgres"
            finally:
                process.send_signal(signal.SIGINT)  # a fast shutdown
                process.wait(timeout=PATIENCE)


def commands() -> str:
    """The command lines of all processes, which every user of this machine can read."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # the process has ended
            continue
    return "\n".join(lines)
