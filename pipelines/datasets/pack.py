"""Packs a dataset into tar shards, so that a cluster needs neither a shared file system nor millions of files."""

import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from pipelines.datasets.dataset import Dataset
from pipelines.datasets.shards import BLOCK, Shard, Shards, has_shards, index_path, read_index, sha256_of, write_index
from pipelines.errors import DataError


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
            `out` cannot be written, is too small, or contains other or incomplete shards of this split; another process is
            packing there.
    """
    plan = _plan(dataset, shard_bytes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if has_shards(out, dataset.split):
            yield from _existing(dataset, out, plan)
        else:
            yield from _write(dataset, out, plan, workers)
    except OSError as error:
        raise DataError(
            f"{out}: cannot write to this folder ({error.strerror}); free some space or use another folder"
        ) from None


def _plan(dataset: Dataset, shard_bytes: int) -> list[range]:
    """The indices of the images in each shard."""
    empty = 2 * BLOCK + tarfile.RECORDSIZE  # the end of a tar file, and padding
    plan, begin, total = [], 0, empty
    for index, size in enumerate(dataset.sizes):
        more = _blocks(size)
        if index > begin and total + more > shard_bytes:
            plan.append(range(begin, index))
            begin, total = index, empty
        total += more
    return [*plan, range(begin, len(dataset))]


def _blocks(size: int) -> int:
    """Bytes of an image of this size and of its label in a tar file, with two headers."""
    return 3 * BLOCK + -(-size // BLOCK) * BLOCK


def _existing(dataset: Dataset, out: Path, plan: list[range]) -> Iterator[Packed]:
    """The shards, if they contain the images of the dataset."""
    path = index_path(out, dataset.split)
    if path.exists():
        index = read_index(path)
        if (index.paths, list(index.sizes), len(index.shards)) == (dataset.paths, list(dataset.sizes), len(plan)):
            Shards(out, index.shards)
            yield from (Packed(shard, len(piece), kept=True) for shard, piece in zip(index.shards, plan, strict=True))
            return
    raise DataError(
        f"{out}: already holds shards of {dataset.split} made from other images or with another --shard-size; "
        "remove them and their index, or use another folder"
    )


def _write(dataset: Dataset, out: Path, plan: list[range], workers: int) -> Iterator[Packed]:
    """Writes all shards into a temporary folder, then moves them out of it."""
    needed, free = sum(map(_blocks, dataset.sizes)), shutil.disk_usage(out).free
    if needed > free:
        raise DataError(f"{out}: {free} bytes are free, but the shards need {needed}; free some space or use another folder")
    unfinished = out / f".{dataset.split}.part"
    try:
        unfinished.mkdir()
    except FileExistsError:
        raise DataError(
            f"{unfinished}: another process is packing here, or was killed; wait until it ends, or remove this folder"
        ) from None
    pool, stopped = ThreadPoolExecutor(workers), threading.Event()
    paths = [unfinished / f"{dataset.split}-{number:05d}.tar" for number in range(len(plan))]
    try:
        running = [pool.submit(_write_shard, dataset, piece, path, stopped) for piece, path in zip(plan, paths, strict=True)]
        for done in as_completed(running):
            shard, offsets = done.result()
            yield Packed(shard, len(offsets), kept=False)
        written = [done.result() for done in running]
        rows = [
            (dataset.paths[image], dataset.sizes[image], number, offset)
            for number, (piece, (_, offsets)) in enumerate(zip(plan, written, strict=True))
            for image, offset in zip(piece, offsets, strict=True)
        ]
        index = index_path(unfinished, dataset.split)
        write_index(index, [shard for shard, _ in written], rows)
        for path in (*paths, index):
            os.replace(path, out / path.name)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(unfinished)


def _write_shard(dataset: Dataset, piece: range, path: Path, stopped: threading.Event) -> tuple[Shard, list[int]]:
    """Writes a tar file, and returns it with the offsets of its images."""
    with open(path, "wb", buffering=2**20) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index in piece:
                if stopped.is_set():
                    raise InterruptedError("stopped")
                image = f"{index:08d}{Path(dataset.paths[index]).suffix.lower()}"
                label = str(dataset.labels[index]).encode()
                for name, content in ((image, _content(dataset, index)), (f"{index:08d}.cls", label)):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, BytesIO(content))
        file.flush()
        os.fsync(file.fileno())
    with tarfile.open(path) as tar:
        offsets = [member.offset_data for member in tar.getmembers()[::2]]
    return Shard(path.name, path.stat().st_size, sha256_of(path)), offsets


def _content(dataset: Dataset, index: int) -> bytes:
    name, size = dataset.name_of(index), dataset.sizes[index]
    try:
        content = dataset.source(index).read()
    except OSError as error:
        raise DataError(
            f"{name}: cannot read this image ({error.strerror}); exclude broken images with `san data check`"
        ) from None
    if not content or len(content) != size:
        raise DataError(
            f"{name}: {len(content)} bytes, but {size} when the file was listed; exclude broken images with `san data check`, "
            "or wait until no other program writes there"
        )
    return content
