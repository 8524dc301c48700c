"""Mistakes of the user: shown as their text alone, with exit code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something asked for cannot be done; each line of the text is one mistake, with what was expected."""


class MachineError(UserError):
    """A machine cannot do what was asked of it, so no other cell should be sent there."""


class UnavailableError(UserError):
    """A bucket or a tracking server cannot be used now; a later attempt may succeed."""
