"""Mistakes of the user: shown as their text alone, with exit code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something asked for cannot be done; each line of the text is one mistake, with what was expected."""
