"""Errors that the command line prints as a message without a traceback, with exit code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Invalid input. Each line of the message describes one problem and what was expected."""


class MachineError(UserError):
    """A machine cannot run this grid, so no other trial should start there."""


class UnavailableError(UserError):
    """A bucket or a tracking server is temporarily unavailable; retrying may help."""
