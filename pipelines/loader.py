"""Loads batches of a dataset onto a device, reproducibly."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from pipelines import sampler
from pipelines.datasets.check import Broken, broken_images
from pipelines.datasets.dataset import Dataset
from pipelines.errors import DataError, DecodingError, join_names
from pipelines.resample import resampler, visible_region
from pipelines.transform import CropParams, Transform, random_numbers, shifted, training_crops, validation_crops

if TYPE_CHECKING:
    from pipelines.dali import Pipelines


def decoding_threads(cpus: int) -> int:
    """Decoding threads for a worker with `cpus` CPUs (>= 1). With three or more CPUs, one is left for Python."""
    return max(min(cpus, 2), cpus - 1)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a CPU tensor to a device, for a GPU without waiting for it."""
    # The copy runs on the caller's stream, so later kernels see the data, and torch keeps the pinned memory until then.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Batch(NamedTuple):
    """Normalized images and their classes on the loader's device. The memory is not reused."""

    images_NCHW: torch.Tensor
    """float32"""
    labels_N: torch.Tensor
    """int64"""


@dataclass(slots=True)
class Loader:
    """The batches of one rank.

    Training shuffles and augments images; validation keeps their order. An epoch contains each image once over all ranks.
    Augmentation depends only on the seed, the epoch and the image's index, not on ranks or batches. So a restarted run is
    bit-identical, even if it resumes in the middle of an epoch.

    Raises:
        DataError: training would leave a rank without images in some step.
    """

    dataset: Dataset
    transform: Transform
    train: bool = field(kw_only=True)
    batch_size: int = field(kw_only=True)
    """Maximum number of images per step over all ranks. The batches of an epoch differ by at most one image."""
    rank: int = field(default=0, kw_only=True)
    world_size: int = field(default=1, kw_only=True)
    """Number of ranks."""
    seed: int = field(default=0, kw_only=True)
    threads: int = field(default=1, kw_only=True)
    """Number of decoding threads."""
    device: torch.device = field(default=torch.device("cpu"), kw_only=True)
    """The device of the batches. A CUDA device also decodes the images."""
    wait_seconds: float = field(default=0.0, init=False)
    """Time for which the consumer has waited for batches in the latest epoch."""
    _sound: set[int] = field(default_factory=set, init=False, repr=False)
    """Indices of unsure images (see `pipelines.dali.Encoded`) that are right."""
    _idle: "Pipelines | None" = field(default=None, init=False, repr=False, compare=False)
    """Pipelines of the latest complete epoch, because creating pipelines takes seconds on a GPU."""
    _stream: torch.cuda.Stream | None = field(default=None, init=False, repr=False, compare=False)
    """The stream that copies batches out of DALI's memory. There is only one, because torch caches memory per stream."""

    def __post_init__(self) -> None:
        if self.train:
            sampler.require_full_ranks(len(self.dataset), self.batch_size, self.world_size)

    @property
    def steps(self) -> int:
        """Global batches per epoch. In validation, a rank skips batches that contain no image for it."""
        return sampler.steps(len(self.dataset), self.batch_size)

    def seen_after(self, steps: int) -> int:
        """Images over all ranks in the first `steps` batches of an epoch, to resume with `epoch(number, seen)`."""
        return sampler.seen_after(len(self.dataset), self.batch_size, steps)

    def epoch(self, number: int, seen: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (>= 0) after the first `seen` images over all ranks.

        With the same `batch_size` and `seen = seen_after(steps)`, these are the same batches as in a complete epoch, even if
        the number of ranks has changed.

        Raises:
            DataError: the remaining images leave a rank without images in some training step. During iteration: an image
                cannot be used; the message names it.
            DecodingError: during iteration, DALI failed for another reason.
        """
        parts = self._rank_indices(number, seen)
        self.wait_seconds = 0.0
        return self._timed(self._batches(number, parts))

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def _rank_indices(self, number: int, seen: int) -> list[sampler.Indices]:
        count = len(self.dataset)
        if self.train:
            sampler.require_full_ranks(count - seen, self.batch_size, self.world_size)
            order = sampler.epoch_order(count, self.seed, number)
        else:
            order = np.arange(count, dtype=np.int64)
        steps = sampler.steps(count - seen, self.batch_size)
        parts = sampler.rank_indices(order[seen:], steps, self.rank, self.world_size)
        return [indices for indices in parts if len(indices)]

    def _batches(self, number: int, parts: list[sampler.Indices]) -> Iterator[Batch]:
        if not parts:
            return
        labels = np.asarray(self.dataset.labels, dtype=np.int64)
        images = self._synthetic(parts) if self.dataset.is_synthetic else self._decoded(number, parts)
        for indices, images_NCHW in zip(parts, images, strict=True):
            if self.train and self.transform.crop_padding is not None and not self.dataset.is_synthetic:
                images_NCHW = shifted(images_NCHW, self.transform, random_numbers(self.seed, number, indices))
            yield Batch(images_NCHW, to_device(torch.from_numpy(labels[indices]), self.device))

    def _synthetic(self, parts: list[sampler.Indices]) -> Iterator[torch.Tensor]:
        """The same noise in every step."""
        shape = (max(map(len, parts)), 3, self.transform.size, self.transform.size)
        noise_NCHW = to_device(torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)), self.device)
        for indices in parts:
            yield noise_NCHW[: len(indices)].clone()

    def _decoded(self, number: int, parts: list[sampler.Indices]) -> Iterator[torch.Tensor]:
        on_gpu = self.device.type == "cuda"
        pipelines = self._pipelines()

        def batches() -> Iterator[tuple[Any, ...]]:
            for indices in parts:
                encoded = pipelines.read()
                self._require_unchanged(indices, encoded.bytes_N)
                self._require_sound(indices[encoded.unsure_N])
                crops = self._crops(number, indices, encoded.sizes_N2)
                yield encoded.images, *(crops if on_gpu else visible_region(crops, self.transform.size))

        def decoded() -> Iterator[tuple[Any, ...]]:
            for done in range(len(parts)):
                try:
                    yield pipelines.decode()
                except RuntimeError as error:
                    self._raise_named(parts[done : done + pipelines.ahead], error)

        with pipelines.epoch(map(self._sources, parts), batches()):
            if on_gpu:
                yield from (self._copy(images) for (images,) in decoded())
            else:
                yield from self._resampled(decoded(), pipelines.settings.max_batch)
        self._idle = pipelines

    def _pipelines(self) -> "Pipelines":
        """Idle pipelines or new ones. After an incomplete epoch, pipelines are not reused because they contain its images."""
        from pipelines.dali import Pipelines, Settings

        max_batch = -(-min(self.batch_size, len(self.dataset)) // self.world_size)
        settings = Settings(self.transform, self.dataset.packed, max_batch, self.threads, _cuda_index(self.device))
        idle, self._idle = self._idle, None
        return idle if idle is not None and idle.settings == settings else Pipelines(settings)

    def _resampled(self, decoded: Iterator[tuple[Any, ...]], max_batch: int) -> Iterator[torch.Tensor]:
        with resampler(self.transform, self.threads, max_batch) as squares:
            running: deque[Callable[[], torch.Tensor]] = deque()
            for regions, settings in decoded:
                running.append(squares.begin(regions, np.array(settings.as_array())))
                if len(running) > 1:  # Resample a batch while the network uses the one before.
                    yield running.popleft()()
            yield from (finish() for finish in running)

    def _sources(self, indices: sampler.Indices) -> list[NDArray[np.uint8]]:
        if self.dataset.packed:
            # Start reading all images of a batch before waiting for the first.
            self.dataset.prefetch(indices.tolist())
            return [self.dataset.encoded(index) for index in indices.tolist()]
        # Strings, because creating a `Path` for each image takes a millisecond per batch.
        files = [os.fsencode(f"{self.dataset.root}/{self.dataset.paths[index]}") for index in indices.tolist()]
        return [np.frombuffer(file, dtype=np.uint8) for file in files]

    def _crops(self, number: int, indices: sampler.Indices, sizes_N2: NDArray[np.int64]) -> CropParams:
        if not self.train:
            return validation_crops(self.transform, sizes_N2)
        return training_crops(self.transform, random_numbers(self.seed, number, indices), sizes_N2)

    def _copy(self, images: Any) -> torch.Tensor:
        """Copies DALI's batch on the GPU, because DALI may reuse its memory while kernels still read it."""
        # A separate stream: on the caller's stream, the copy would wait for the training step.
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call, unused-ignore]
        with torch.cuda.stream(self._stream):
            copy = from_dlpack(images.as_tensor()).clone()
        self._stream.synchronize()
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy

    def _require_unchanged(self, indices: sampler.Indices, bytes_N: NDArray[np.int64]) -> None:
        """Raises DataError for a file whose size is not the listed one, because results are stored under the list's digest."""
        for index, size in zip(indices.tolist(), bytes_N.tolist(), strict=True):
            listed = self.dataset.sizes[index]
            if size != listed and listed:  # 0 in `Dataset.of_files`
                path = self.dataset.listed_in
                when = f"in {path}; run `san data check` again" if path else "when it was listed; run the same command again"
                raise DataError(f"{self.dataset.name_of(index)}: the file has {size} bytes, but had {listed} {when}")

    def _require_sound(self, unsure: sampler.Indices) -> None:
        """Checks each of these images once; for example, decoding a region above the break of a truncated file succeeds."""
        unknown = [index for index in unsure.tolist() if index not in self._sound]
        if not unknown:
            return  # Creating the decoder below takes as long as a batch of small images.
        for broken in broken_images(self.dataset, unknown):
            raise self._unusable(broken)
        self._sound.update(unknown)

    def _raise_named(self, parts: list[sampler.Indices], error: RuntimeError) -> NoReturn:
        """Replaces DALI's error by one that names the first broken image, or all images that DALI was working on."""
        indices = [index for part in parts for index in part.tolist()]
        broken = next(broken_images(self.dataset, indices), None)
        if broken is None:
            names = join_names(map(self.dataset.name_of, indices))
            reason = str(error).rpartition("encountered:")[2].replace("Current pipeline object is no longer valid.", "")
            message = f"DALI failed at one of these images, although it can decode each alone: {names}; its reason: "
            raise DecodingError(message + " ".join(reason.split())) from error
        raise self._unusable(broken) from error

    def _unusable(self, broken: Broken) -> DataError:
        return DataError(
            f"{self.dataset.name_of(broken.index)}: cannot use this image: {broken.reason}; replace or remove it, or leave it "
            "out: run `san data check` on the folder, then `san data pack` if you use shards"
        )


def _cuda_index(device: torch.device) -> int | None:
    """The GPU's number, or None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index
