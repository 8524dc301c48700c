"""Tar shards: the images of a split in a few large files, in WebDataset's layout, and the index that finds each image in them.

A shard holds `00000042.jpg`, the image file as it was, and `00000042.cls`, its class as a number, one pair after another. The
index `<split>.index` lies beside the shards; images are read where it says, so any order costs the same.

    # shards 0f3a...                                           names all lines below
    # shard train-00000.tar <bytes> <sha256> <contents>
    train/cat/1.jpg<TAB>10342<TAB>0<TAB>512                    path in the folder that was packed, bytes, shard, offset in it
"""

import errno
import hashlib
import os
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

from pipelines.datasets.manifest import Paths, encode, is_number, read_lines, write_whole
from pipelines.errors import DataError, spelled

HEADER = "# shards "
SHARD = "# shard "
BLOCK = 512
"""Bytes; everything in a tar file begins at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar file, as it must be."""

    name: str
    bytes: int
    sha256: str
    contents: str
    """16 hexadecimal digits over numbers, names, sizes and classes of its images: what it was made from."""


class Index(NamedTuple):
    """What an index tells; all but `shards` has an entry per image."""

    shards: tuple[Shard, ...]
    paths: Paths
    sizes: "array[int]"
    """Bytes."""
    offsets: "array[int]"
    """Where the images begin, bytes, as if all shards were one file."""


