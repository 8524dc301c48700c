"""The code of relations, mappings, positions and transformations that users add decides results, so it is part of a key."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

from san.models import ModelSpec
from san.nn.attention import TRANSFORMATIONS
from san.nn.mapping import MAPPINGS
from san.nn.position import POSITIONS
from san.nn.relation import PAIRWISE, PATCHWISE

REGISTRIES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "relation": (PAIRWISE, PATCHWISE),
    "mapping": (MAPPINGS,),
    "position": (POSITIONS,),
    "transformation": (TRANSFORMATIONS,),
}
"""The registries that a field of a model's record names a row of."""
OURS = {
    "relation": {"summation", "subtraction", "concatenation", "hadamard", "dot", "star", "clique"},
    "mapping": {"L", "LRL", "LRLRL"},
    "position": {"none", "absolute", "relative"},
    "transformation": {"distinct", "phi_eq_psi", "phi_eq_psi_eq_beta"},
}
"""The rows of the paper. They are tested against its definitions, so a key needs only their names."""
LIBRARIES = ("torch", "numpy", "san.ops", "builtins")
"""What code calls there is taken as it is: its source is not part of a key."""


class NoSourceError(ValueError):
    """The source of a row's code cannot be read."""


def custom_code(spec: ModelSpec) -> dict[str, str]:
    """A digest of the source of each row that the model uses and the paper does not have, by field; usually empty.

    It covers the functions of the row, what they call outside torch, and the constants that they read, comments included.

    Raises:
        NoSourceError: the source cannot be read, for code that was not loaded from a file.
    """
    found = {}
    for field, registries in REGISTRIES.items():
        if (name := getattr(spec, field, None)) is None:
            continue
        rows = [registry[name] for registry in registries if name in registry]
        if name not in OURS[field] or any(map(_is_foreign, rows)):
            texts = sorted({text for row in rows for text in _texts(row, set())})
            found[field] = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return found


def _is_foreign(row: Any) -> bool:
    """Whether a row of the paper was replaced by another."""
    functions = [part for part in _parts(row) if isinstance(part, types.FunctionType)]
    return any(not str(function.__module__).startswith("san.") for function in functions)


def _parts(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value) if isinstance(value, tuple | list) else list(getattr(value, "__dict__", {}).items())


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """The source of all functions and classes in a value and of what they read, and the text of all else in it."""
    if id(value) in seen or isinstance(value, types.ModuleType):  # what is read of a module is found by its name
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType | type) and not str(value.__module__).startswith(LIBRARIES):
        yield _source(value)
        if isinstance(value, types.FunctionType):
            captured = [cell.cell_contents for cell in value.__closure__ or ()]
            for part in (*_read(value.__code__, value.__globals__), *captured, *(value.__defaults__ or ())):
                yield from _texts(part, seen)
    elif hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}"
    elif type(value).__module__.startswith(LIBRARIES) and not isinstance(value, tuple | list):
        yield repr(value)
    else:
        for part in (type(value), *_parts(value)):
            yield from _texts(part, seen)


def _read(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that code, and functions inside it, read."""
    yield from (names[name] for name in code.co_names if name in names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _read(constant, names)


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        raise NoSourceError(
            f"the source of {value.__qualname__} cannot be read, so its key could not change with the code; define it in a file"
        ) from None
