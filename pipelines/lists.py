"""File lists: which images a split has and how large they are, so that nobody asks the disk for that again.

    # digest 0f3a...            names all rows below
    train/cat/1.jpg<TAB>10342   path in the data folder, bytes

A list leaves out what cannot be decoded (`san data check`) or parts the images of a folder (`san data split`).
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipelines.errors import DataError

HEADER = "# digest "


class Rows(NamedTuple):
    """What a list tells, an entry of each per image."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes."""


def list_path(folder: Path, split: str) -> Path:
    """Where the list of a split is."""
    return folder / f"{split}.txt"


def digest(paths: Iterable[str], sizes: Iterable[int | str]) -> str:
    """16 hexadecimal digits over names and sizes."""
    text = "".join(f"{path}\0{size}\n" for path, size in zip(paths, sizes, strict=True))
    return hashlib.sha256(encode(text)).hexdigest()[:16]


def require_listable(paths: Iterable[str]) -> None:
    """Raises `DataError` where a row cannot hold a name; the sentence tells the name."""
    for path in paths:
        if "\n" in path:
            raise DataError(
                f"The image {path!r} has a line break in its name, which a list cannot hold: "
                "rename it, or leave it out with `san data check`."
            )


def require_writable(path: Path) -> None:
    """Raises `DataError` where a list cannot be written, as long before that as one likes; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent} cannot be made ({error.strerror}): give another folder of lists.") from None
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"{path.parent} cannot be written: give another folder of lists.")
    if path.exists() and not read_lines(path)[0].startswith(HEADER):
        raise DataError(f"{path} is there already and no list of images: keep lists in another folder (--lists, data.lists).")


def write_list(path: Path, paths: Sequence[str], sizes: Sequence[int]) -> None:
    """Writes a list; it appears whole or not at all, and replaces one that is there.

    Raises:
        DataError: a name holds a line break, the file cannot be written, or it is there and no list.
    """
    require_listable(paths)
    require_writable(path)
    write_whole(path, [f"{HEADER}{digest(paths, sizes)}", *(f"{row}\t{size}" for row, size in zip(paths, sizes, strict=True))])


def read_list(path: Path) -> Rows:
    """The rows of a list, in its order.

    Raises:
        DataError: the file cannot be read, or is no list that `write_list` wrote.
    """
    header, *lines = read_lines(path)
    if not header.startswith(HEADER):
        raise DataError(
            f"{path} is no list of images: expected a digest of the rows in its first line, as `san data check` and "
            "`san data split` write it; move it away, or keep lists in another folder (--lists, data.lists)."
        )
    # Twice over the lines: with parts of a million lines at hand at the same time it takes longer, and much memory.
    paths = tuple([line.rpartition("\t")[0] for line in lines])
    sizes = [line.rpartition("\t")[2] for line in lines]
    # Over the text as it is: a number with a blank behind it is a number too, but not what was written.
    if not paths or header != f"{HEADER}{digest(paths, sizes)}":
        raise DataError(
            f"{path} is damaged, or was changed by hand: its digest is not that of its rows; "
            "write it again with `san data check` or `san data split`."
        )
    if wrong := [line for line, size in zip(lines, sizes, strict=True) if not is_number(size)]:
        raise DataError(
            f"{path} has the row {wrong[0]!r}, but its last part must be a size in bytes: "
            "write it again with `san data check` or `san data split`."
        )
    return Rows(paths, tuple([int(size) for size in sizes]))


def is_number(text: str) -> bool:
    """Whether a row can hold this as a size or an offset: digits alone."""
    return text.isascii() and text.isdecimal()


def write_whole(path: Path, lines: Sequence[str]) -> None:
    """Writes lines under a name of their own and renames that when they are safe on the disk.

    Raises:
        DataError: the file cannot be written.
    """
    text = "\n".join([*lines, ""])
    assert text.count("\n") == len(lines), "names are looked at before"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            file.write(encode(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}): give another folder, or make room there.") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def read_lines(path: Path) -> list[str]:
    """The lines of a file that `write_whole` wrote, or some part of them; at least one.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return decode(path.read_bytes()).removesuffix("\n").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give a file that can, or remove it.") from None


def encode(text: str) -> bytes:
    """As in file names: what is not UTF-8 there comes back as it was."""
    return text.encode(errors="surrogateescape")


def decode(content: bytes) -> str:
    """The reverse of `encode`."""
    return content.decode(errors="surrogateescape")
