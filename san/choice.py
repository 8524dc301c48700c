"""Chooses a row of a registry by name, with one clear error message if there is none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Row = TypeVar("Row")


class ModelError(ValueError):
    """A model cannot be built with these settings, or not for images of this size."""


class ChoiceError(ModelError):
    """The value of a field is not a name in its registry."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(field, sentence)  # both, so that the exception can be pickled
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


def choose(field: str, name: str, registry: Mapping[str, Row]) -> Row:
    """The row of that name.

    Raises:
        ChoiceError: unknown name; the message lists the names that exist.
    """
    if not isinstance(name, str) or name not in registry:
        near = difflib.get_close_matches(str(name), registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ChoiceError(field, f"unknown {field} {name!r}{hint} Choose from: {', '.join(registry)}")
    return registry[name]
