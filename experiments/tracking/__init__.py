"""MLflow: where runs are kept and found again; the only folder that imports mlflow."""

from __future__ import annotations

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# MLflow's client would repeat for minutes, and a request that was carried out, but whose answer was lost, would be carried out
# twice. Whoever asks here asks again, after looking at what is there.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from experiments.tracking.listing import Listed, experiment_pages, list_runs, trial_key
from experiments.tracking.registry import register
from experiments.tracking.store import PATIENCE, PAUSE, UNUSABLE, TrackerError, require_no_secret
from experiments.tracking.tracker import NodeMonitor, Result, Tracker, TrialRun

__all__ = [
    "PATIENCE",
    "PAUSE",
    "UNUSABLE",
    "Listed",
    "NodeMonitor",
    "Result",
    "Tracker",
    "TrackerError",
    "TrialRun",
    "experiment_pages",
    "list_runs",
    "register",
    "require_no_secret",
    "trial_key",
]
