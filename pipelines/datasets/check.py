"""Finds images that DALI cannot decode.

A DALI pipeline fails at the first broken image, and some broken images crash the process. So `check` decodes one image at a
time, in separate processes.
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
"""Images that are sent to a process at a time."""
FAILED_STARTS = 3
"""Consecutive processes that may exit before they start to decode, for example for lack of memory."""
UNLISTABLE = "the file name contains a line break, which image lists cannot store; rename the file"


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
        DataError: the processes cannot be started, or exit before they decode.
    """
    _Decoder()  # Fail now if DALI cannot be loaded.
    unlistable = [index for index, path in enumerate(dataset.paths) if "\n" in path]
    if unlistable:
        yield len(unlistable), [Broken(index, UNLISTABLE) for index in unlistable]
    queue = _Queue(sorted(set(range(len(dataset))).difference(unlistable)))
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Sequence[int]]] = {}
    try:
        for _ in range(min(workers, len(queue.waiting))):
            idle.append(_Worker())
        while queue.waiting or busy:
            while queue.waiting and idle:
                worker, piece = idle.pop(), queue.waiting.popleft()
                worker.send([(index, dataset.source(index)) for index in piece])
                busy[worker.connection] = worker, piece
            for worker, piece in [busy[ready] for ready in wait(list(busy))]:  # type: ignore[index]
                broken = worker.receive()
                del busy[worker.connection]
                if broken is not None:
                    idle.append(worker)
                    queue.failed_starts = 0
                    yield len(piece), broken
                    continue
                exit_code = worker.stop()
                yield from queue.retry(piece, exit_code, worker.is_ready)
                idle.append(_Worker())
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.stop()


class _Queue:
    """Images that have not been checked yet."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.waiting = deque(indices[begin : begin + AT_ONCE] for begin in range(0, len(indices), AT_ONCE))
        self.failed_starts = 0
        """Consecutive processes that exited before they started to decode."""
        self._suspect: set[int] = set()
        """Images whose process exited once. They get a second try, because the reason could be another."""

    def retry(self, piece: Sequence[int], exit_code: int | None, was_ready: bool) -> Iterator[tuple[int, list[Broken]]]:
        """Queues the images of a process that exited, in halves. Yields like `check` if one image ended two processes."""
        if not was_ready:
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
    """A decoding process.

    Raises:
        DataError: the process cannot be started.
    """

    def __init__(self) -> None:
        self.is_ready = False
        """Whether the process has loaded DALI."""
        context = get_context("spawn")
        try:
            # The first start would also start the resource tracker, which unblocks SIGINT.
            resource_tracker.ensure_running()
            self.connection, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs,), daemon=True)
            # The new process inherits this mask. On Ctrl-C, only the parent handles the signal and stops the others.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except OSError as error:
            raise DataError(f"cannot start a decoding process ({error.strerror}); lower --workers") from None
        theirs.close()

    def send(self, piece: list[tuple[int, Source]]) -> None:
        try:
            self.connection.send(piece)
        except BrokenPipeError:
            pass  # The process exited; `receive` will return None.

    def receive(self) -> list[Broken] | None:
        """The broken images among those sent, or None if the process exited."""
        try:
            if not self.is_ready:
                self._next_message()
                self.is_ready = True
            return self._next_message()
        except (EOFError, ConnectionError):
            return None

    def _next_message(self) -> list[Broken]:
        found: list[Broken] | Exception = self.connection.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self) -> int | None:
        """Kills the process if it is running, and returns its exit code."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _work(connection: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Decoders print errors there, which we report ourselves.
    decoder = _Decoder()
    try:
        connection.send([])
        while True:
            piece = connection.recv()
            found = [(index, decoder.problem(source)) for index, source in piece]
            connection.send([Broken(index, reason) for index, reason in found if reason is not None])
    except (EOFError, ConnectionError):
        return  # The parent exited.
    except Exception as error:
        connection.send(error)


class _Decoder:
    """Decodes single images on the CPU."""

    def __init__(self) -> None:
        self._pipeline = _decoding_pipeline()

    def problem(self, source: Source) -> str | None:
        """Why an image cannot be decoded, or None."""
        try:
            encoded = source.read()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                return f"cannot read this file ({error.strerror})"
            return "broken symbolic link" if os.path.islink(source.file) else "missing file"
        if not encoded:
            return "empty file"
        with _buffered_stderr() as discard:
            try:
                self._pipeline.feed_input("encoded", [np.frombuffer(encoded, np.uint8)])
                self._pipeline.run()
                return None
            except RuntimeError:
                self._pipeline = _decoding_pipeline()  # A pipeline is unusable after an error.
            fault = _fault(encoded)
            if fault is None:  # Show the decoder's own message on stderr.
                return "DALI cannot decode this image, but Pillow can"
            discard()
            return fault


@contextmanager
def _buffered_stderr() -> Iterator[Callable[[], None]]:
    """Writes this process's stderr, including that of C libraries, at the end of the block, unless the caller discards it."""
    original, buffer = os.dup(2), os.memfd_create("stderr")
    os.dup2(buffer, 2)
    try:
        yield lambda: os.truncate(buffer, 0)
    finally:
        os.dup2(original, 2)
        os.write(2, os.pread(buffer, os.fstat(buffer).st_size, 0))
        os.close(original)
        os.close(buffer)


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
