"""MLflow: stores runs and finds them again. Only this folder imports mlflow.

This file does not, because the import takes one or two seconds. Import `tracker`, `listing` or `registry` when they are needed.
"""

from __future__ import annotations

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# MLflow's client would retry for minutes, and would repeat a request that succeeded but whose response was lost. Our callers
# retry instead, after checking which requests succeeded.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from experiments.tracking.result import Result, TrackerError

__all__ = ["Result", "TrackerError"]
