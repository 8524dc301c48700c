"""What is known of a trial that was tracked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Result:
    """A trial's run as the tracker knows it."""

    run_id: str
    finished: bool
    metrics: Mapping[str, float]
    seconds: float = 0.0
    """From the start of the run to its end."""
    ended: float = 0.0
    """When that was, in seconds since 1970; of a run that goes on, when it started."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Values of the config by dotted path, as text."""
    stopped_at: int | None = None
    """The epoch after which this grid's early stopping ended it."""
    tags: Mapping[str, str] = field(default_factory=dict)
    experiment_id: str = ""
