"""Errors with messages for users."""

from collections.abc import Iterable, Mapping

NAMED_AT_MOST = 10
"""Maximum number of names in a message; the rest are counted."""


class DataError(ValueError):
    """Data or data settings cannot be used. The message says what to do."""


class TransformError(DataError):
    """Invalid fields of the image transform, each with a message."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__(fields)  # so that the exception can be pickled
        self.fields = fields

    def __str__(self) -> str:
        return f"invalid image transform: {'; '.join(f'{name} {what}' for name, what in self.fields.items())}"


def join_names(names: Iterable[str]) -> str:
    """Sorted names for a message."""
    listed = sorted(names)
    more = len(listed) - NAMED_AT_MOST
    return ", ".join(listed[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
