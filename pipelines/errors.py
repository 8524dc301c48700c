"""The one error of this package that is meant for the person who gave the data."""

from collections.abc import Iterable

NAMED_AT_MOST = 10
"""Things spelled out in a sentence; the rest are counted."""


class DataError(ValueError):
    """Data or data settings that cannot be used; the message is a sentence that says what to do."""


def spelled(names: Iterable[str]) -> str:
    """Names as a part of such a sentence, sorted."""
    listed = sorted(names)
    more = len(listed) - NAMED_AT_MOST
    return ", ".join(listed[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
