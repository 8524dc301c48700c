"""Jobs on a cluster that is elsewhere: submitted, followed, listed and stopped over HTTP, through Ray's job server."""

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
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import ray
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient, JobType

from cluster.errors import ClusterError
from cluster.session import reach
from cluster.token import refused, token

STOP_SECONDS = 60
"""How long a stopped job may take to end its cells and to tell the tracker, before it is killed; Ray's own 3 s are too few."""
PATIENCE = 600.0
"""Seconds that a followed job's server may be away."""
STARTING = 90.0
"""Seconds in which a head that has just started must come to take jobs: its dashboard answers before that."""
NOT_YET = "No available agent"
"""What it says until then, after 10 s each time."""
SILENCE = 120.0
"""Seconds without a word after which a log is asked for again: a connection that is cut somewhere on the way says nothing."""

# They tell of every package and every connection.
for talker in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
    logging.getLogger(f"ray.{talker}").setLevel(logging.WARNING)


class UnreachableError(ClusterError):
    """The job server does not answer now, which says nothing about its jobs."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the server tells of a job. Times are seconds since 1970."""

    id: str
    state: str
    """pending, running, succeeded, failed or stopped."""
    started: float
    ended: float | None
    message: str
    """One line."""
    exit_code: int | None
    """Of its command, where that came to an end by itself."""

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state in ("succeeded", "failed", "stopped")


