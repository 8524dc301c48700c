"""Errors of the tracker."""

from __future__ import annotations

from experiments.errors import UnavailableError


class TrackerError(UnavailableError):
    """The tracker cannot be used, now or as it is addressed."""
