"""Files of the user that register relations and models. A trial carries their source, so that they exist on every node."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from pathlib import Path

from experiments.errors import UserError


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A Python file: its stem and its content."""

    name: str
    source: str


def import_files(paths: Iterable[str | Path]) -> tuple[SourceFile, ...]:
    """Imports files, which register what they define, also if this process has imported them already.

    Raises:
        UserError: a file cannot be read, or raises an exception; the message names it.
    """
    files: list[SourceFile] = []
    for path in (Path(os.path.expanduser(name)) for name in paths):
        try:
            file = SourceFile(name=path.stem, source=path.read_bytes().decode("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be imported ({error}); give the path of a Python file") from None
        if file not in files:  # both in the grid and in an option
            _import(file, path.resolve())
            files.append(file)
    return tuple(files)


def import_sources(files: Iterable[SourceFile]) -> None:
    """Imports files by their source, in the process of a worker."""
    for file in files:
        _import(file, Path(f"{file.name}.py"))


class SourceLoader(ExecutionLoader):
    """Imports a file whose content is known, so that it need not be on this machine. Tracebacks show its lines."""

    def __init__(self, file: SourceFile, path: Path) -> None:
        self.source, self.path = file.source, path

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)


def _import(file: SourceFile, path: Path) -> None:
    name = f"san_import_{hashlib.sha256(file.source.encode()).hexdigest()[:16]}_{file.name}"
    loader = SourceLoader(file, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any: it is not our code
        del sys.modules[name]
        raise UserError(f"{path}: cannot be imported ({type(error).__name__}: {error})") from error