class Shards:
    """The shards of a split; a file is opened when it is first read, and stays so as long as this lives.

    Any number of threads may read. A memory map would spare a copy, but where a file under it is cut off, the system kills the
    process.

    Raises:
        DataError: shards are missing or have another size; the sentence names them.
    """

    def __init__(self, folder: Path, shards: tuple[Shard, ...]) -> None:
        self._folder, self._shards = folder, shards
        self._ends = list(accumulate(shard.bytes for shard in shards))
        self._files: dict[int, FileIO] = {}
        self._require_sizes()

    def __reduce__(self) -> tuple[type["Shards"], tuple[Path, tuple[Shard, ...]]]:
        """Another process opens the files itself."""
        return Shards, (self._folder, self._shards)

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def find(self, offset: int) -> tuple[Path, int]:
        """The file that holds this place of the whole, and the offset in that file."""
        number, within = self._place(offset)
        return self._folder / self._shards[number].name, within

    def announce(self, offset: int, size: int) -> None:
        """These bytes will be read soon: the disk is told to bring them."""
        number, within = self._place(offset)
        os.posix_fadvise(self._file(number).fileno(), within, size, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """These bytes.

        Raises:
            DataError: the shard cannot be read, or has become too short.
        """
        number, within = self._place(offset)
        file, content, done = self._file(number).fileno(), np.empty(size, np.uint8), 0
        while done < size:
            try:
                count = os.preadv(file, [content.data[done:]], within + done)
            except OSError as error:
                raise self._unreadable(number, error) from None
            if count == 0:
                raise self._wrong([f"{self._shards[number].name} ({_lengths(os.fstat(file), self._shards[number])})"])
            done += count
        return content

    def member(self, offset: int) -> str:
        """The name in its tar file of the image that begins there."""
        header = self.read(offset - BLOCK, BLOCK)[:100].tobytes()
        return header.rstrip(b"\0").decode(errors="replace")

    def damaged(self, workers: int) -> Iterator[tuple[str, str | None]]:
        """Every shard's name, and what is wrong with it where its checksum is not the one of the index."""

        def wrong(shard: Shard) -> str | None:
            try:
                found = sha256_of(self._folder / shard.name)
            except OSError as error:
                return f"cannot read this shard ({error.strerror})"
            return (
                None if found == shard.sha256 else f"checksum {found} instead of {shard.sha256}; copy or pack the shard again"
            )

        pool = ThreadPoolExecutor(workers)
        try:
            yield from zip([shard.name for shard in self._shards], pool.map(wrong, self._shards), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, offset: int) -> tuple[int, int]:
        number = bisect_right(self._ends, offset)
        return number, offset - (self._ends[number] - self._shards[number].bytes)

    def _file(self, number: int) -> FileIO:
        found = self._files.get(number)
        if found is None:
            try:
                opened = FileIO(self._folder / self._shards[number].name)
            except OSError as error:
                raise self._unreadable(number, error) from None
            found = self._files.setdefault(number, opened)
            if found is not opened:  # Another thread was faster.
                opened.close()
        return found

    def _unreadable(self, number: int, error: OSError) -> DataError:
        path = self._folder / self._shards[number].name
        if error.errno == errno.EMFILE:
            return DataError(
                f"{path}: cannot open this shard ({error.strerror}); "
                "raise the limit on open files (ulimit -n), or pack with a larger --shard-size"
            )
        return self._wrong([f"{path.name} ({error.strerror})"])

    def _require_sizes(self) -> None:
        wrong = []
        for shard in self._shards:
            try:
                found = (self._folder / shard.name).stat()
            except OSError as error:
                wrong.append(f"{shard.name} ({error.strerror})")
            else:
                wrong += [f"{shard.name} ({_lengths(found, shard)})"] if found.st_size != shard.bytes else []
        if wrong:
            raise self._wrong(wrong)

    def _wrong(self, shards: list[str]) -> DataError:
        return DataError(
            f"{self._folder}: shards changed since they were packed: {spelled(shards)}; copy or pack these shards again"
        )


def _lengths(found: os.stat_result, shard: Shard) -> str:
    return f"{found.st_size} bytes instead of {shard.bytes}"


def index_path(folder: Path, split: str) -> Path:
    """Where the index of a split is."""
    return folder / f"{split}.index"


def write_index(path: Path, shards: Sequence[Shard], rows: Sequence[tuple[str, int, int, int]]) -> None:
    """Writes an index; rows are (path, bytes, number of the shard, offset in it). Raises `DataError` where it cannot."""
    lines = [*map(shard_line, shards), *("\t".join(map(str, row)) for row in rows)]
    write_whole(path, [f"{HEADER}{_checksum(lines)}", *lines])


def read_index(path: Path) -> Index:
    """Raises `DataError` where the file cannot be read or is no index that `write_index` wrote."""
    header, *lines = read_lines(path)
    if header != f"{HEADER}{_checksum(lines)}":
        raise DataError(f"{path}: this index is damaged or was edited by hand; copy the index again, or pack the images again")
    shards = tuple(shards_in(lines))
    starts = [0, *accumulate(shard.bytes for shard in shards)]
    paths, sizes, offsets = [], array("q"), array("q")
    for line in lines[len(shards) :]:
        image, *place = line.rsplit("\t", 3)
        if len(place) < 3 or not all(map(is_number, place)) or not _is_in(shards, *map(int, place)):
            raise DataError(
                f"{path}: row {line!r} of this index does not point into its shards; copy the index again, or pack the "
                "images again"
            )
        size, number, offset = map(int, place)
        paths.append(image)
        sizes.append(size)
        offsets.append(starts[number] + offset)
    return Index(shards, Paths.of(paths), sizes, offsets)


def shard_line(shard: Shard) -> str:
    """How an index names a shard."""
    return SHARD + " ".join(map(str, astuple(shard)))


def shards_in(lines: Sequence[str]) -> Iterator[Shard]:
    """The shards that lines of an index name; other lines, and one that was cut off, are passed over."""
    for line in lines:
        parts = line.removeprefix(SHARD).rsplit(" ", 3)
        if line.startswith(SHARD) and len(parts) == 4 and len(parts[3]) == 16 and is_number(parts[1]):
            yield Shard(parts[0], int(parts[1]), parts[2], parts[3])


def sha256_of(path: Path) -> str:
    """64 hexadecimal digits over a file's bytes. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_in(shards: Sequence[Shard], size: int, number: int, offset: int) -> bool:
    return number < len(shards) and BLOCK <= offset and offset + size <= shards[number].bytes


def _checksum(lines: Sequence[str]) -> str:
    return hashlib.sha256(encode("\n".join(lines))).hexdigest()[:16]
