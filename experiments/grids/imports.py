"""Files of the user that register relations and models. A trial carries their source, so that they exist on every node."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from experiments.errors import UserError
from experiments.grids.config import Strict


class SourceFile(Strict):
    """A Python file: its stem and its content."""

    name: str
    source: str


def import_files(paths: Iterable[str | Path]) -> tuple[SourceFile, ...]:
    """Imports files, which register what they define. A file that this process has imported already is not imported again.

    Raises:
        UserError: a file cannot be read, or raises an exception; the message names it.
    """
    files = []
    for path in map(Path, paths):
        try:
            file = SourceFile(name=path.stem, source=path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be imported ({error}); give the path of a Python file") from None
        _import(file, str(path.resolve()))
        files.append(file)
    return tuple(files)


def import_sources(files: Iterable[SourceFile]) -> None:
    """Imports files by their source, in the process of a worker."""
    for file in files:
        _import(file, None)


def _import(file: SourceFile, path: str | None) -> None:
    name = f"san_import_{hashlib.sha256(file.source.encode()).hexdigest()[:16]}_{file.name}"
    if name in sys.modules:
        return
    location = Path(path or Path(_folder().name, f"{name}.py"))
    if path is None:  # a file here, too: the key of a trial has a digest of it, and tracebacks show its lines
        location.write_text(file.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise UserError(f"{location}: cannot be imported; give the path of a Python file, which ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any: it is not our code
        del sys.modules[name]
        raise UserError(f"{location}: cannot be imported ({type(error).__name__}: {error})") from error


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="san-imports-")
