"""A store of runs: asked page by page, and what goes wrong with it, as sentences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from experiments.tracking.errors import TrackerError

PAGE = 1000  # runs, experiments or versions that one call asks for
UNUSABLE = (MlflowException, SQLAlchemyError, OSError)  # what comes of a tracker that is away or refuses


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
                f"MLflow at {uri} rejected the user name and password; check MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from None
        if code == "PERMISSION_DENIED":
            user = os.environ.get("MLFLOW_TRACKING_USERNAME", "this user")
            raise TrackerError(
                f"MLflow at {uri} does not allow {user} to do this; ask its administrator for permission to edit"
            ) from None
        reason = str(error).splitlines()[0][:200]
        raise TrackerError(f"cannot use MLflow at {uri}: {reason}; check MLFLOW_TRACKING_URI and --runs") from None
