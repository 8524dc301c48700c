"""Packs a dataset into tar shards, so that a cluster needs neither a shared file system nor millions of files."""

import hashlib
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.datasets.dataset import Dataset
from pipelines.datasets.manifest import decode, digest, require_listable
from pipelines.datasets.shards import BLOCK, Shard, index_path, shards_in, write_index
from pipelines.errors import DataError

END = bytes(2 * BLOCK)
"""The end of a tar file."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A finished shard."""

    shard: Shard
    images: int
    kept: bool
    """Whether the shard already existed."""


def pack(dataset: Dataset, out: Path, shard_bytes: int, workers: int) -> Iterator[Packed]:
    """Writes shards of at most `shard_bytes` (more if a single image is larger) and then their index, in `workers` threads.

    Yields shards as they are finished. The same images give the same bytes. The files appear in `out` when all are complete;
    if they are there already, nothing is written.

    Raises:
        DataError: the name of an image contains a line break; an image cannot be read or has changed since it was listed;
            `out` cannot be written, is too small, or contains other shards of this split; another process is packing there.
    """
    require_listable(dataset.paths)
    packer = _Packer(dataset, out, _plan(dataset, shard_bytes))
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield from packer.existing() or packer.write(workers)
    except OSError as error:
        raise DataError(
            f"{out}: cannot write to this folder ({error.strerror}); free some space or use another folder"
        ) from None


def _plan(dataset: Dataset, shard_bytes: int) -> list[range]:
    """The indices of the images in each shard."""
    plan, begin, total = [], 0, len(END)
    for index, size in enumerate(dataset.sizes):
        more = _blocks(size) + _blocks(len(_label(dataset, index)))
        if index > begin and total + more > shard_bytes:
            plan.append(range(begin, index))
            begin, total = index, len(END)
        total += more
    return [*plan, range(begin, len(dataset))]


@dataclass(slots=True)
class _Packer:
    """Packs one dataset into one folder."""

    dataset: Dataset
    out: Path
    plan: list[range]
    stopped: threading.Event = field(default_factory=threading.Event)

    def existing(self) -> list[Packed]:
        """The shards if they have been packed before; empty if there are none.

        Raises:
            DataError: the folder has other shards of this split.
        """
        split, index = self.dataset.split, index_path(self.out, self.dataset.split)
        names = sorted(path.name for path in self.out.glob(f"{split}-*.tar") if path.stem.removeprefix(f"{split}-").isdigit())
        if not names and not index.exists():
            return []
        shards = list(shards_in(decode(index.read_bytes()).split("\n"))) if index.exists() else []
        wanted = [(self._name(number), self._contents(piece)) for number, piece in enumerate(self.plan)]
        if [(shard.name, shard.contents) for shard in shards] == wanted and names == sorted(name for name, _ in wanted):
            return [Packed(shard, len(piece), kept=True) for shard, piece in zip(shards, self.plan, strict=True)]
        raise DataError(
            f"{self.out}: already holds {len(names)} {'shard' if len(names) == 1 else 'shards'} of {split} made from other "
            "images or with another --shard-size; remove them and their index, or use another folder"
        )

    def write(self, workers: int) -> Iterator[Packed]:
        """Writes all shards into a temporary folder, then moves them out of it."""
        self._require_space()
        unfinished = self.out / f".{self.dataset.split}.part"
        try:
            unfinished.mkdir()
        except FileExistsError:
            raise DataError(
                f"{unfinished}: another process is packing here, or was killed; wait until it ends, or remove this folder"
            ) from None
        pool = ThreadPoolExecutor(workers)
        try:
            shards: dict[int, Shard] = {}
            running = {
                pool.submit(self._write, piece, unfinished / self._name(number)): number
                for number, piece in enumerate(self.plan)
            }
            for done in as_completed(running):
                number, piece = running[done], self.plan[running[done]]
                path = unfinished / self._name(number)
                shards[number] = Shard(path.name, path.stat().st_size, done.result(), self._contents(piece))
                yield Packed(shards[number], len(piece), kept=False)
            for shard in shards.values():
                os.replace(unfinished / shard.name, self.out / shard.name)
            self._write_index([shards[number] for number in range(len(self.plan))])
        finally:
            self.stopped.set()
            pool.shutdown(cancel_futures=True)
            shutil.rmtree(unfinished)

    def _write_index(self, shards: list[Shard]) -> None:
        rows = [
            (self.dataset.paths[index], self.dataset.sizes[index], number, offset)
            for number, piece in enumerate(self.plan)
            for index, offset in _offsets(self.dataset, piece)
        ]
        write_index(index_path(self.out, self.dataset.split), shards, rows)

    def _name(self, number: int) -> str:
        return f"{self.dataset.split}-{number:05d}.tar"

    def _contents(self, piece: range) -> str:
        rows = (f"{index} {self.dataset.labels[index]} {self.dataset.paths[index]}" for index in piece)
        return digest(rows, (self.dataset.sizes[index] for index in piece))

    def _require_space(self) -> None:
        needed = sum(_blocks(size) + 2 * BLOCK for size in self.dataset.sizes)
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise DataError(
                f"{self.out}: {free} bytes are free, but the shards need {needed}; free some space or use another folder"
            )

    def _write(self, piece: range, path: Path) -> str:
        """Writes a tar file and returns its checksum."""
        total = hashlib.sha256()
        with open(path, "wb", buffering=2**20) as file:
            for index in piece:
                if self.stopped.is_set():
                    raise InterruptedError("stopped")
                image = f"{index:08d}{Path(self.dataset.paths[index]).suffix.lower()}"
                for name, content in ((image, self._image(index)), (f"{index:08d}.cls", _label(self.dataset, index))):
                    for part in (_header(name, len(content)), content, bytes(-len(content) % BLOCK)):
                        file.write(part)
                        total.update(part)
            file.write(END)
            total.update(END)
            file.flush()
            os.fsync(file.fileno())
        return total.hexdigest()

    def _image(self, index: int) -> bytes:
        name, size = self.dataset.name_of(index), self.dataset.sizes[index]
        try:
            content = self.dataset.source(index).read()
        except OSError as error:
            raise DataError(
                f"{name}: cannot read this image ({error.strerror}); exclude broken images with `san data check`"
            ) from None
        if not content or len(content) != size:
            raise DataError(
                f"{name}: {len(content)} bytes, but {size} when the file was listed; "
                "exclude broken images with `san data check`, "
                "or wait until no other program writes there"
            )
        return content


def _offsets(dataset: Dataset, piece: range) -> Iterator[tuple[int, int]]:
    """The offset of each image of a shard in its tar file."""
    offset = 0
    for index in piece:
        yield index, offset + BLOCK
        offset += _blocks(dataset.sizes[index]) + _blocks(len(_label(dataset, index)))


def _blocks(size: int) -> int:
    """Bytes of a file of this size in a tar file, with its header."""
    return BLOCK + -(-size // BLOCK) * BLOCK


def _label(dataset: Dataset, index: int) -> bytes:
    return str(dataset.labels[index]).encode()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)
