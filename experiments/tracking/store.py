"""A store of runs: its address, and what goes wrong with it, as sentences."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from experiments.errors import UserError

PAGE = 1000  # runs, experiments or versions that one call asks for
PATIENCE = 120.0  # seconds that the end of a trial, or of a grid, waits for a tracker that is away
PAUSE = 2.0  # seconds before a tracker that is away is asked again
UNUSABLE = (MlflowException, SQLAlchemyError, OSError)  # what comes of a tracker that is away or refuses


def require_no_secret(uri: str) -> None:
    """An address is printed, kept with runs and handed to other processes, so it must hold no password.

    Raises:
        UserError: it does; the text shows no more of the address than its kind, for a password may hold an @ or a ? too.
    """
    scheme, _, rest = uri.partition("://")
    if scheme in ("sqlite", "file"):
        return
    server = scheme in ("http", "https")
    if not re.search("@" if server else "^[^@]*:[^@]*@|passw(or)?d=", rest):
        return
    way = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    raise UserError(
        f"MLFLOW_TRACKING_URI={scheme}://...: an address must not hold a user's password, for it is printed and kept; leave it "
        f"out and give {way if server else 'it as the database wants it, such as PGPASSWORD or ~/.pgpass'}"
    )


class TrackerError(UserError):
    """The tracker cannot be used, now or as it is addressed."""


def pages(search: Callable[..., Any], *what: object) -> list[Any]:
    """Everything that a search of MLflow's client finds, which answers in pages."""
    page = search(*what, max_results=PAGE)
    found = list(page)
    while page.token:
        page = search(*what, max_results=PAGE, page_token=page.token)
        found += page
    return found


@contextmanager
def usable(uri: str) -> Iterator[None]:
    """Turns what MLflow and its database say of a store that cannot be used into one sentence."""
    try:
        yield
    except UNUSABLE as error:
        code = getattr(error, "error_code", None)
        if code == "UNAUTHENTICATED":
            raise TrackerError(
                f"MLflow at {uri} does not take this user and password; check MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from None
        if code == "PERMISSION_DENIED":
            user = os.environ.get("MLFLOW_TRACKING_USERNAME", "this user")
            raise TrackerError(
                f"MLflow at {uri} does not let {user} do this; ask whoever runs it for the right to edit"
            ) from None
        reason = str(error).splitlines()[0][:200]
        raise TrackerError(f"MLflow at {uri} cannot be used: {reason}; check MLFLOW_TRACKING_URI and --runs") from None
