"""Finds images that DALI cannot decode.

A DALI pipeline fails at the first broken image, and some images crash the process. So `check` decodes one image at a time, in
other processes; after a crash, it decodes those that were in work one by one, each in its own process.
"""

import os
import signal
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import chain
from multiprocessing import get_context, parent_process
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.datasets.dataset import Dataset, Source
from pipelines.errors import DataError

AT_ONCE = 16
"""Images that are sent to a process at a time."""
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF", "PPM")
"""Formats that are read, as Pillow calls them."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An image that cannot be decoded."""

    index: int
    reason: str


def broken_images(dataset: Dataset, indices: Iterable[int]) -> Iterator[Broken]:
    """The images among `indices` that are missing or broken, in order; decodes in this process."""
    decoder = _Decoder()
    for index in indices:
        if (reason := decoder.problem(dataset.source(int(index)))) is not None:
            yield Broken(int(index), reason)


def check(dataset: Dataset, workers: int) -> Iterator[tuple[int, list[Broken]]]:
    """Decodes all images in `workers` processes, which end with the iterator.

    An image that crashes its process is broken, too. Yields the number of newly checked images and the broken ones among them,
    in any order.

    Raises:
        DataError: a process could not be started.
    """
    _Decoder()  # Fail now if DALI cannot be loaded.
    waiting = deque(range(len(dataset))[begin : begin + AT_ONCE] for begin in range(0, len(dataset), AT_ONCE))
    while waiting:
        running: dict[Future[list[Broken]], Sequence[int]] = {}
        with _processes(min(workers, len(waiting))) as pool:
            try:
                yield from _checked(dataset, pool, waiting, running, 2 * workers)
                continue
            except BrokenProcessPool:
                pass
        yield from _one_by_one(dataset, deque(sorted(chain.from_iterable(running.values()))))


def _checked(
    dataset: Dataset,
    pool: ProcessPoolExecutor,
    waiting: deque[range],
    running: dict[Future[list[Broken]], Sequence[int]],
    at_once: int,
) -> Iterator[tuple[int, list[Broken]]]:
    # Not `concurrent.futures.wait`: Ctrl-C in it may leave a future locked, and then the pool never ends.
    finished: SimpleQueue[Future[list[Broken]]] = SimpleQueue()
    while waiting or running:
        while waiting and len(running) < at_once:
            piece = [(index, dataset.source(index)) for index in waiting[0]]
            future = pool.submit(_check, piece)
            running[future] = waiting.popleft()
            future.add_done_callback(finished.put)
        future = finished.get()
        broken = future.result()
        yield len(running.pop(future)), broken


def _one_by_one(dataset: Dataset, waiting: deque[int]) -> Iterator[tuple[int, list[Broken]]]:
    """Decodes images in one process, which is replaced when it crashes."""
    while waiting:
        with _processes(1) as pool:
            pool.submit(_decoder_starts).result()
            while waiting:
                index = waiting.popleft()
                try:
                    yield 1, pool.submit(_check, [(index, dataset.source(index))]).result()
                except BrokenProcessPool:
                    yield 1, [Broken(index, "crashes the decoder, or needs more memory than there is")]
                    break


@contextmanager
def _processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that decode, and that end with the block."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin)
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError("a decoding process ended before it had decoded anything; lower --workers if memory is short") from None
    except OSError as error:
        raise DataError(f"cannot start a decoding process ({error.strerror}); lower --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Prepares a decoding process, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Decoders print errors there, which we report ourselves.
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check(images: list[tuple[int, Source]]) -> list[Broken]:
    problems = [(index, _decoder().problem(source)) for index, source in images]
    return [Broken(index, reason) for index, reason in problems if reason is not None]


def _decoder_starts() -> None:
    _decoder()


@cache
def _decoder() -> "_Decoder":
    """The decoder of a process."""
    return _Decoder()


class _Decoder:
    """Decodes single images on the CPU."""

    def __init__(self) -> None:
        from pipelines import dali

        self._dali = dali
        self._pipelines = dali.size_pipeline(), dali.image_pipeline()

    def problem(self, source: Source) -> str | None:
        """Why an image cannot be used, or None."""
        try:
            if not stat.S_ISREG(os.stat(source.file).st_mode):
                return "not a file, but a folder, a pipe or a device"
            encoded = source.read()
        except OSError as error:
            return f"cannot read this file ({error.strerror})"
        if not encoded:
            return "empty file"
        if self._dali.is_animated_png(encoded):
            return "an animated PNG, which may crash DALI's decoder; save its first picture as a PNG"
        try:
            height, width = self._run(0, encoded)[:2].tolist()
            if height * width > self._dali.MOST_PIXELS:
                return f"{width}x{height} pixels; the maximum is {self._dali.MOST_PIXELS:,} pixels in all; save a smaller copy"
            pixels_HWC = self._run(1, encoded)
        except RuntimeError:
            self._pipelines = self._dali.size_pipeline(), self._dali.image_pipeline()  # unusable after an error
            return _fault(encoded) or "DALI cannot decode this image, but Pillow can; save it as another JPEG or PNG file"
        if self._dali.has_variants(encoded[:2]) and not _is_as_in_pillow(encoded, pixels_HWC):
            return "a variant of TIFF, PPM or PGM whose pixels DALI decodes wrongly; save it as a PNG"
        return None

    def _run(self, number: int, encoded: bytes) -> NDArray[Any]:
        pipeline = self._pipelines[number]
        pipeline.feed_input("encoded", [np.frombuffer(encoded, np.uint8)])
        (output,) = pipeline.run()
        return np.asarray(output.at(0))


def _is_as_in_pillow(encoded: bytes, pixels_HWC: NDArray[np.uint8]) -> bool:
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(encoded)) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PPM"):
                expected_HWC = np.asarray(image).astype(np.float32)[:, :, None] / 257  # Pillow would clip
            else:
                expected_HWC = np.asarray(image.convert("RGB")).astype(np.float32)
    except Exception:  # Pillow does not know this variant
        return False
    return expected_HWC.shape[:2] == pixels_HWC.shape[:2] and bool(np.abs(expected_HWC - pixels_HWC).max() <= 2)


def _fault(encoded: bytes) -> str | None:
    """Pillow's reason why an image cannot be decoded, or None if Pillow can decode it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(encoded)) as image:
            image.load()
    except UnidentifiedImageError:
        return "not an image in a known format"
    except Exception as error:
        return f"damaged: {error}"
    return None if image.format in FORMATS else f"a {image.format} image, which DALI cannot decode; save it as a PNG"
