"""MLflow: where runs are kept and found again; the only folder that imports mlflow.

What is below does not, for that takes a second or two: whoever writes or reads runs imports `tracker`, `listing` or `registry`
when it does.
"""

from __future__ import annotations

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# MLflow's client would repeat for minutes, and a request that was carried out, but whose answer was lost, would be carried out
# twice. Whoever asks here asks again, after looking at what is there.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from experiments.tracking.errors import TrackerError
from experiments.tracking.result import Result

__all__ = ["Result", "TrackerError"]
