"""Which images of a data set cannot be decoded, and why.

The judge is DALI, because it is DALI that will read them. Its pipelines end at the first broken image, and broken images have
ended whole processes; so a scan decodes one image at a time, in processes of its own.
"""

import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from pipelines.dataset import Dataset, Source

AT_ONCE = 64
"""Images that a process is given at a time."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An image that cannot be decoded."""

    index: int
    reason: str


def broken_images(dataset: Dataset, indices: Iterable[int]) -> Iterator[int]:
    """Those of `indices` that are missing or no images, in order; decodes in this process."""
    decoder = _Decoder()
    for index in indices:
        if decoder.complaint(dataset.source(int(index))) is not None:
            yield index


def check(dataset: Dataset, workers: int) -> Iterator[tuple[int, list[Broken]]]:
    """Decodes every image, in so many processes.

    Yields how many more images are done and which of those are broken, in no order. However the iterator ends, the processes
    end with it.
    """
    _Decoder()  # Where DALI cannot be loaded at all, it is not the images' fault.
    everything = range(len(dataset))
    waiting = deque(everything[begin : begin + AT_ONCE] for begin in everything[::AT_ONCE])
    idle = [_Worker() for _ in range(min(workers, len(waiting)))]
    busy: dict[Connection, tuple[_Worker, range]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                worker, piece = idle.pop(), waiting.popleft()
                worker.give([(index, dataset.source(index)) for index in piece])
                busy[worker.connection] = worker, piece
            for worker, piece in [busy[ready] for ready in wait(list(busy))]:  # type: ignore[index]
                broken = worker.take()
                del busy[worker.connection]
                if broken is not None:
                    idle.append(worker)
                    yield len(piece), broken
                    continue
                exit_code = worker.end()
                idle.append(_Worker())
                if len(piece) == 1:
                    yield 1, [Broken(piece[0], f"it ends the process that decodes it (exit code {exit_code})")]
                else:  # One of them does that.
                    half = len(piece) // 2
                    waiting.extend((piece[:half], piece[half:]))
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.end()


class _Worker:
    """A process that decodes what it is given."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        # It inherits this: Ctrl-C is for the process that gives the work, and ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def give(self, piece: list[tuple[int, Source]]) -> None:
        try:
            self.connection.send(piece)
        except BrokenPipeError:
            pass  # It is gone, as `take` will find.

    def take(self) -> list[Broken] | None:
        """The broken images of what it was given; None where the process is gone."""
        try:
            found: list[Broken] | Exception = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> int | None:
        """Ends the process, where that has not happened, and returns its exit code."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _work(connection: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Decoders say there what we say better.
    try:
        decoder = _Decoder()
        while True:
            piece = connection.recv()
            found = [(index, decoder.complaint(source)) for index, source in piece]
            connection.send([Broken(index, reason) for index, reason in found if reason is not None])
    except (EOFError, ConnectionError):
        return  # Nobody is there any more.
    except Exception as error:
        connection.send(error)


class _Decoder:
    """Decodes one image after another on the CPU."""

    def __init__(self) -> None:
        self._pipeline = _decoding_pipeline()

    def complaint(self, source: Source) -> str | None:
        """Why an image cannot be decoded; None where it can."""
        try:
            encoded = source.read()
        except OSError as error:
            dangling = isinstance(error, FileNotFoundError) and os.path.islink(source.file)
            return "it is a symbolic link to nothing" if dangling else f"it cannot be read ({error.strerror})"
        if not encoded:
            return "it is empty"
        if "\n" in source.file:
            return "its name holds a line break, which a list cannot: rename it"
        try:
            self._pipeline.feed_input("encoded", [np.frombuffer(encoded, np.uint8)])
            self._pipeline.run()
        except RuntimeError:
            self._pipeline = _decoding_pipeline()  # The old one does not work any more.
            return _reason(encoded)
        return None


def _decoding_pipeline() -> Any:
    from pipelines.graph import Pipeline, fn, types

    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        # The header is looked at by itself, as for training, which crops by what it says.
        pipeline.set_outputs(fn.peek_image_shape(encoded), fn.decoders.image(encoded, output_type=types.RGB))
    pipeline.build()
    return pipeline


def _reason(encoded: bytes) -> str:
    """What Pillow says of an image that DALI cannot decode."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(encoded)) as image:
            image.load()
    except UnidentifiedImageError:
        return "it is no JPEG or PNG image"
    except Exception as error:
        return f"it is damaged: {error}"
    if image.format in ("JPEG", "PNG"):
        return f"DALI cannot decode this {image.format} image, though Pillow can: save it anew"
    return f"it is a {image.format} image: save it as JPEG or PNG"
