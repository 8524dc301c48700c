"""Errors of the tracker."""

from __future__ import annotations

from experiments.errors import UserError


class TrackerError(UserError):
    """The tracker cannot be used, now or as it is addressed."""
