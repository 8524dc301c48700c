"""Makes normalized squares from decoded images on the CPU: resizes, crops, mirrors and normalizes in one step, in threads.

DALI's resize takes as long as its decoder on a CPU, so this is an operator of `cuda_ext`. If the operator cannot be built,
torch operators do the same, more slowly.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from cuda_ext.build import load as load_kernels
from pipelines.transform import CropParams, Transform

KEPT = 4
"""Batches whose memory is reused."""


class Region(NamedTuple):
    """The parts of a batch of images that must be decoded, and the operator's settings for them."""

    start_N2: NDArray[np.int32]
    """(top, left) in pixels."""
    extent_N2: NDArray[np.int32]
    """(height, width) in pixels."""
    settings_N9: NDArray[np.int64]
    """See `resample` in cuda_ext/schemas.py."""


def visible_region(crops: CropParams, size: int) -> Region:
    """The part of each crop that its square of `size` pixels shows, with a margin of a pixel."""
    if _has_operator():
        scale_N2 = crops.extent_N2 / crops.resized_N2
        reach_N2 = np.maximum(scale_N2, 1) + 1
        begin_N2 = np.floor((crops.offset_N2 + 0.5) * scale_N2 - reach_N2)
        end_N2 = np.ceil((crops.offset_N2 + size - 0.5) * scale_N2 + reach_N2)
        begin_N2, end_N2 = np.maximum(begin_N2, 0), np.minimum(end_N2, crops.extent_N2)
        origin_N2, extent_N2 = begin_N2.astype(np.int32), (end_N2 - begin_N2).astype(np.int32)
    else:
        origin_N2, extent_N2 = np.zeros_like(crops.extent_N2), crops.extent_N2  # torch can only resize whole crops
    columns = crops.extent_N2, origin_N2, crops.resized_N2, crops.offset_N2, crops.mirror_N[:, None]
    return Region(crops.start_N2 + origin_N2, extent_N2, np.concatenate(columns, axis=1, dtype=np.int64))


@cache
def _has_operator() -> bool:
    """Whether the operator runs; warns once if it does not."""
    reason = load_kernels().get("resample")
    if reason is not None:
        warnings.warn(f"images are resized with slower torch operators: {reason}", stacklevel=2)
    return reason is None


@dataclass(frozen=True, slots=True)
class Resampler:
    """Makes the squares of a `transform` in threads."""

    transform: Transform
    pool: ThreadPoolExecutor
    threads: int
    memory: "_Memory"

    def begin(self, images: Any, settings_N9: NDArray[np.int64]) -> Callable[[], torch.Tensor]:
        """Starts to resample decoded regions, each (height, width, 3) uint8.

        Returns a function that waits for the result, float32 NCHW.
        """
        pictures = [from_dlpack(image) for image in images]
        out_NCHW = self.memory.take(len(pictures))
        rows_N9 = torch.from_numpy(settings_N9)
        scale, shift = _affine(self.transform)
        run = torch.ops.san.resample if _has_operator() else resample_by_torch
        edges = [len(pictures) * k // self.threads for k in range(self.threads + 1)]
        pieces = [slice(begin, end) for begin, end in pairwise(edges) if begin < end]
        running = [self.pool.submit(run, pictures[piece], rows_N9[piece], scale, shift, out_NCHW[piece]) for piece in pieces]

        def finish() -> torch.Tensor:
            for piece in running:
                piece.result()
            return out_NCHW

        return finish


@contextmanager
def resampler(transform: Transform, threads: int, max_batch: int) -> Iterator[Resampler]:
    """A resampler whose threads end with the block."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield Resampler(transform, pool, threads, _Memory((max_batch, 3, transform.size, transform.size)))
    finally:
        pool.shutdown(cancel_futures=True)


class _Memory:
    """Reuses the memory of a batch once its tensor is gone, because allocating new memory takes as long as resizing."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._arrays: list[NDArray[np.float32]] = []
        # For each array, the view from which its tensor was made. Only the tensor and its views keep it alive.
        self._held: WeakValueDictionary[int, NDArray[np.float32]] = WeakValueDictionary()

    def take(self, count: int) -> torch.Tensor:
        """A tensor for `count` images."""
        number = next((number for number in range(len(self._arrays)) if number not in self._held), len(self._arrays))
        array = self._arrays[number] if number < len(self._arrays) else torch.empty(self._shape).numpy()
        if len(self._arrays) == number < KEPT:
            self._arrays.append(array)
        self._held[number] = view = array[:count]
        return torch.from_numpy(view)


@cache
def _affine(transform: Transform) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of each channel for pixel values from 0 to 255."""
    mean, std = torch.tensor(transform.mean), torch.tensor(transform.std)
    return 1 / (255 * std), -mean / std


def resample_by_torch(
    images: list[torch.Tensor], rows_N9: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, out_NCHW: torch.Tensor
) -> None:
    """The same as the operator, for whole crops."""
    size = out_NCHW.shape[-1]
    for image, row, out_CHW in zip(images, rows_N9.tolist(), out_NCHW, strict=True):
        _, _, _, _, height, width, top, left, mirror = row
        # Adding the batch dimension before permuting makes torch use its faster channels-last kernel.
        x_1CHW = image[None].permute(0, 3, 1, 2)
        resized_CHW = interpolate(x_1CHW, (height, width), mode="bilinear", antialias=True)[0]
        square_CHW = resized_CHW[:, top : top + size, left : left + size]
        out_CHW.copy_(square_CHW.flip(2) if mirror else square_CHW)
        out_CHW.mul_(scale[:, None, None]).add_(shift[:, None, None])
