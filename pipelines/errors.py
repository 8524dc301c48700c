"""The one error of this package that is meant for the person who gave the data."""

from collections.abc import Iterable, Mapping

NAMED_AT_MOST = 10
"""Things spelled out in a sentence; the rest are counted."""


class DataError(ValueError):
    """Data or data settings that cannot be used; the message is a sentence that says what to do."""


class TransformError(DataError):
    """Fields of the image transform that cannot be, each with what is wrong with it."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__(fields)  # so that it can be sent between processes
        self.fields = fields

    def __str__(self) -> str:
        return f"invalid image transform: {'; '.join(f'{name} {what}' for name, what in self.fields.items())}"


def spelled(names: Iterable[str]) -> str:
    """Names as a part of such a sentence, sorted."""
    listed = sorted(names)
    more = len(listed) - NAMED_AT_MOST
    return ", ".join(listed[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
