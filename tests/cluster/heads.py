"""Ray heads started by `ray start`, each with its own ports and folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.session import start_ray
from tests.cluster.processes import MARK, marked
from tests.experiments.drivers import clean_environment, wait_until

RAY = Path(sys.executable).parent / "ray"


def skip_unless_ray_can_start() -> None:
    """Skips the test where no cluster can be started: Ray passes the path of Python to a shell without quotes."""
    if " " in sys.executable:
        pytest.skip("Ray starts no cluster where the path of the environment has a space")


@dataclass(frozen=True, slots=True)
class RayHead:
    """A running head; its processes inherit the folder's path as `MARK`."""

    process: subprocess.Popen[bytes]
    folder: Path
    address: str
    """For drivers."""
    job_server: str
    """Empty without a dashboard."""


@contextmanager
def ray_head(*options: str, environment: Mapping[str, str] = {}) -> Iterator[RayHead]:
    """A running head. All of its processes end with the block."""
    skip_unless_ray_can_start()
    head = start_ray(lambda: _start(options, environment))
    try:
        yield head
    finally:
        head.process.terminate()  # `ray start --block` ends the processes that it started
        with suppress(subprocess.TimeoutExpired):
            head.process.wait(timeout=20)
        for pid in marked(str(head.folder)):
            with suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(pid, signal.SIGKILL)
        head.process.wait()
        shutil.rmtree(head.folder, ignore_errors=True)


def _start(options: tuple[str, ...], environment: Mapping[str, str]) -> RayHead:
    folder = Path(tempfile.mkdtemp(prefix="san-"))  # a short path, because the paths of Ray's sockets must be short
    ports = ("--port=0", "--dashboard-port=0", "--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0")
    with socket.socket() as probe:  # The only port that Ray does not choose itself. If it is taken meanwhile, Ray starts again.
        probe.bind(("127.0.0.1", 0))
        ports += (f"--ray-client-server-port={probe.getsockname()[1]}",)
    command = [str(RAY), "start", "--head", "--block", f"--temp-dir={folder}", *ports, *options]
    variables = clean_environment() | {"PATH": f"{RAY.parent}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray would require a token if an earlier session has left one in the home folder.
    variables |= {MARK: str(folder), "RAY_AUTH_MODE": "disabled", "NO_COLOR": "1", **environment}
    log = folder / "head.log"
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    wait_until(lambda: "ray stop" in log.read_text(), process, log)  # the last of the hints, which contain the addresses
    said = re.sub(r"\x1b\[\d+m", "", log.read_text())
    (address,) = re.findall(r"ray start --address='(\S+)'", said)
    server = re.search(r"RAY_API_SERVER_ADDRESS='(\S+)'", said)
    return RayHead(process, folder, address, server[1] if server else "")
