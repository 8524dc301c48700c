"""Which images of a dataset cannot be decoded, and why.

The judge is DALI, because it is DALI that will read them. Its pipelines end at the first broken image, and broken images have
ended whole processes; so a scan decodes one image at a time, in processes of its own.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from pipelines.datasets.dataset import Dataset, Source
from pipelines.errors import DataError

AT_ONCE = 64
"""Images that a process is given at a time."""
FAILED_STARTS = 3
"""Processes in a row that may be lost before they begin; a system without memory may end one."""
UNLISTABLE = "the file name contains a line break, which image lists cannot store; rename the file"


@dataclass(frozen=True, slots=True)
class Broken:
    """An image that cannot be decoded."""

    index: int
    reason: str


def broken_images(dataset: Dataset, indices: Iterable[int]) -> Iterator[Broken]:
    """Those of `indices` that are missing or no images, in order; decodes in this process."""
    decoder = _Decoder()
    for index in indices:
        if (reason := decoder.complaint(dataset.source(int(index)))) is not None:
            yield Broken(int(index), reason)


def check(dataset: Dataset, workers: int) -> Iterator[tuple[int, list[Broken]]]:
    """Decodes every image, in so many processes.

    Yields how many more images are done and which of those are broken, in no order. However the iterator ends, the processes
    end with it.

    Raises:
        DataError: the processes cannot be started, or are lost before they begin.
    """
    _Decoder()  # Where DALI cannot be loaded at all, it is not the images' fault.
    unlistable = [index for index, path in enumerate(dataset.paths) if "\n" in path]
    if unlistable:
        yield len(unlistable), [Broken(index, UNLISTABLE) for index in unlistable]
    pieces = _Pieces(sorted(set(range(len(dataset))).difference(unlistable)))
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Sequence[int]]] = {}
    try:
        for _ in range(min(workers, len(pieces.waiting))):
            idle.append(_Worker())
        while pieces.waiting or busy:
            while pieces.waiting and idle:
                worker, piece = idle.pop(), pieces.waiting.popleft()
                worker.give([(index, dataset.source(index)) for index in piece])
                busy[worker.connection] = worker, piece
            for worker, piece in [busy[ready] for ready in wait(list(busy))]:  # type: ignore[index]
                broken = worker.take()
                del busy[worker.connection]
                if broken is not None:
                    idle.append(worker)
                    pieces.failed_starts = 0
                    yield len(piece), broken
                    continue
                exit_code = worker.end()
                yield from pieces.lost(piece, exit_code, worker.has_begun)
                idle.append(_Worker())
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.end()


class _Pieces:
    """What is still to be given to a process, and what it means that one is lost."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.waiting = deque(indices[begin : begin + AT_ONCE] for begin in range(0, len(indices), AT_ONCE))
        self.failed_starts = 0
        """Processes in a row that were lost before they began."""
        self._suspect: set[int] = set()
        """Images whose process was lost once: for any reason, so they get another try."""

    def lost(self, piece: Sequence[int], exit_code: int | None, has_begun: bool) -> Iterator[tuple[int, list[Broken]]]:
        """The process that had these images is gone. Yields as `check` where an image has ended two."""
        if not has_begun:
            self.failed_starts += 1
            if self.failed_starts > FAILED_STARTS:
                raise DataError(
                    f"decoding processes exit before they start (exit code {exit_code}); free some memory or lower --workers. "
                    'In a script, call this function below `if __name__ == "__main__":`'
                )
            self.waiting.append(piece)
        elif len(piece) > 1:
            half = len(piece) // 2
            self.waiting.extend((piece[:half], piece[half:]))
        elif piece[0] not in self._suspect:
            self._suspect.add(piece[0])
            self.waiting.append(piece)
        else:
            yield 1, [Broken(piece[0], f"decoding this file crashes the process (exit code {exit_code})")]


class _Worker:
    """A process that decodes what it is given.

    Raises:
        DataError: it cannot be started.
    """

    def __init__(self) -> None:
        self.has_begun = False
        """Whether it has said that it can decode."""
        context = get_context("spawn")
        try:
            # The first process starts this other one, which would let interrupts through again below.
            resource_tracker.ensure_running()
            self.connection, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs,), daemon=True)
            # It inherits this: Ctrl-C is for the process that gives the work, and ends the others.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except OSError as error:
            raise DataError(f"cannot start a decoding process ({error.strerror}); lower --workers") from None
        theirs.close()

    def give(self, piece: list[tuple[int, Source]]) -> None:
        try:
            self.connection.send(piece)
        except BrokenPipeError:
            pass  # It is gone, as `take` will find.

    def take(self) -> list[Broken] | None:
        """The broken images of what it was given; None where the process is gone."""
        try:
            if not self.has_begun:
                self._answer()
                self.has_begun = True
            return self._answer()
        except (EOFError, ConnectionError):
            return None

    def _answer(self) -> list[Broken]:
        found: list[Broken] | Exception = self.connection.recv()
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
    decoder = _Decoder()
    try:
        connection.send([])
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
            if not isinstance(error, FileNotFoundError):
                return f"cannot read this file ({error.strerror})"
            return "broken symbolic link" if os.path.islink(source.file) else "missing file"
        if not encoded:
            return "empty file"
        with _stderr_held_back() as drop:
            try:
                self._pipeline.feed_input("encoded", [np.frombuffer(encoded, np.uint8)])
                self._pipeline.run()
                return None
            except RuntimeError:
                self._pipeline = _decoding_pipeline()  # The old one does not work any more.
            fault = _fault(encoded)
            if fault is None:  # What the decoder has said is all that anybody knows.
                return "DALI cannot decode this image, but Pillow can"
            drop()
            return fault


@contextmanager
def _stderr_held_back() -> Iterator[Callable[[], None]]:
    """What this process says on stderr, libraries too, is said at the end of the block; not at all once `drop` was called."""
    shown, held = os.dup(2), os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield lambda: os.truncate(held, 0)
    finally:
        os.dup2(shown, 2)
        os.write(2, os.pread(held, os.fstat(held).st_size, 0))
        os.close(shown)
        os.close(held)


def _decoding_pipeline() -> Any:
    from pipelines.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        # The header is looked at by itself, as for training, which crops by what it says.
        pipeline.set_outputs(fn.peek_image_shape(encoded), fn.decoders.image(encoded, output_type=types.RGB))
    pipeline.build()
    return pipeline


def _fault(encoded: bytes) -> str | None:
    """What Pillow says of an image that DALI cannot decode; None where it finds no fault."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(encoded)) as image:
            image.load()
    except UnidentifiedImageError:
        return "not a JPEG or PNG image"
    except Exception as error:
        return f"damaged: {error}"
    return None if image.format in ("JPEG", "PNG") else f"a {image.format} image, which DALI cannot decode"
