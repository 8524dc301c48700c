"""Submits jobs to a remote cluster through Ray's job server. Use `ray job` to list, follow and stop them."""

import asyncio
import logging
import os
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from cluster.errors import TOKEN_HINT, ClusterError

STOP_SECONDS = 60
"""Time in which a stopped job can end its trials and update MLflow, before Ray kills it. Ray's default is 3 s."""
SECONDS_TO_ANSWER = 30.0
STARTUP_SECONDS = 90.0
"""Seconds within which a new head must accept jobs; its dashboard responds earlier."""
NOT_READY = "No available agent"
"""Part of the error message of a head that does not accept jobs yet."""

# Otherwise Ray's client logs every package and every connection.
for noisy in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
    logging.getLogger(f"ray.{noisy}").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """How a job ended."""

    state: str
    """succeeded, failed or stopped."""
    message: str
    """One line."""
    exit_code: int | None
    """Exit code of its command; None if it did not start, or if the job was stopped."""


class JobServer:
    """The job server of a cluster's head, for example `http://head:8265`.

    Methods raise ClusterError if the server rejects a request or does not respond.
    """

    def __init__(self, address: str | None = None) -> None:
        """Connects to `address`, by default RAY_API_SERVER_ADDRESS or RAY_ADDRESS.

        Raises:
            ClusterError: the address is missing or wrong, or the server rejects the token.
        """
        self.address = (address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")).rstrip("/")
        if not self.address.startswith(("http://", "https://")):
            found = f"{self.address!r} is not the address of a job server" if self.address else "no address of a job server"
            raise ClusterError(f"{found}; give --address http://HOST:8265, or set RAY_API_SERVER_ADDRESS")
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # Ray's client prefers it to its argument
        with self._errors():
            requests.get(f"{self.address}/api/version", timeout=SECONDS_TO_ANSWER)  # Ray's client would wait without end
            try:
                self._client = JobSubmissionClient(self.address)
            except (KeyError, TypeError) as error:  # the answer was JSON, but not Ray's
                raise requests.JSONDecodeError(str(error), "", 0) from None

    def submit(self, job: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Uploads a folder, unless the cluster has it already, and runs a command in it on the head.

        The arguments are not expanded by a shell. The command and all processes that it starts get the environment.
        """
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **environment}
        limit = time.monotonic() + STARTUP_SECONDS
        while True:
            try:
                with self._errors():
                    self._client.submit_job(
                        entrypoint=shlex.join(command),
                        submission_id=job,
                        runtime_env={"working_dir": str(folder), "env_vars": variables},
                    )
                return
            except ClusterError as error:
                if NOT_READY not in str(error) or time.monotonic() > limit:
                    raise

    def follow(self, job: str, write: Callable[[str], None]) -> FinishedJob:
        """Writes a job's log until the job ends."""

        async def tail() -> None:
            pieces = self._client.tail_job_logs(job)
            while True:
                with self._errors():
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                write(piece)  # outside, because its errors are not the server's

        asyncio.run(tail())
        with self._errors():
            while not (details := self._client.get_job_info(job)).status.is_terminal():
                time.sleep(0.5)
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
            raise ClusterError(f"{self.address} rejected the token or requires one; {TOKEN_HINT}") from None
        except (aiohttp.ClientError, requests.RequestException, OSError) as error:
            raise ClusterError(
                f"{self.address} does not answer like a job server ({type(error).__name__}); check the address, the network "
                "and the head's dashboard"
            ) from None
        except RuntimeError as error:  # a response with an error status, or a closed connection
            raise ClusterError(f"{self.address}: {_line(str(error).strip().rpartition(chr(10))[2])}") from None


def _line(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], 300)
