"""Image lists, which store the paths and sizes of a split's images so that the folder need not be scanned again.

    # digest 0f3a...            hash of all rows below
    train/cat/1.jpg<TAB>10342   path in the data folder, bytes

Lists exclude images that cannot be decoded (`san data check`) or split the images of a folder (`san data split`).
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
    """Paths in one block of bytes. A million `str` objects need twice the memory and take a second to pickle."""

    def __init__(self, text: bytes, begins: Indices, ends: Indices) -> None:
        self._text, self._begins, self._ends = text, begins, ends

    @classmethod
    def of(cls, paths: Iterable[str]) -> "Paths":
        """Encodes paths."""
        encoded = [encode(path) for path in paths]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = lengths.cumsum()
        return cls(b"".join(encoded), ends - lengths, ends)

    def take(self, indices: Indices) -> "Paths":
        """The paths with these indices."""
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
        """The paths as bytes, which is faster than decoding them."""
        text = self._text
        return (text[begin:end] for begin, end in zip(self._begins.tolist(), self._ends.tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))


class Rows(NamedTuple):
    """The content of a list, with one entry per image."""

    paths: Paths
    sizes: "array[int]"
    """Bytes."""


def list_path(folder: Path, split: str) -> Path:
    """Path of a split's list."""
    return folder / f"{split}.txt"


def digest(paths: Iterable[str], sizes: Iterable[int]) -> str:
    """16 hexadecimal digits of a hash of names and sizes."""
    encoded = paths.encoded() if isinstance(paths, Paths) else map(encode, paths)
    text = b"".join([b"%b\0%d\n" % row for row in zip(encoded, sizes, strict=True)])
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


def read_list(path: Path) -> Rows:
    """Reads a list.

    Raises:
        DataError: the file cannot be read or was not written by `write_list`.
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
    hashed = text.copy()  # `digest` separates names and sizes with null bytes
    if whole:
        hashed[middles] = 0
    sizes = [rows[middle + 1 : end] for middle, end in zip(middles.tolist(), ends.tolist(), strict=True)] if whole else []
    right = header == encode(HEADER + hashlib.sha256(hashed.data).hexdigest()[:16])
    if not whole or (middles < begins).any() or not right or not all(map(bytes.isdigit, sizes)):
        raise DataError(
            f"{path}: damaged or edited by hand, because the digest does not match the rows; "
            "regenerate the list with `san data check` or `san data split`"
        )
    return Rows(Paths(rows, begins, middles), array("q", map(int, sizes)))


def write_whole(path: Path, lines: Sequence[str]) -> None:
    """Writes a temporary file and renames it once it is on the disk.

    Raises:
        DataError: the name of an image contains a line break, or the file cannot be written.
    """
    if broken := [line for line in lines if "\n" in line]:
        raise DataError(f"{broken[0]!r}: this file name contains a line break; rename the file")
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
    return decode(read_bytes(path)).removesuffix("\n").split("\n")


def read_bytes(path: Path) -> bytes:
    """Reads a file. Raises DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read this file ({error.strerror}); make the file readable or remove it") from None


def encode(text: str) -> bytes:
    """Encodes text so that file names that are not UTF-8 stay the same."""
    return text.encode(errors="surrogateescape")


def decode(content: bytes) -> str:
    """The reverse of `encode`."""
    return content.decode(errors="surrogateescape")
