"""File lists: which images a split has and how large they are, so that nobody asks the disk for that again.

    # digest 0f3a...            names all rows below
    train/cat/1.jpg<TAB>10342   path in the data folder, bytes

A list leaves out what cannot be decoded (`san data check`) or parts the images of a folder (`san data split`).
"""

import hashlib
import operator
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import DataError

HEADER = "# digest "

Indices = NDArray[np.int64]


class Paths(Sequence[str]):
    """Paths as one block of bytes: a million `str` take twice the memory, and a second on their way to another process."""

    def __init__(self, text: bytes, begins: Indices, ends: Indices) -> None:
        self._text, self._begins, self._ends = text, begins, ends

    @classmethod
    def of(cls, paths: Iterable[str]) -> "Paths":
        """The same paths in this form."""
        encoded = [encode(path) for path in paths]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = lengths.cumsum()
        return cls(b"".join(encoded), ends - lengths, ends)

    def take(self, indices: Indices) -> "Paths":
        """The paths at these places."""
        return Paths(self._text, self._begins[indices], self._ends[indices])

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, key: int) -> str: ...
    @overload
    def __getitem__(self, key: slice) -> "Paths": ...
    def __getitem__(self, key: int | slice) -> "str | Paths":
        if isinstance(key, slice):
            return Paths(self._text, self._begins[key], self._ends[key])
        return decode(self._text[self._begins[key] : self._ends[key]])

    def __iter__(self) -> Iterator[str]:
        return map(decode, self.encoded())

    def encoded(self) -> Iterator[bytes]:
        """The paths as bytes, which is faster."""
        text = self._text
        return (text[begin:end] for begin, end in zip(self._begins.tolist(), self._ends.tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))


class Rows(NamedTuple):
    """What a list tells, an entry of each per image."""

    paths: Paths
    sizes: "array[int]"
    """Bytes."""


def list_path(folder: Path, split: str) -> Path:
    """Where the list of a split is."""
    return folder / f"{split}.txt"


def digest(paths: Iterable[str], sizes: Iterable[int]) -> str:
    """16 hexadecimal digits over names and sizes."""
    encoded = paths.encoded() if isinstance(paths, Paths) else map(encode, paths)
    text = b"".join([b"%b\0%d\n" % row for row in zip(encoded, sizes, strict=True)])
    return hashlib.sha256(text).hexdigest()[:16]


def require_listable(paths: Iterable[str]) -> None:
    """Raises `DataError` where a row cannot hold a name; the sentence tells the name."""
    for path in paths:
        if "\n" in path:
            raise DataError(
                f"{path!r}: this file name contains a line break, which image lists cannot store; "
                "rename the file, or leave it out with `san data check`"
            )


def require_writable(path: Path) -> None:
    """Raises `DataError` where a list cannot be written, as long before that as one likes; makes its folder."""
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
    header, _, rows = read_bytes(path).partition(b"\n")
    if not header.startswith(encode(HEADER)):
        raise DataError(
            f"{path}: not an image list; expected a digest in the first line, written by `san data check` or "
            "`san data split`; move the file away, or keep lists in another folder (set --lists or data.lists)"
        )
    text = np.frombuffer(rows, np.uint8)
    tabs, ends = np.flatnonzero(text == ord("\t")), np.flatnonzero(text == ord("\n"))
    begins = np.concatenate([[0], ends[:-1] + 1])
    whole = rows.endswith(b"\n") and len(tabs) > 0
    middles = tabs[np.searchsorted(tabs, ends) - 1] if whole else begins  # the last tab of each row
    hashed = text.copy()  # as `digest` writes rows
    if whole:
        hashed[middles] = 0
    if not whole or (middles < begins).any() or header != encode(HEADER + hashlib.sha256(hashed.data).hexdigest()[:16]):
        raise DataError(
            f"{path}: damaged or edited by hand, because the digest does not match the rows; "
            "regenerate the list with `san data check` or `san data split`"
        )
    places = zip(middles.tolist(), ends.tolist(), strict=True)
    sizes = [rows[middle + 1 : end] for middle, end in places]
    if not all(map(bytes.isdigit, sizes)):
        wrong = next(row for row, size in enumerate(sizes) if not size.isdigit())
        raise DataError(
            f"{path}: row {decode(rows[begins[wrong] : ends[wrong]])!r} must end with a size in bytes; "
            "regenerate the list with `san data check` or `san data split`"
        )
    return Rows(Paths(rows, begins, middles), array("q", map(int, sizes)))


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
        raise DataError(f"{path}: cannot write this file ({error.strerror}); free some space or use another folder") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def read_lines(path: Path) -> list[str]:
    """The lines of a file that `write_whole` wrote, or some part of them; at least one.

    Raises:
        DataError: the file cannot be read.
    """
    return decode(read_bytes(path)).removesuffix("\n").split("\n")


def read_bytes(path: Path) -> bytes:
    """What a file holds. Raises `DataError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read this file ({error.strerror}); make the file readable or remove it") from None


def encode(text: str) -> bytes:
    """As in file names: what is not UTF-8 there comes back as it was."""
    return text.encode(errors="surrogateescape")


def decode(content: bytes) -> str:
    """The reverse of `encode`."""
    return content.decode(errors="surrogateescape")
