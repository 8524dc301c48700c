"""Hashes the code of relations, mappings, positions and transformations that users add, because it affects results."""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import inspect
import linecache
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

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
"""The registries in which the value of a model's field is looked up."""
OURS = {
    "relation": {"summation", "subtraction", "concatenation", "hadamard", "dot", "star", "clique"},
    "mapping": {"L", "LRL", "LRLRL"},
    "position": {"none", "absolute", "relative"},
    "transformation": {"distinct", "phi_eq_psi", "phi_eq_psi_eq_beta"},
}
"""The rows of the paper. Tests compare them with the paper's definitions, so a key needs only their names."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types whose `repr` contains the whole value and is the same in every process."""


class UnknownCodeError(ValueError):
    """The code of a row cannot be read completely, so the key would not change with the code."""


def custom_code(spec: ModelSpec) -> dict[str, str]:
    """A digest of the code of each row that the model uses and that is not in the paper, by field; usually empty.

    It covers the source of the row's functions, including comments, and the constants and functions that they use, except those
    of installed packages and of `san.ops`.

    Raises:
        UnknownCodeError: the source cannot be read, or uses a value that cannot be hashed.
    """
    found = {}
    for field, registries in REGISTRIES.items():
        if (name := getattr(spec, field, None)) is None:
            continue
        rows = [registry[name] for registry in registries if name in registry]
        if name not in OURS[field] or any(map(_is_replaced, rows)):
            texts = [text for row in rows for text in _texts(row, set())]
            found[field] = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return found


def _is_replaced(row: Any) -> bool:
    """Whether a row with a name of the paper was replaced by other code."""
    parts = [getattr(row, field.name) for field in dataclasses.fields(row)] if dataclasses.is_dataclass(row) else []
    return any(callable(part) and not str(getattr(part, "__module__", "")).startswith("san.") for part in parts)


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Everything that determines the behavior of a value, as text that is the same in every process."""
    if isinstance(value, PLAIN):
        yield repr(value)
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, types.FunctionType | type):
            inner = [_name(value)] if _is_installed(value.__module__) else [_source(value), *_inside(value)]
        else:
            inner = next((parts for kind, parts in PARTS if isinstance(value, kind)), _object)(value)
        for part in inner:
            yield from _texts(part, seen)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


PARTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType, lambda value: [value.__qualname__]),
    (types.MethodType, lambda value: [value.__func__, value.__self__]),
    (functools.partial, lambda value: [value.func, value.args, value.keywords]),
    (torch.Tensor, lambda value: [value.dtype, value.tolist()]),
    (tuple | list, lambda value: [len(value), *value]),
    (dict, lambda value: [len(value), *(part for item in value.items() for part in item)]),
    (set | frozenset, lambda value: [len(value), *sorted("\0".join(_texts(part, set())) for part in value)]),
)
"""The parts of a value, by its type; never empty."""


def _inside(value: types.FunctionType | type) -> list[Any]:
    """The values that a function or a class uses."""
    if isinstance(value, type):
        functions = (part for part in vars(value).values() if isinstance(part, types.FunctionType))
        return [*value.__bases__, *(part for function in functions for part in _read(function))]
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return [*_read(value), *cells, value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None)]


def _object(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [type(value), *(getattr(value, field.name) for field in dataclasses.fields(value))]
    if hasattr(value, "__wrapped__"):  # such as a function with `functools.cache`
        return [value.__wrapped__]
    if not _is_installed(type(value).__module__):
        return [type(value), vars(value)]
    if " at 0x" in (text := repr(value)):
        raise UnknownCodeError(f"cannot hash {text}, which a registered operator uses; use functions and constants instead")
    return [text]  # such as an operator of torch


def _read(function: types.FunctionType) -> Iterator[Any]:
    """The globals that a function and its inner functions use, including attributes of modules."""
    codes = [function.__code__]
    while codes:
        code = codes.pop(0)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        if any(step.opname == "IMPORT_NAME" and not _is_installed(step.argval) for step in dis.get_instructions(code)):
            raise UnknownCodeError(
                f"cannot hash {function.__qualname__}, which imports a module when it runs; "
                "import the module at the top of the file"
            )
        spaces = [function.__globals__]
        for name in code.co_names:
            found = [space[name] for space in spaces if name in space]
            yield from (value for value in found if not isinstance(value, types.ModuleType))
            spaces += [
                vars(value) for value in found if isinstance(value, types.ModuleType) and not _is_installed(value.__name__)
            ]


def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python, an installed package or `san.ops`, whose source is not hashed."""
    name = module or ""
    if name == "san.ops" or name.startswith("san.ops.") or name.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return (
        name != "__main__"
        and any(file.startswith(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
        and not name.startswith("san.")
    )


def _source(value: Any) -> str:
    try:
        if isinstance(value, types.FunctionType) and not linecache.getlines(value.__code__.co_filename):
            raise OSError  # `inspect` would look in the file of `__main__`
        return inspect.getsource(value)
    except (OSError, TypeError):
        raise UnknownCodeError(
            f"cannot read the source of {value.__qualname__}, which is part of the cell's key; "
            "define this function or class in a file"
        ) from None
