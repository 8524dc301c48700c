"""Errors with messages for users."""

from collections.abc import Iterable

NAMED_AT_MOST = 10
"""Maximum number of names in a message; the rest are counted."""


class DataError(ValueError):
    """Data or data settings cannot be used. The message says what to do."""


class DecodingError(RuntimeError):
    """DALI failed, but not because of a single image; another attempt may succeed. The message names the images."""


def join_names(names: Iterable[str]) -> str:
    """Sorted names for a message."""
    listed = sorted(names)
    more = len(listed) - NAMED_AT_MOST
    return ", ".join(listed[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
