"""Checks of settings: names of rows in a registry, and positive integers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
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
        raise ChoiceError(field, f"unknown {field} {name!r}; {choices('choose from', name, registry)}")
    return registry[name]


def choices(what: str, name: object, known: Iterable[str]) -> str:
    """The end of the error message for an unknown name: all known names, and the most similar one."""
    names = f"{what}: {', '.join(known := list(known))}"
    near = similar(name, known)
    return f"did you mean `{near}`? {names[0].upper()}{names[1:]}" if near else names


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_counts(**numbers: object) -> None:
    """Raises ModelError unless all numbers are positive integers."""
    for name, number in numbers.items():
        if not is_integer(number) or number < 1:  # type: ignore[operator]
            raise ModelError(f"{name} must be an integer of at least 1, not {number!r}")


def similar(name: object, known: Iterable[str]) -> str | None:
    """The most similar known name; None if none is similar."""
    return next(iter(difflib.get_close_matches(str(name), known, n=1)), None)
