"""Batches of a dataset on a device, epoch by epoch, exactly repeatable."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from pipelines import sampler
from pipelines.datasets.check import Broken, broken_images
from pipelines.datasets.dataset import Dataset
from pipelines.errors import DataError
from pipelines.resample import parts, resampler
from pipelines.transform import MANIPULATIONS, Transform, Windows, draws, training_windows, validation_windows


def threads_of(cpus: int) -> int:
    """Decoding threads for a worker that was given so many CPUs (>= 1): of three or more, one is left for Python."""
    return max(min(cpus, 2), cpus - 1)


class Batch(NamedTuple):
    """Normalised images and their classes, on the loader's device; the caller's own, no buffer is reused."""

    images_NCHW: torch.Tensor
    """float32"""
    labels_N: torch.Tensor
    """int64"""


@dataclass(slots=True)
class Loader:
    """The share of one rank in the batches of a dataset.

    Training shuffles and augments, validation keeps the order; over all ranks an epoch has every image once. What happens to
    an image in epoch k depends on the seed, on k and on its place in the dataset only: not on ranks, batches or what ran
    before. So a restarted run continues bit for bit, in the middle of an epoch too.

    Raises:
        DataError: a field is out of range, or training would leave a rank without images in some step.
    """

    dataset: Dataset
    transform: Transform
    train: bool = field(kw_only=True)
    batch: int = field(kw_only=True)
    """Images per step over all ranks, at most; batches of an epoch differ by one image at most."""
    rank: int = field(default=0, kw_only=True)
    world: int = field(default=1, kw_only=True)
    """Number of ranks."""
    seed: int = field(default=0, kw_only=True)
    threads: int = field(default=1, kw_only=True)
    """CPU threads that decode."""
    device: torch.device = field(default=torch.device("cpu"), kw_only=True)
    """Where batches go; a CUDA device also decodes them."""
    waited: float = field(default=0.0, init=False)
    """Seconds that the consumer has waited for batches in the latest epoch."""
    _whole: set[int] = field(default_factory=set, init=False, repr=False)
    """JPEGs with something behind their end that were found to be whole."""
    _idle: "_Pipelines | None" = field(default=None, init=False, repr=False, compare=False)
    """Those of the latest epoch that came to its end: on a GPU they take seconds to make."""
    _stream: torch.cuda.Stream | None = field(default=None, init=False, repr=False, compare=False)
    """Where batches are copied out of DALI's memory. One for all: torch keeps the freed memory of each stream apart."""

    def __post_init__(self) -> None:
        whole = all(map(_is_whole, (self.batch, self.threads, self.seed, self.rank, self.world)))
        if not whole or self.batch < 1 or self.threads < 1 or not 0 <= self.seed < 2**63 or not 0 <= self.rank < self.world:
            raise DataError(
                "a loader needs integers with batch >= 1, threads >= 1, 0 <= seed < 2**63 and 0 <= rank < world, not "
                f"batch={self.batch}, threads={self.threads}, seed={self.seed}, rank={self.rank}, world={self.world}"
            )
        if self.train:
            sampler.require_full_ranks(len(self.dataset), self.batch, self.world)

    @property
    def steps(self) -> int:
        """Global batches per epoch; in validation a rank skips those that have no image for it."""
        return sampler.steps(len(self.dataset), self.batch)

    def seen_after(self, steps: int) -> int:
        """Images, over all ranks, in the first `steps` batches of an epoch: what `epoch` leaves out to go on after them."""
        return sampler.seen_after(len(self.dataset), self.batch, steps)

    def epoch(self, number: int, seen: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (>= 0), without the first `seen` images of its order (over all ranks).

        What is left is cut into batches like a whole epoch. With the same `batch`, after any number of whole steps, those are
        the very batches that were still to come, whatever the number of ranks before and now.

        Raises:
            DataError: `number` is none of an epoch, `seen` is no number of images of the dataset, or the rest leaves a rank
                without images in some step of training. While it runs: an image cannot be used; the sentence names it.
        """
        shares = self._shares(number, seen)
        self.waited = 0.0
        return self._timed(self._batches(number, shares))

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _shares(self, number: int, seen: int) -> list[sampler.Indices]:
        count = len(self.dataset)
        if not _is_whole(number) or number < 0:
            raise DataError(f"the epoch must be an integer of at least 0, not {number}")
        if not _is_whole(seen) or not 0 <= seen <= count:
            raise DataError(f"an epoch of {count} images can resume after 0 to {count} images, not after {seen}")
        if self.train:
            sampler.require_full_ranks(count - seen, self.batch, self.world)
            sequence = sampler.epoch_order(count, self.seed, number)
        else:
            sequence = np.arange(count, dtype=np.int64)
        shares = sampler.share(sequence[seen:], sampler.steps(count - seen, self.batch), self.rank, self.world)
        return [share for share in shares if len(share)]

    def _batches(self, number: int, shares: list[sampler.Indices]) -> Iterator[Batch]:
        if not shares:
            return
        labels = np.asarray(self.dataset.labels, dtype=np.int64)
        manipulate = MANIPULATIONS[self.transform.manipulation]
        images = self._made_up(shares) if self.dataset.is_synthetic else self._decoded(number, shares)
        for share, images_NCHW in zip(shares, images, strict=True):
            yield Batch(manipulate(images_NCHW).contiguous(), self._on_device(torch.from_numpy(labels[share])))

    def _made_up(self, shares: list[sampler.Indices]) -> Iterator[torch.Tensor]:
        """Noise, always the same."""
        shape = (max(map(len, shares)), 3, self.transform.size, self.transform.size)
        noise_NCHW = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))
        noise_NCHW = self._on_device(noise_NCHW)
        for share in shares:
            yield noise_NCHW[: len(share)].clone()

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor of the CPU without waiting for the GPU."""
        if self.device.type != "cuda":
            return tensor
        # The copy is queued on the caller's stream, so that kernels see it done, and torch does not reuse pinned memory before.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _decoded(self, number: int, shares: list[sampler.Indices]) -> Iterator[torch.Tensor]:
        on_gpu = self.device.type == "cuda"
        in_flight: deque[tuple[Windows, tuple[Any, ...]]] = deque()
        pipelines = self._pipelines()

        def batches() -> Iterator[tuple[Any, ...]]:
            for share in shares:
                encoded = pipelines.read()
                self.dataset.require_sizes(share.tolist(), encoded.bytes_N)
                self._require_whole(share[encoded.endless_N])
                windows = self._windows(number, share, encoded.sizes_N2)
                in_flight.append((windows, (encoded.images, *(windows if on_gpu else parts(windows, self.transform.size)))))
                yield in_flight[-1][1]

        def decoded() -> Iterator[tuple[Any, Windows]]:
            for done in range(len(shares)):
                try:
                    images = pipelines.decode()
                except RuntimeError as error:
                    self._raise_named(shares[done : done + pipelines.ahead], error)
                yield images, in_flight[0][0]
                in_flight.popleft()

        with pipelines.epoch(map(self._sources, shares), batches()):
            if on_gpu:
                yield from (self._own(images) for images, _ in decoded())
            else:
                yield from self._resampled(decoded(), pipelines.settings.max_batch)
        self._idle = pipelines

    def _pipelines(self) -> "_Pipelines":
        """Idle ones or new ones. Only an epoch that comes to its end gives them back: else they are full of its images."""
        largest = -(-min(self.batch, len(self.dataset)) // self.world)
        settings = _Settings(self.transform, self.dataset.packed, largest, self.threads, _cuda_index(self.device))
        idle, self._idle = self._idle, None
        return idle if idle is not None and idle.settings == settings else _Pipelines(settings)

    def _resampled(self, decoded: Iterator[tuple[Any, Windows]], largest: int) -> Iterator[torch.Tensor]:
        with resampler(self.transform, self.threads, largest) as squares:
            begun: deque[Callable[[], torch.Tensor]] = deque()
            for images, windows in decoded:
                begun.append(squares.begin(images, windows))
                if len(begun) > 1:  # One is made while the network has the one before.
                    yield begun.popleft()()
            yield from (finished() for finished in begun)

    def _sources(self, share: sampler.Indices) -> list[NDArray[np.uint8]]:
        if self.dataset.packed:
            # All images of a batch are under way from the disk before the first is waited for.
            self.dataset.announce(share.tolist())
            return [self.dataset.encoded(index) for index in share.tolist()]
        # Text, because a `Path` for each image takes a millisecond a batch.
        files = [os.fsencode(f"{self.dataset.root}/{self.dataset.paths[index]}") for index in share.tolist()]
        return [np.frombuffer(file, dtype=np.uint8) for file in files]

    def _windows(self, number: int, share: sampler.Indices, sizes_N2: NDArray[np.int64]) -> Windows:
        if not self.train:
            return validation_windows(self.transform, sizes_N2)
        return training_windows(self.transform, draws(self.seed, number, share), sizes_N2)

    def _own(self, images: Any) -> torch.Tensor:
        """DALI's batch on the GPU as a tensor that nothing else uses."""
        # DALI may take it back while kernels still read it, so it is copied.
        # On a stream of its own the copy does not queue behind the training step, so we may wait for it.
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call, unused-ignore]
        with torch.cuda.stream(self._stream):
            copy = from_dlpack(images.as_tensor()).clone()
        self._stream.synchronize()
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy

    def _require_whole(self, endless: sampler.Indices) -> None:
        """Whether JPEGs without an end can be decoded whole: of one cut off, a part above the break can be, unnoticed."""
        unknown = [index for index in endless.tolist() if index not in self._whole]
        if not unknown:
            return  # The decoder below takes as long to make as a batch of small images.
        for broken in broken_images(self.dataset, unknown):
            raise self._named(broken)
        self._whole.update(unknown)

    def _raise_named(self, in_flight: list[sampler.Indices], error: RuntimeError) -> NoReturn:
        """Turns DALI's error into a sentence on the first broken image; any other failure passes as it is."""
        indices = (index for share in in_flight for index in share.tolist())
        broken = next(broken_images(self.dataset, indices), None)
        if broken is None:
            raise error
        raise self._named(broken) from error

    def _named(self, broken: Broken) -> DataError:
        return DataError(
            f"{self.dataset.name_of(broken.index)}: cannot use this image: {broken.reason}; replace or remove the image, "
            f"or {self.dataset.renewal}"
        )


class _Settings(NamedTuple):
    """What pipelines are made for."""

    transform: Transform
    packed: bool
    max_batch: int
    threads: int
    device_id: int | None


class _Pipelines:
    """Reading and decoding, for one epoch after another."""

    def __init__(self, settings: _Settings) -> None:
        from pipelines import dali

        self.settings = settings
        # In a list of their own: pipelines that held themselves would keep their memory until Python looks for such circles.
        self._feeds = feeds = [_NOTHING, _NOTHING]
        transform, packed, largest, threads, device_id = settings
        self._reading = dali.reading_pipeline(lambda: next(feeds[0]), packed=packed, max_batch=largest)
        self._decoding = dali.image_pipeline(
            transform, lambda: next(feeds[1]), max_batch=largest, threads=threads, device_id=device_id
        )
        self._read = dali.read
        self.ahead = dali.prefetch(transform, largest) + dali.READ_AHEAD + 1
        """Batches in which the error of one can lie."""

    @contextmanager
    def epoch(self, sources: Iterator[Any], batches: Iterator[Any]) -> Iterator[None]:
        """Feeds both pipelines, as many batches as are then decoded in the block."""
        self._feeds[:] = sources, batches
        try:
            yield
        finally:
            self._feeds[:] = _NOTHING, _NOTHING
        self._reading.reset()
        self._decoding.reset()

    def read(self) -> Any:
        """The next `dali.Encoded`."""
        return self._read(self._reading)

    def decode(self) -> Any:
        """The images of the next batch."""
        (images,) = self._decoding.run()
        return images


_NOTHING: Iterator[Any] = iter(())


def _is_whole(number: object) -> bool:
    return isinstance(number, (int, np.integer))


def _cuda_index(device: torch.device) -> int | None:
    """The GPU's number, None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index
