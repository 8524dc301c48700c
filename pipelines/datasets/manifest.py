"""Image lists, which store the paths and sizes of a split's images so that the folder need not be scanned again.

    # digest 0f3a...            hash of all rows below
    train/cat/1.jpg<TAB>10342   path in the data folder, bytes

Lists exclude images that cannot be decoded (`san data check`).
"""

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pipelines.errors import DataError

HEADER = "# digest "


def list_path(folder: Path, split: str) -> Path:
    """Path of a split's list."""
    return folder / f"{split}.txt"


def digest(paths: Iterable[str], sizes: Iterable[int]) -> str:
    """16 hexadecimal digits of a hash of names and sizes."""
    text = b"".join([b"%b\0%d\n" % (encode(path), size) for path, size in zip(paths, sizes, strict=True)])
    return hashlib.sha256(text).hexdigest()[:16]


def require_writable(path: Path) -> None:
    """Creates the folder of a list. Raises DataError if the list could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent}: cannot create this folder ({error.strerror}); use another folder for lists") from None
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"{path.parent}: cannot write to this folder; use another folder for lists")
    if path.exists() and not read_lines(path)[0].startswith(HEADER):
        raise DataError(
            f"{path}: already exists and is not an image list; keep lists in another folder (set --lists or data.lists)"
        )


def write_list(path: Path, paths: Sequence[str], sizes: Sequence[int]) -> None:
    """Writes a list completely or not at all. An existing list is replaced.

    Raises:
        DataError: a name contains a line break, the file cannot be written, or another kind of file exists.
    """
    require_writable(path)
    write_whole(path, [f"{HEADER}{digest(paths, sizes)}", *(f"{row}\t{size}" for row, size in zip(paths, sizes, strict=True))])


def read_list(path: Path) -> tuple[tuple[str, ...], "array[int]"]:
    """Reads a list: a path and a number of bytes per image.

    Raises:
        DataError: the file cannot be read or was not written by `write_list`.
    """
    header, *lines = read_lines(path)
    if not header.startswith(HEADER):
        raise DataError(
            f"{path}: not an image list; expected a digest in the first line, written by `san data check`; move the file away, "
            "or keep lists in another folder (set --lists or data.lists)"
        )
    rows = [line.rpartition("\t") for line in lines]
    if rows and all(size.isascii() and size.isdigit() for _, _, size in rows):
        paths, sizes = tuple(name for name, _, _ in rows), array("q", (int(size) for _, _, size in rows))
        if header == HEADER + digest(paths, sizes):
            return paths, sizes
    raise DataError(
        f"{path}: damaged or edited by hand, because the digest does not match the rows; "
        "regenerate the list with `san data check`"
    )


def require_one_line(names: Iterable[str]) -> None:
    """Raises DataError for a name that a list cannot contain."""
    if broken := next((name for name in names if "\n" in name), None):
        raise DataError(f"{broken!r}: contains a line break; rename this file or folder")


def write_whole(path: Path, lines: Sequence[str]) -> None:
    """Writes a temporary file and renames it once it is on the disk.

    Raises:
        DataError: the name of an image contains a line break, or the file cannot be written.
    """
    require_one_line(lines)
    text = "\n".join([*lines, ""])
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            file.write(encode(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise DataError(f"{path}: cannot write this file ({error.strerror}); free some space or use another folder") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def read_lines(path: Path) -> list[str]:
    """The lines of a file of `write_whole`, which may be incomplete; at least one.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: cannot read this file ({error.strerror}); make the file readable or remove it") from None
    return text.removesuffix("\n").split("\n")


def encode(text: str) -> bytes:
    """Encodes text so that file names that are not UTF-8 stay the same."""
    return text.encode(errors="surrogateescape")
