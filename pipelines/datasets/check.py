"""Finds images that DALI cannot decode.

A DALI pipeline fails at the first broken image, and some broken images crash the process. So `check` decodes one image at a
time, in other processes.
"""

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import islice
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import numpy as np

from pipelines.datasets.dataset import Dataset, Source
from pipelines.errors import DataError

AT_ONCE = 16
"""Images that are sent to a process at a time."""


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

    Yields the number of newly checked images and the broken ones among them, in any order.

    Raises:
        DataError: a process could not be started or was ended; the message names the images that were being decoded.
    """
    _Decoder()  # Fail now if DALI cannot be loaded.
    pieces = (range(len(dataset))[begin : begin + AT_ONCE] for begin in range(0, len(dataset), AT_ONCE))
    pool = ProcessPoolExecutor(min(workers, -(-len(dataset) // AT_ONCE)), get_context("spawn"), _begin)
    running: dict[Future[list[Broken]], Sequence[int]] = {}
    try:
        while True:
            for piece in islice(pieces, 2 * workers - len(running)):
                running[pool.submit(_check, [(index, dataset.source(index)) for index in piece])] = piece
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                broken = done.result()
                yield len(running.pop(done)), broken
    except BrokenProcessPool:
        names = ", ".join(sorted(dataset.paths[index] for piece in running.values() for index in piece))
        raise DataError(
            f"a decoding process has crashed or was ended; remove the image that crashes it, or lower --workers if memory is "
            f"short. Images that were being decoded: {names}"
        ) from None
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


@cache
def _decoder() -> "_Decoder":
    """The decoder of a process."""
    return _Decoder()


class _Decoder:
    """Decodes single images on the CPU."""

    def __init__(self) -> None:
        self._pipeline = _decoding_pipeline()

    def problem(self, source: Source) -> str | None:
        """Why an image cannot be decoded, or None."""
        try:
            encoded = source.read()
        except OSError as error:
            return f"cannot read this file ({error.strerror})"
        if not encoded:
            return "empty file"
        try:
            self._pipeline.feed_input("encoded", [np.frombuffer(encoded, np.uint8)])
            self._pipeline.run()
            return None
        except RuntimeError:
            self._pipeline = _decoding_pipeline()  # A pipeline is unusable after an error.
        return _fault(encoded) or "DALI cannot decode this image, but Pillow can"


def _decoding_pipeline() -> Any:
    from pipelines.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        # Training also parses the header, to compute crops.
        pipeline.set_outputs(fn.peek_image_shape(encoded), fn.decoders.image(encoded, output_type=types.RGB))
    pipeline.build()
    return pipeline


def _fault(encoded: bytes) -> str | None:
    """Pillow's reason why an image cannot be decoded, or None if Pillow can decode it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(encoded)) as image:
            image.load()
    except UnidentifiedImageError:
        return "not a JPEG or PNG image"
    except Exception as error:
        return f"damaged: {error}"
    return None if image.format in ("JPEG", "PNG") else f"a {image.format} image, which DALI cannot decode"
