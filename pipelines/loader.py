"""Batches of a data set on a device, epoch by epoch, exactly repeatable."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from pipelines import order
from pipelines.augment import Transform
from pipelines.check import broken_images
from pipelines.dataset import Dataset
from pipelines.errors import DataError


class Batch(NamedTuple):
    """Normalised images and their classes, on the loader's device; the caller's own, no buffer is reused."""

    images_NCHW: torch.Tensor
    """float32"""
    labels_N: torch.Tensor
    """int64"""


@dataclass(slots=True)
class Loader:
    """The share of one rank in the batches of a data set.

    Training shuffles and augments, validation keeps the order; over all ranks an epoch has every image once.
    What epoch k contains depends on the fields and on k only, never on which epochs ran before, so that a
    restarted run continues bit for bit.

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

    def __post_init__(self) -> None:
        if self.batch < 1 or self.threads < 1 or self.seed < 0 or not 0 <= self.rank < self.world:
            raise DataError(
                "A loader needs batch >= 1, threads >= 1, seed >= 0 and 0 <= rank < world, not "
                f"batch={self.batch}, threads={self.threads}, seed={self.seed}, rank={self.rank}, "
                f"world={self.world}."
            )
        if self.train:
            order.require_full_ranks(len(self.dataset), self.batch, self.world)

    @property
    def steps(self) -> int:
        """Global batches per epoch; in validation a rank skips those that have no image for it."""
        return order.steps(len(self.dataset), self.batch)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of epoch `number` (>= 0).

        Raises:
            DataError: a file is missing or cannot be decoded; the sentence names it.
        """
        self.waited = 0.0
        batches = self._batches(number)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _batches(self, number: int) -> Iterator[Batch]:
        shares = self._shares(number)
        if not shares:
            return
        asked: list[order.Indices] = []
        pipeline = self._pipeline(number, shares, asked)
        labels = np.asarray(self.dataset.labels, dtype=np.int64)
        for done, share in enumerate(shares):
            try:
                (images,) = pipeline.run()
            except RuntimeError as error:
                self._raise_named(asked[done:], error)
            yield Batch(self._own(images), torch.from_numpy(labels[share]).to(self.device))

    def _shares(self, number: int) -> list[order.Indices]:
        count = len(self.dataset)
        sequence = np.arange(count, dtype=np.int64)
        if self.train:
            sequence = order.epoch_order(count, self.seed, number)
        shares = order.share(sequence, self.steps, self.rank, self.world)
        return [share for share in shares if len(share)]

    def _pipeline(self, number: int, shares: list[order.Indices], asked: list[order.Indices]) -> Any:
        # A pipeline per epoch costs milliseconds and makes the random crops a function of the seed alone: the
        # random state of a pipeline that lives on would depend on the epochs before.
        from pipelines import graph

        def names() -> Iterator[list[graph.FileName]]:
            for share in shares:
                asked.append(share)
                yield [graph.encode_name(path) for path in self._files(share)]

        return graph.image_pipeline(
            self.transform,
            names(),
            train=self.train,
            max_batch=max(map(len, shares)),
            seed=self._pipeline_seed(number),
            threads=self.threads,
            device_id=_cuda_index(self.device),
        )

    def _pipeline_seed(self, number: int) -> int:
        return int(np.random.SeedSequence([self.seed, number, self.rank, self.world]).generate_state(1)[0])

    def _files(self, share: order.Indices) -> list[str]:
        return [str(self.dataset.root / self.dataset.paths[index]) for index in share]

    def _own(self, images: Any) -> torch.Tensor:
        """A copy of DALI's output, which DALI may reuse as soon as we let go of it."""
        if self.device.type != "cuda":
            return from_dlpack(images.as_tensor()).clone()
        # On a stream of its own the copy does not queue behind the training step, so we may wait for it.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call, unused-ignore]
        with torch.cuda.stream(stream):
            copy = from_dlpack(images.as_tensor()).clone()
        stream.synchronize()
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy

    def _raise_named(self, in_flight: list[order.Indices], error: RuntimeError) -> NoReturn:
        """Turns DALI's error into a sentence on the first broken file; any other failure passes as it is."""
        paths = [self.dataset.paths[index] for share in in_flight for index in share]
        broken = next(broken_images(self.dataset.root, paths), None)
        if broken is None:
            raise error
        raise DataError(
            f"The image {self.dataset.root / broken} cannot be decoded: expected a JPEG or PNG file, so replace or remove it."
        ) from error


def _cuda_index(device: torch.device) -> int | None:
    """The GPU's number, None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index
