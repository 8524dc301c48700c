"""Hashes the files of models, relations, mappings, positions and transformations that users add: their code affects results."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.grids.imports import SourceLoader
from san.models import ModelSpec, ModuleSpec
from san.models.modules import TIMM
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
WITHOUT_CODE = {"none", "distinct", "phi_eq_psi", "phi_eq_psi_eq_beta"}
"""Rows of this package that have no functions, by which they could be told from others. Tests compare the package's rows with
the paper's definitions, so a key needs only their names."""


class UnknownCodeError(ValueError):
    """The file that defines a row cannot be found, so the key would not change with its code."""


def custom_code(spec: ModelSpec) -> dict[str, str]:
    """A digest of each row that the model uses and that is not of this package, by field; usually empty.

    The digest covers the whole files that define the functions of the row, and the values of a row without functions, but not
    what the files import.

    Raises:
        UnknownCodeError: a function was not defined in a file.
    """
    digests = {}
    for field, registries in REGISTRIES.items():
        name = str(getattr(spec, field, None))
        rows = [registry[name] for registry in registries if name in registry]
        functions = [function for row in rows for function in _functions(row)]
        is_ours = all(f.__module__.startswith("san.") for f in functions) if functions else name in WITHOUT_CODE
        if rows and not is_ours:
            digest = hashlib.sha256(b"" if functions else repr(rows).encode())
            for source in sorted({_source(function) for function in functions}):
                digest.update(source)
            digests[field] = digest.hexdigest()[:16]
    if isinstance(spec, ModuleSpec) and not spec.name.startswith(TIMM):
        digests["model"] = hashlib.sha256(_source(type(spec).function)).hexdigest()[:16]
    return digests


def _functions(part: Any) -> Iterator[Any]:
    """The functions and classes in a row of a registry."""
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from _functions(getattr(part, field.name))
    elif callable(part):
        function = inspect.unwrap(part.func if isinstance(part, functools.partial) else part)
        yield function if inspect.isroutine(function) or isinstance(function, type) else type(function)


def _source(function: Any) -> bytes:
    """Content of the file that defines a function."""
    loader = getattr(inspect.getmodule(function), "__loader__", None)
    if isinstance(loader, SourceLoader):
        return loader.source.encode()
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # written in C, or in a shell
        file = None
    if file is None or not Path(file).is_file():
        raise UnknownCodeError(
            f"cannot read the source of {function.__qualname__}, which is part of the trial's key; "
            "define this function or class in a file"
        )
    return Path(file).read_bytes()