class JobServer:
    """The job server of a cluster's head, as `http://head:8265`.

    Every method raises ClusterError where the server refuses, and UnreachableError where it does not answer.
    """

    def __init__(self, address: str | None = None) -> None:
        """Connects. Without an address it is RAY_API_SERVER_ADDRESS, else RAY_ADDRESS where that is of this kind.

        Raises:
            ClusterError: no address, nobody there, no Ray there or another release of it, a token that is missing or wrong.
        """
        self.address = (address or _address_of_environment()).rstrip("/")
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
        except (OSError, ValueError):  # the latter for a port that is no number
            raise ClusterError(
                f"nothing answers at {self.address}; check the address and that the head's dashboard listens there"
            ) from None
        self._client = self._connect()

    def _connect(self) -> JobSubmissionClient:
        headers = {"Authorization": f"Bearer {token()}"} if token() else {}
        try:
            with _insisting(self.address):
                client = JobSubmissionClient(self.address, headers=headers)
        except AuthenticationError:
            raise refused(self.address) from None
        except (KeyError, OSError, RuntimeError, TypeError, ValueError):  # requests' own are OSError
            raise ClusterError(
                f"{self.address} answers, but is not the job server of a Ray head; check the host and the port"
            ) from None
        theirs, ours = str(client._server_ray_version), ray.__version__
        if theirs.split(".")[:2] != ours.split(".")[:2]:
            raise ClusterError(
                f"{self.address} runs Ray {theirs}, but this machine has Ray {ours}; install the same version on both"
            )
        return client

    def submit(self, job: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Uploads a folder, unless the cluster has one with the same content, and starts a command in it on the head.

        The command's arguments are taken as they are: no shell looks into them. The environment is that of the command and
        of all that it starts on the cluster.
        """
        settings = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
        limit = time.monotonic() + STARTING
        while True:
            try:
                with self._asking(job):
                    self._client.submit_job(
                        entrypoint=shlex.join(command),
                        submission_id=job,
                        runtime_env={"working_dir": str(folder), "env_vars": settings | dict(environment)},
                    )
                return
            except UnreachableError as error:
                if NOT_YET not in str(error) or time.monotonic() > limit:
                    raise

    def jobs(self) -> list[Job]:
        """All that were submitted, the newest first."""
        with self._asking():
            found = self._client.list_jobs()
        jobs = [_job(details) for details in found if details.type is JobType.SUBMISSION]
        return sorted(jobs, key=lambda job: job.started, reverse=True)

    def job(self, job: str) -> Job:
        """One of them."""
        if job in ("", ".", ".."):  # as parts of an address they would ask for something else
            raise self._unknown(job)
        with self._asking(job):
            details = self._client.get_job_info(job)
        if details.type is not JobType.SUBMISSION:
            raise self._unknown(job)
        return _job(details)

    def log(self, job: str) -> str:
        """What a job has said."""
        self.job(job)
        with self._asking(job):
            return str(self._client.get_job_logs(job))

    def follow(self, job: str, say: Callable[[str], None]) -> Job:
        """Says the log from its beginning until the job is over; a connection that breaks is made again where it broke."""
        self.job(job)
        said, answered, was_over = 0, time.monotonic(), False

        async def tail() -> None:
            nonlocal said, answered
            place = 0
            pieces = self._client.tail_job_logs(job)
            while (piece := await asyncio.wait_for(anext(pieces, None), SILENCE)) is not None:
                place += len(piece)
                answered = time.monotonic()
                if place > said:
                    say(piece[said - place :])
                    said = place

        while True:
            whole = False
            with suppress(aiohttp.ClientError, OSError, RuntimeError):  # TimeoutError is an OSError
                asyncio.run(tail())
                whole = True
            try:
                state = self.job(job)
            except UnreachableError:
                if time.monotonic() - answered > PATIENCE:
                    raise
            else:
                answered = time.monotonic()
                if state.over and (whole or was_over):  # where its node is gone, nobody has the rest
                    return state
                was_over = state.over
            time.sleep(0.5)

    def stop(self, job: str) -> Job:
        """Ends a job and waits for its end; one that is over is left as it is."""
        state = self.job(job)
        if state.over:
            return state
        with self._asking(job):
            self._client.stop_job(job)
        limit = time.monotonic() + STOP_SECONDS + 30
        while not (state := self.job(job)).over:
            if time.monotonic() > limit:
                raise ClusterError(
                    f"job {job} is still {state.state}, {STOP_SECONDS + 30} s after the request to stop it; see san logs"
                )
            time.sleep(0.5)
        return state

    @contextmanager
    def _asking(self, job: str = "") -> Iterator[None]:
        """Says in one sentence what went wrong between us and the server."""
        try:
            yield
        except AuthenticationError:
            raise refused(self.address) from None
        except requests.RequestException as error:
            raise UnreachableError(
                f"{self.address} does not answer ({type(error).__name__}); check the network and the head"
            ) from None
        except RuntimeError as error:  # any status but 200, with what the server said
            if "status code 404" in str(error):
                raise self._unknown(job) from None
            raise UnreachableError(f"{self.address}: {_line(str(error).strip().rpartition(chr(10))[2])}") from None

    def _unknown(self, job: str) -> ClusterError:
        return ClusterError(
            f"{self.address} has no job {job!r}; list its jobs with `san status` "
            "(a head node forgets its jobs when it restarts)"
        )


def _address_of_environment() -> str:
    """Raises ClusterError where it names none."""
    other = os.environ.get("RAY_ADDRESS", "")
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or (other if other.startswith("http") else "")
    if not address:
        raise ClusterError(
            "the address of the job server is missing; give --address http://head:8265 or set RAY_API_SERVER_ADDRESS"
        )
    return address


@contextmanager
def _insisting(address: str) -> Iterator[None]:
    """Ray's client prefers what the environment names to what it is told."""
    before = os.environ.get("RAY_API_SERVER_ADDRESS")
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_API_SERVER_ADDRESS"]
        else:
            os.environ["RAY_API_SERVER_ADDRESS"] = before


def _job(details: JobDetails) -> Job:
    code: Any = details.driver_exit_code
    return Job(
        id=str(details.submission_id),
        state=details.status.value.lower(),
        started=(details.start_time or 0) / 1000,
        ended=details.end_time / 1000 if details.end_time else None,
        # Ray's message holds the end of the log, which `log` tells.
        message=_line(details.message or "") if code in (None, 0) else f"the command exited with code {code}",
        exit_code=code,
    )


def _line(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], 300)
