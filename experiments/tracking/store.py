"""Reads an MLflow store page by page and turns its errors into clear messages."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from experiments.tracking.result import TrackerError

SECONDS_TO_NOTICE = 5.0
PAGE = 1000  # number of runs, experiments or versions per request
UNUSABLE = (MlflowException, SQLAlchemyError, OSError)  # raised if the store cannot be reached or rejects a request


def open_client(uri: str) -> MlflowClient:
    """MLflow's client, with fewer messages.

    Raises:
        TrackerError: the address is not that of a tracking store.
    """
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # `usable` raises a shorter message
    with usable(uri):
        return MlflowClient(tracking_uri=uri)


def pages(search: Callable[..., Any], *what: object) -> list[Any]:
    """All results of a search method of MLflow's client, which returns them in pages."""
    page = search(*what, max_results=PAGE)
    items = list(page)
    while page.token:
        page = search(*what, max_results=PAGE, page_token=page.token)
        items += page
    return items


@contextmanager
def usable(uri: str) -> Iterator[None]:
    """Turns errors of MLflow and its database into a `TrackerError`, and says on stderr what takes long."""
    text = f"waiting for MLflow at {uri}"
    notice = threading.Timer(SECONDS_TO_NOTICE, print, (text,), {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
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
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise TrackerError(f"cannot use MLflow at {uri}: {reason}; check MLFLOW_TRACKING_URI and --runs") from None
    finally:
        notice.cancel()
