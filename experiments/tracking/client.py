"""Reads an MLflow store page by page and turns its errors into clear messages."""

from __future__ import annotations

import glob
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from experiments.runs.workspace import has_runs, local_database
from experiments.tracking import TrackerError

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
        if not has_runs(uri) and "?" not in uri:
            _create_database(uri)
        return MlflowClient(tracking_uri=uri)


def _create_database(uri: str) -> None:
    """Creates a database under another name first: MLflow cannot use one whose creation was interrupted, nor repair it."""
    mark = f".{secrets.token_hex(4)}"
    path, new = local_database(uri), local_database(uri + mark)
    assert path is not None and new is not None, "has_runs: only the file of a local database can be missing"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        MlflowClient(tracking_uri=uri + mark)
        with suppress(OSError):  # another process was faster, or there are no hard links: then MLflow creates it in place
            os.link(new, path)
    finally:
        for file in path.parent.glob(f"{glob.escape(new.name)}*"):  # also its journal
            file.unlink(missing_ok=True)


def pages(search: Callable[..., Any], *what: object) -> list[Any]:
    """All results of a search method of MLflow's client, which returns them in pages."""
    page = search(*what, max_results=PAGE)
    items = list(page)
    while page.token:
        page = search(*what, max_results=PAGE, page_token=page.token)
        items += page
    return items


def ended_or_begun(run: Run) -> int:
    """Milliseconds since 1970. MLflow keeps the end of a run that continues."""
    return run.info.start_time if run.info.status == "RUNNING" else run.info.end_time or run.info.start_time


_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Columns of MLflow's database that contain the path of an artifact."""


def follow_moved_folder(uri: str, artifacts: Path) -> None:
    """Replaces the paths of artifacts in a local database if its folder has been moved, so that MLflow finds and writes them in
    `artifacts`. MLflow has no function for this; it stores absolute paths."""
    if local_database(uri) != artifacts.parent / "mlflow.db":  # a server, or a shared database
        return
    here = artifacts.as_uri()
    ours = (
        "SELECT DISTINCT artifact_location FROM experiments JOIN runs USING (experiment_id) JOIN tags USING (run_uuid) "
        "WHERE tags.key = 'san.role' AND artifact_location <> :here"
    )
    engine = create_engine(uri)
    try:
        with usable(uri), engine.begin() as database:
            for (before,) in database.execute(text(ours), {"here": here}).all():
                for table, column in _PLACES:
                    changed = f"UPDATE {table} SET {column} = :here || substr({column}, :length + 1)"
                    where = f"WHERE {column} = :before OR substr({column}, 1, :length + 1) = :before || '/'"
                    values = {"here": here, "before": before, "length": len(before)}
                    database.execute(text(f"{changed} {where}"), values)
    finally:
        engine.dispose()


@contextmanager
def usable(uri: str) -> Iterator[None]:
    """Turns errors of MLflow and its database into a `TrackerError`, and says on stderr what takes long."""
    waiting = f"waiting for MLflow at {uri}"
    notice = threading.Timer(SECONDS_TO_NOTICE, print, (waiting,), {"file": sys.stderr, "flush": True})
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
        # SQLAlchemy may put a remark for programmers first.
        lines = [line for line in str(error).splitlines() if not line.startswith("(raised as a result of")]
        reason = (lines or [type(error).__name__])[0][:200]
        raise TrackerError(f"cannot use MLflow at {uri}: {reason}; check MLFLOW_TRACKING_URI and --runs") from None
    finally:
        notice.cancel()
