"""Submits jobs to a remote cluster through Ray's job server. Use `ray job` to list, follow and stop them."""

import asyncio
import logging
import os
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import ray
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from cluster.errors import ClusterError
from cluster.session import reach
from cluster.token import rejected, token

STOP_SECONDS = 60
"""Time in which a stopped job can end its cells and update MLflow, before Ray kills it. Ray's default is 3 s."""
PATIENCE = 600.0
"""Seconds for which the server of a followed job may be unreachable."""
STARTUP_SECONDS = 90.0
"""Seconds within which a new head must accept jobs; its dashboard responds earlier."""
NOT_READY = "No available agent"
"""Part of the error message of a head that does not accept jobs yet."""
SILENCE = 120.0
"""Seconds without output after which the log is requested again, because a lost connection can go unnoticed."""

# Otherwise Ray's client logs every package and every connection.
for noisy in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
    logging.getLogger(f"ray.{noisy}").setLevel(logging.WARNING)


class UnreachableError(ClusterError):
    """The job server does not respond. Its jobs may still be running."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """How a job ended."""

    state: str
    """succeeded, failed or stopped."""
    message: str
    """One line."""
    exit_code: int | None
    """Exit code of its command; None if the command was killed or did not start."""


class JobServer:
    """The job server of a cluster's head, for example `http://head:8265`.

    Methods raise ClusterError if the server rejects a request, and UnreachableError if it does not respond.
    """

    def __init__(self, address: str | None = None) -> None:
        """Connects to `address`, by default RAY_API_SERVER_ADDRESS or else RAY_ADDRESS, if that is an HTTP address.

        Raises:
            ClusterError: the address is missing or wrong, the server has another version of Ray, or it rejects the token.
        """
        self.address = (address or _address_in_environment()).rstrip("/")
        try:
            parts = urlsplit(self.address)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClusterError(
                f"{self.address!r} is not the address of a job server; expected http://HOST:PORT, such as http://head:8265"
            )
        try:
            reach(parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme])
        except (OSError, ValueError):  # ValueError: the port is not a number
            raise ClusterError(
                f"nothing answers at {self.address}; check the address and that the head's dashboard listens there"
            ) from None
        self._client = self._connect()

    def _connect(self) -> JobSubmissionClient:
        headers = {"Authorization": f"Bearer {token()}"} if token() else {}
        try:
            with _without_other_address(self.address):
                client = JobSubmissionClient(self.address, headers=headers)
        except AuthenticationError:
            raise rejected(self.address) from None
        except (KeyError, OSError, RuntimeError, TypeError, ValueError):  # exceptions of requests are OSErrors
            raise ClusterError(
                f"{self.address} answers, but is not the job server of a Ray head; check the host and the port"
            ) from None
        # The client has no public attribute for the version of the server, and would fail later with a confusing error.
        theirs, ours = str(client._server_ray_version), ray.__version__
        if theirs.split(".")[:2] != ours.split(".")[:2]:
            raise ClusterError(
                f"{self.address} runs Ray {theirs}, but this machine has Ray {ours}; install the same version on both"
            )
        return client

    def submit(self, job: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Uploads a folder, unless the cluster has it already, and runs a command in it on the head.

        The arguments are not expanded by a shell. The command and all processes that it starts get the environment.
        """
        settings = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
        limit = time.monotonic() + STARTUP_SECONDS
        while True:
            try:
                with self._errors():
                    self._client.submit_job(
                        entrypoint=shlex.join(command),
                        submission_id=job,
                        runtime_env={"working_dir": str(folder), "env_vars": settings | dict(environment)},
                    )
                return
            except UnreachableError as error:
                if NOT_READY not in str(error) or time.monotonic() > limit:
                    raise

    def follow(self, job: str, write: Callable[[str], None]) -> FinishedJob:
        """Writes a job's log until the job ends. After a lost connection, continues where the output stopped."""
        written, responded, was_finished = 0, time.monotonic(), False

        async def tail() -> None:
            nonlocal written, responded
            place = 0
            pieces = self._client.tail_job_logs(job)
            while (piece := await asyncio.wait_for(anext(pieces, None), SILENCE)) is not None:
                place += len(piece)
                responded = time.monotonic()
                if place > written:
                    write(piece[written - place :])
                    written = place

        while True:
            is_complete = False
            with suppress(aiohttp.ClientError, OSError, RuntimeError):  # TimeoutError is an OSError
                asyncio.run(tail())
                is_complete = True
            try:
                finished = self._finished(job)
                responded = time.monotonic()
            except UnreachableError:
                if time.monotonic() - responded > PATIENCE:
                    raise
            else:
                if finished is not None and (is_complete or was_finished):  # the rest of the log is lost if its node is
                    return finished
                was_finished = finished is not None
            time.sleep(0.5)

    def _finished(self, job: str) -> FinishedJob | None:
        """How a job ended; None while it is pending or running."""
        with self._errors():
            details = self._client.get_job_info(job)
        if details.status not in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED):
            return None
        code = details.driver_exit_code
        # Otherwise Ray's message contains the end of the log, which has been written.
        message = _line(details.message or "") if code in (None, 0) else f"the command exited with code {code}"
        return FinishedJob(details.status.value.lower(), message, code)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of Ray's client into a ClusterError."""
        try:
            yield
        except AuthenticationError:
            raise rejected(self.address) from None
        except requests.RequestException as error:
            raise UnreachableError(
                f"{self.address} does not answer ({type(error).__name__}); check the network and the head"
            ) from None
        except RuntimeError as error:  # a response with an error status
            if "status code 404" in str(error):
                raise ClusterError(
                    f"{self.address} does not know the job any more; a head forgets its jobs when it restarts"
                ) from None
            raise UnreachableError(f"{self.address}: {_line(str(error).strip().rpartition(chr(10))[2])}") from None


def _address_in_environment() -> str:
    """Raises ClusterError if no variable contains an address."""
    other = os.environ.get("RAY_ADDRESS", "")
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or (other if other.startswith("http") else "")
    if not address:
        raise ClusterError(
            "the address of the job server is missing; give --address http://head:8265 or set RAY_API_SERVER_ADDRESS"
        )
    return address


@contextmanager
def _without_other_address(address: str) -> Iterator[None]:
    """Sets RAY_API_SERVER_ADDRESS, which Ray's client prefers to its argument."""
    before = os.environ.get("RAY_API_SERVER_ADDRESS")
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_API_SERVER_ADDRESS"]
        else:
            os.environ["RAY_API_SERVER_ADDRESS"] = before


def _line(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], 300)
