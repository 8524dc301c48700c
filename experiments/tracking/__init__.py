"""MLflow: stores runs and finds them again. Only this folder imports mlflow.

This file, which has the result of a trial and the error if it cannot be read, does not, because the import takes one or
two seconds. Import `tracker`, `listing` or `registry` when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.errors import UnavailableError

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# MLflow's client would retry for minutes, and would repeat a request that succeeded but whose response was lost. Our callers
# retry instead, after asking what has arrived.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

__all__ = ["Result", "TrackerError"]


class TrackerError(UnavailableError):
    """The tracker cannot be used, now or as it is addressed."""


@dataclass(frozen=True, slots=True)
class Result:
    """A trial's MLflow run."""

    run_id: str
    finished: bool
    metrics: Mapping[str, float]
    seconds: float = 0.0
    """From the start of the run to its end."""
    ended: float = 0.0
    """End of the run in seconds since 1970, or its start if it has not ended."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Values of the config by dotted path, as text."""
    stopped_at: int | None = None
    """The epoch after which early stopping of this grid ended the trial."""
    tags: Mapping[str, str] = field(default_factory=dict)
    experiment_id: str = ""

    def epochs(self, wanted: int) -> int:
        """The trained epochs: fewer than `wanted` if `recipe.patience` has ended the trial."""
        return round(self.metrics.get("epoch", wanted))
