"""Packs a dataset into tar shards, so that a cluster needs neither a shared file system nor millions of files."""

import fcntl
import hashlib
import os
import re
import shutil
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipelines.datasets.dataset import Dataset
from pipelines.datasets.manifest import decode, digest, require_listable
from pipelines.datasets.shards import BLOCK, Shard, index_path, sha256_of, shard_line, shards_in, write_index
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

    Yields shards as they are finished. The same images give the same bytes. After an interruption, the same call continues: it
    keeps shards with the right checksum that are newer than the last change of their images.

    Raises:
        DataError: the name of an image contains a line break; an image cannot be read or has changed since it was listed;
            `out` cannot be written, is too small, or contains other shards of this split; another process is packing there.
    """
    require_listable(dataset.paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _journal(out, dataset.split) as journal:
            packer = _Packer(dataset, out, journal, _plan(dataset, shard_bytes))
            pool = ThreadPoolExecutor(workers)
            try:
                for done in as_completed([pool.submit(packer.make, number) for number in range(len(packer.plan))]):
                    yield done.result()
            finally:
                packer.stopped.set()
                pool.shutdown(cancel_futures=True)
            packer.write_index()
            journal.truncate(0)
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


@contextmanager
def _journal(out: Path, split: str) -> Iterator[IO[bytes]]:
    """A list of finished shards until the index is written. Locked for this process while it is open."""
    path = out / f"{index_path(out, split).name}.part"
    with open(path, "a+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(journal.fileno()).st_nlink == 0:  # Another process removed the file in the meantime.
                raise BlockingIOError
        except BlockingIOError:
            raise DataError(
                f"{out}: another process is already packing {split} here; wait until that process ends, or stop it"
            ) from None
        try:
            yield journal
        finally:
            if os.fstat(journal.fileno()).st_size == 0:
                path.unlink()


class _Packer:
    """Packs one dataset into one folder.

    Raises:
        DataError: the folder is too small, or contains other shards of the split.
    """

    def __init__(self, dataset: Dataset, out: Path, journal: IO[bytes], plan: list[range]) -> None:
        self.dataset, self.out, self.journal, self.plan = dataset, out, journal, plan
        self.stopped, self._writing = threading.Event(), threading.Lock()
        self._ready: dict[int, Shard] = {}
        self._known = self._earlier_shards()
        self._require_no_others()
        self._require_space()

    def make(self, number: int) -> Packed:
        """Writes a shard unless it exists."""
        piece, name = self.plan[number], self._name(number)
        known, path = self._known.get(name), self.out / name
        if known is not None and self._is_current(path, piece) and sha256_of(path) == known.sha256:
            self._ready[number] = known
            return Packed(known, len(piece), kept=True)
        unfinished = path.with_name(f"{name}.part")
        try:
            checksum = self._write(piece, unfinished)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        shard = Shard(name, unfinished.stat().st_size, checksum, self._contents(piece))
        with self._writing:
            # Before renaming the file, so that every shard with its final name is listed.
            self.journal.write(f"{shard_line(shard)}\n".encode())
            self.journal.flush()
            os.fsync(self.journal.fileno())
        os.replace(unfinished, path)
        self._ready[number] = shard
        return Packed(shard, len(piece), kept=False)

    def write_index(self) -> None:
        """Writes the index after the last shard."""
        rows = [
            (self.dataset.paths[index], self.dataset.sizes[index], number, offset)
            for number, piece in enumerate(self.plan)
            for index, offset in _offsets(self.dataset, piece)
        ]
        write_index(index_path(self.out, self.dataset.split), [self._ready[number] for number in range(len(self.plan))], rows)

    def _is_current(self, path: Path, piece: range) -> bool:
        """Whether a shard exists, and none of its images has changed since it was written."""
        try:
            return path.stat().st_mtime_ns >= max(_changed(self.dataset.source(index).file) for index in piece)
        except OSError:
            return False

    def _name(self, number: int) -> str:
        return f"{self.dataset.split}-{number:05d}.tar"

    def _contents(self, piece: range) -> str:
        rows = (f"{index} {self.dataset.labels[index]} {self.dataset.paths[index]}" for index in piece)
        return digest(rows, (self.dataset.sizes[index] for index in piece))

    def _earlier_shards(self) -> dict[str, Shard]:
        """The shards of this plan that earlier calls wrote, by name."""
        index = index_path(self.out, self.dataset.split)
        self.journal.seek(0)
        # The journal last, because it is newer than the index of an earlier call.
        lines = decode((index.read_bytes() if index.exists() else b"") + b"\n" + self.journal.read()).split("\n")
        wanted = {(self._name(number), self._contents(piece)) for number, piece in enumerate(self.plan)}
        return {shard.name: shard for shard in shards_in(lines) if (shard.name, shard.contents) in wanted}

    def _require_no_others(self) -> None:
        shard_name = re.compile(re.escape(self.dataset.split) + r"-\d{5,}\.tar")
        others = sorted(name for name in os.listdir(self.out) if shard_name.fullmatch(name) and name not in self._known)
        if others:
            raise DataError(
                f"{self.out}: already holds {len(others)} {'shard' if len(others) == 1 else 'shards'} "
                f"of {self.dataset.split} made from other images or with "
                f"another --shard-size, such as {others[0]}; remove them or use another folder"
            )

    def _require_space(self) -> None:
        missing = [piece for number, piece in enumerate(self.plan) if self._name(number) not in self._known]
        needed = sum(_blocks(self.dataset.sizes[index]) + 2 * BLOCK for piece in missing for index in piece)
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise DataError(
                f"{self.out}: {free} bytes are free, but the shards need {needed}; free some space or use another folder"
            )

    def _write(self, piece: range, path: Path) -> str:
        """Writes a tar file and returns its checksum."""
        total = hashlib.sha256()
        with open(path, "wb", buffering=2**20) as file:
            begun = os.fstat(file.fileno()).st_mtime_ns
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
        os.utime(path, ns=(begun, begun))  # so that an image that changes during writing is newer
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


def _changed(path: str) -> int:
    """The time of the last change of a file or a link to it, in nanoseconds of the file system's clock.

    Uses ctime, because copying a file can preserve its mtime.
    """
    return max(os.stat(path).st_ctime_ns, os.lstat(path).st_ctime_ns)


def _blocks(size: int) -> int:
    """Bytes of a file of this size in a tar file, with its header."""
    return BLOCK + -(-size // BLOCK) * BLOCK


def _label(dataset: Dataset, index: int) -> bytes:
    return str(dataset.labels[index]).encode()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)
