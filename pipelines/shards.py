"""Tar shards: the images of a split in a few large files, in WebDataset's layout, and the index that finds each image in them.

A shard holds `00000042.jpg`, the image file as it was, and `00000042.cls`, its class as a number, one pair after another. The
index `<split>.index` lies beside the shards; images are read through memory maps, so any order costs the same.

    # shards 0f3a...                                           names all lines below
    # shard train-00000.tar <bytes> <sha256> <contents>
    train/cat/1.jpg<TAB>10342<TAB>0<TAB>512                    path in the folder that was packed, bytes, shard, offset in it
"""

import errno
import hashlib
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import DataError
from pipelines.lists import encode, read_lines, write_whole

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
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes."""
    offsets: tuple[int, ...]
    """Where the images begin, bytes, as if all shards were one file."""


class Shards:
    """The shards of a split, which are mapped into memory when they are first read and stay so as long as this lives.

    Raises:
        DataError: a shard is missing or has another size.
    """

    def __init__(self, folder: Path, shards: tuple[Shard, ...]) -> None:
        self._folder, self._shards = folder, shards
        self._ends = list(accumulate(shard.bytes for shard in shards))
        self._maps: dict[int, mmap.mmap] = {}
        for shard in shards:
            self._require_size(shard)

    def __reduce__(self) -> tuple[type["Shards"], tuple[Path, tuple[Shard, ...]]]:
        """Another process maps the files itself."""
        return Shards, (self._folder, self._shards)

    def find(self, offset: int) -> tuple[Path, int]:
        """The file that holds this place of the whole, and the offset in that file."""
        number, within = self._place(offset)
        return self._folder / self._shards[number].name, within

    def view(self, offset: int, size: int) -> NDArray[np.uint8]:
        """These bytes, without a copy; read-only. The disk is told to bring them."""
        number, within = self._place(offset)
        shard = self._map(number)
        page = within - within % mmap.PAGESIZE
        # All images of a batch are under way before the first is decoded.
        shard.madvise(mmap.MADV_WILLNEED, page, within + size - page)
        return np.frombuffer(shard, np.uint8, size, within)

    def member(self, offset: int) -> str:
        """The name in its tar file of the image that begins there."""
        header = self.view(offset - BLOCK, BLOCK)[:100].tobytes()
        return header.rstrip(b"\0").decode(errors="replace")

    def damaged(self, workers: int) -> Iterator[tuple[str, str | None]]:
        """Every shard's name, and what is wrong with it where its checksum is not the one of the index."""

        def wrong(shard: Shard) -> str | None:
            try:
                found = sha256_of(self._folder / shard.name)
            except OSError as error:
                return f"cannot be read ({error.strerror})"
            return None if found == shard.sha256 else f"has the checksum {found}, not {shard.sha256}: copy or pack it again"

        pool = ThreadPoolExecutor(workers)
        try:
            yield from zip([shard.name for shard in self._shards], pool.map(wrong, self._shards), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, offset: int) -> tuple[int, int]:
        number = bisect_right(self._ends, offset)
        return number, offset - (self._ends[number] - self._shards[number].bytes)

    def _map(self, number: int) -> mmap.mmap:
        found = self._maps.get(number)
        if found is None:
            path = self._folder / self._shards[number].name
            try:
                with open(path, "rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                advice = "copy or pack it again"
                if error.errno == errno.EMFILE:
                    advice = "raise the number of open files (ulimit -n), or pack with a larger --shard-size"
                raise DataError(f"The shard {path} cannot be read ({error.strerror}): {advice}.") from None
            self._maps[number] = found
        return found

    def _require_size(self, shard: Shard) -> None:
        path = self._folder / shard.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"The shard {path} cannot be read ({error.strerror}): copy or pack it again.") from None
        if size != shard.bytes:
            raise DataError(f"The shard {path} has {size} bytes, not {shard.bytes}: copy or pack it again.")


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
        raise DataError(f"The index {path} is damaged, or was changed by hand: copy it again, or pack again.")
    shards = tuple(shards_in(lines))
    starts = [0, *accumulate(shard.bytes for shard in shards)]
    paths, sizes, offsets = [], [], []
    for line in lines[len(shards) :]:
        image, size, number, offset = line.rsplit("\t", 3)
        paths.append(image)
        sizes.append(int(size))
        offsets.append(starts[int(number)] + int(offset))
    return Index(shards, tuple(paths), tuple(sizes), tuple(offsets))


def shard_line(shard: Shard) -> str:
    """How an index names a shard."""
    return SHARD + " ".join(map(str, astuple(shard)))


def shards_in(lines: Sequence[str]) -> Iterator[Shard]:
    """The shards that lines of an index name; other lines, and one that was cut off, are passed over."""
    for line in lines:
        parts = line.removeprefix(SHARD).rsplit(" ", 3)
        if line.startswith(SHARD) and len(parts) == 4 and len(parts[3]) == 16:
            yield Shard(parts[0], int(parts[1]), parts[2], parts[3])


def sha256_of(path: Path) -> str:
    """64 hexadecimal digits over a file's bytes. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(lines: Sequence[str]) -> str:
    return hashlib.sha256(encode("\n".join(lines))).hexdigest()[:16]
