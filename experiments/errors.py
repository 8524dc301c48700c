"""Errors that the command line prints as a message without a traceback, with exit code 2.

A trial that raises `UserError` is not retried, because it would raise it again; one that raises `UnavailableError` is.
"""

from __future__ import annotations


class UserError(ValueError):
    """Invalid input. Each line of the message describes one problem and what was expected."""


class MachineError(UserError):
    """A machine cannot run this grid, so no other trial should start there."""


class UnavailableError(Exception):
    """A bucket, a disk or a tracking server cannot be used now; trying again may help."""
