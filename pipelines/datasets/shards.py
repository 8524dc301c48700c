"""Tar shards, which contain the images of a split in WebDataset's layout, and their index.

A shard contains pairs of files: `00000042.jpg`, the original image, and `00000042.cls`, the number of its class. The index
`<split>.index` in the same folder has the offset of each image, so that images can be read in any order.

    # shards 0f3a...                                           hash of all lines below
    # shard train-00000.tar <bytes> <sha256>
    train/cat/1.jpg<TAB>10342<TAB>0<TAB>512                    path in the original folder, bytes, shard, offset
"""

import glob
import hashlib
import os
import platform
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.datasets.manifest import encode, read_lines, write_whole
from pipelines.errors import DataError

REPAIR = "copy the shard again, or remove all shards of the split and their index, and pack again"
HEADER = "# shards "
SHARD = "# shard "
BLOCK = 512
"""Block size of tar files in bytes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A tar file, as described in the index."""

    name: str
    bytes: int
    sha256: str


class Index(NamedTuple):
    """The content of an index; all fields but `shards` have one entry per image."""

    shards: tuple[Shard, ...]
    paths: tuple[str, ...]
    sizes: "array[int]"
    """Bytes."""
    offsets: "array[int]"
    """Start of each image in bytes, as if all shards were one file."""


class Shards:
    """The shards of a split. Files are opened when they are first read, and stay open.

    Several threads can read at the same time. A memory map would avoid a copy, but if a mapped file became shorter, the kernel
    would kill the process.

    Raises:
        DataError: shards are missing or have a different size.
    """

    def __init__(self, folder: Path, shards: tuple[Shard, ...]) -> None:
        self._folder, self._shards = folder, shards
        self._ends = list(accumulate(shard.bytes for shard in shards))
        self._files: dict[int, FileIO] = {}
        self._require_sizes()

    def __reduce__(self) -> tuple[type["Shards"], tuple[Path, tuple[Shard, ...]]]:
        """Without the open files, which another process opens itself."""
        return Shards, (self._folder, self._shards)

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def find(self, offset: int) -> tuple[Path, int]:
        """The file at an offset of all shards, and the offset in this file."""
        number, within = self._place(offset)
        return self._folder / self._shards[number].name, within

    def prefetch(self, offset: int, size: int) -> None:
        """Prefetches bytes from the disk."""
        number, within = self._place(offset)
        os.posix_fadvise(self._file(number).fileno(), within, size, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Reads bytes.

        Raises:
            DataError: the shard cannot be read or is too short.
        """
        number, within = self._place(offset)
        file, content, done = self._file(number).fileno(), np.empty(size, np.uint8), 0
        while done < size:
            try:
                count = os.preadv(file, [content.data[done:]], within + done)
            except OSError as error:
                raise self._changed(self._shards[number], str(error.strerror)) from None
            if count == 0:
                raise self._changed(self._shards[number], f"only {os.fstat(file).st_size} bytes")
            done += count
        return content

    def member(self, offset: int) -> str:
        """Name in its tar file of the image at an offset."""
        header = self.read(offset - BLOCK, BLOCK)[:100].tobytes()
        return header.rstrip(b"\0").decode(errors="replace")

    def damaged(self, workers: int) -> Iterator[tuple[str, str | None]]:
        """The name of every shard, and an error message if its checksum differs from the index."""

        def wrong(shard: Shard) -> str | None:
            try:
                checksum = sha256_of(self._folder / shard.name)
            except OSError as error:
                return f"cannot read this shard ({error.strerror})"
            return None if checksum == shard.sha256 else f"checksum {checksum} instead of {shard.sha256}; {REPAIR}"

        pool = ThreadPoolExecutor(workers)
        try:
            yield from zip([shard.name for shard in self._shards], pool.map(wrong, self._shards), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, offset: int) -> tuple[int, int]:
        number = bisect_right(self._ends, offset)
        return number, offset - (self._ends[number] - self._shards[number].bytes)

    def _file(self, number: int) -> FileIO:
        file = self._files.get(number)
        if file is None:
            try:
                opened = FileIO(self._folder / self._shards[number].name)
            except OSError as error:
                raise self._changed(self._shards[number], str(error.strerror)) from None
            file = self._files.setdefault(number, opened)
            if file is not opened:  # Another thread opened it first.
                opened.close()
        return file

    def _require_sizes(self) -> None:
        for shard in self._shards:
            try:
                status = (self._folder / shard.name).stat()
            except OSError as error:
                problem = f"cannot read {shard.name} on node {platform.node()} ({error.strerror})"
                raise DataError(f"{self._folder}: {problem}; {REPAIR}") from None
            if status.st_size != shard.bytes:
                raise self._changed(shard, f"{status.st_size} bytes instead of {shard.bytes}")

    def _changed(self, shard: Shard, reason: str) -> DataError:
        return DataError(f"{self._folder}: {shard.name} has changed since it was packed ({reason}); {REPAIR}")


def index_path(folder: Path, split: str) -> Path:
    """Path of a split's index."""
    return folder / f"{split}.index"


def has_shards(folder: Path, split: str) -> bool:
    """Whether there are an index or shards of a split; `Dataset.open_shards` tells what is missing."""
    return index_path(folder, split).exists() or any(folder.glob(f"{glob.escape(split)}-{'[0-9]' * 5}.tar"))


def write_index(path: Path, shards: Sequence[Shard], rows: Sequence[tuple[str, int, int, int]]) -> None:
    """Writes an index with rows (path, bytes, number of the shard, offset in the shard). Raises DataError."""
    lines = [*(SHARD + " ".join(map(str, astuple(shard))) for shard in shards), *("\t".join(map(str, row)) for row in rows)]
    write_whole(path, [f"{HEADER}{_checksum(lines)}", *lines])


def read_index(path: Path) -> Index:
    """Raises DataError if the file cannot be read or was not written by `write_index`."""
    header, *lines = read_lines(path)
    damaged = DataError(f"{path}: this index is damaged or was edited by hand; copy the index again, or pack the images again")
    if header != f"{HEADER}{_checksum(lines)}":
        raise damaged
    try:
        fields = [line.removeprefix(SHARD).rsplit(" ", 2) for line in lines if line.startswith(SHARD)]
        shards = tuple(Shard(name, int(size), sha256) for name, size, sha256 in fields)
        rows = [line.rsplit("\t", 3) for line in lines[len(shards) :]]
        places_N3 = np.array([[int(number) for number in place] for _, *place in rows], np.int64).reshape(-1, 3)
        sizes_N, shard_N, offset_N = places_N3.T
        starts = np.cumsum([0, *(shard.bytes for shard in shards)])
        offsets_N = starts[shard_N] + offset_N
        # Checked although the checksum is right, because an index from another source must not name other files.
        if (
            any("/" in shard.name for shard in shards)
            or (places_N3 < 0).any()
            or (offsets_N + sizes_N > starts[shard_N + 1]).any()
        ):
            raise damaged
    except (ValueError, IndexError, OverflowError):
        raise damaged from None
    return Index(shards, tuple(image for image, *_ in rows), array("q", sizes_N.tobytes()), array("q", offsets_N.tobytes()))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as 64 hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(lines: Sequence[str]) -> str:
    return hashlib.sha256(encode("\n".join(lines))).hexdigest()[:16]
