"""Decoded images to normalised squares on the CPU, in threads of its own: resize, crop, mirror and normalise in one step.

DALI's resize takes as long as its decoder on a CPU, so this is an operator of `cuda_ext`. Where that cannot be built, torch
does the same, slower.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from cuda_ext.build import load as load_kernels
from pipelines.transform import Transform, Windows

KEPT = 4
"""Batches whose memory is kept for later ones."""


def parts(windows: Windows, size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The parts of the images that have to be decoded: (top, left) and (height, width), pixels."""
    origin_N2, extent_N2 = _shown(windows, size)
    return windows.start_N2 + origin_N2, extent_N2


@functools.cache
def _has_operator() -> bool:
    """Whether the operator runs; warns once if it does not."""
    reason = load_kernels().get("resample")
    if reason is not None:
        warnings.warn(f"images are resized with slower torch operators: {reason}", stacklevel=2)
    return reason is None


def _shown(windows: Windows, size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What the squares show of the crops: (top, left) in the crop and (height, width), with a pixel to spare."""
    if not _has_operator():
        return np.zeros_like(windows.extent_N2), windows.extent_N2  # torch resizes nothing but whole crops
    step_N2 = windows.extent_N2 / windows.length_N2
    reach_N2 = np.maximum(step_N2, 1) + 1
    begin_N2 = np.floor((windows.offset_N2 + 0.5) * step_N2 - reach_N2)
    end_N2 = np.ceil((windows.offset_N2 + size - 0.5) * step_N2 + reach_N2)
    begin_N2, end_N2 = np.maximum(begin_N2, 0), np.minimum(end_N2, windows.extent_N2)
    return begin_N2.astype(np.int32), (end_N2 - begin_N2).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Resampler:
    """Makes the squares of a `transform`, batch after batch."""

    transform: Transform
    pool: ThreadPoolExecutor
    threads: int
    memory: "_Memory"

    def begin(self, images: Any, windows: Windows) -> Callable[[], torch.Tensor]:
        """Starts with a batch of decoded parts, (height, width, 3) uint8 each; the call that comes back waits for its squares,
        float32 NCHW."""
        pictures = [from_dlpack(image) for image in images]
        out_NCHW = self.memory.take(len(pictures))
        rows_N9 = _rows(windows, self.transform.size)
        scale, shift = _affine(self.transform)
        run = torch.ops.san.resample if _has_operator() else _by_torch
        edges = [len(pictures) * k // self.threads for k in range(self.threads + 1)]
        pieces = [slice(begin, end) for begin, end in pairwise(edges) if begin < end]
        begun = [self.pool.submit(run, pictures[piece], rows_N9[piece], scale, shift, out_NCHW[piece]) for piece in pieces]

        def finished() -> torch.Tensor:
            for piece in begun:
                piece.result()
            return out_NCHW

        return finished


@contextmanager
def resampler(transform: Transform, threads: int, max_batch: int) -> Iterator[Resampler]:
    """A resampler; its threads end with the block."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield Resampler(transform, pool, threads, _Memory((max_batch, 3, transform.size, transform.size)))
    finally:
        pool.shutdown(cancel_futures=True)


class _Memory:
    """Memory of batches, used again when nobody holds a tensor of it any more: fresh memory costs as much as the resize."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._arrays: list[NDArray[np.float32]] = []
        # By the array's number: the view that a tensor was made of. The tensor and all views of it hold it, and nobody else.
        self._held: WeakValueDictionary[int, NDArray[np.float32]] = WeakValueDictionary()

    def take(self, batch: int) -> torch.Tensor:
        """A tensor for so many images."""
        number = next((number for number in range(len(self._arrays)) if number not in self._held), len(self._arrays))
        array = self._arrays[number] if number < len(self._arrays) else torch.empty(self._shape).numpy()
        if len(self._arrays) == number < KEPT:
            self._arrays.append(array)
        self._held[number] = view = array[:batch]
        return torch.from_numpy(view)


def _rows(windows: Windows, size: int) -> torch.Tensor:
    """As the operator wants it (cuda_ext/schemas.py)."""
    origin_N2, _ = _shown(windows, size)
    columns = windows.extent_N2, origin_N2, windows.length_N2, windows.offset_N2, windows.mirror_N[:, None]
    return torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.int64))


@cache
def _affine(transform: Transform) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of each channel, for pixels of 0 to 255."""
    mean, std = torch.tensor(transform.mean), torch.tensor(transform.std)
    return 1 / (255 * std), -mean / std


def _by_torch(
    images: list[torch.Tensor], rows_N9: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, out_NCHW: torch.Tensor
) -> None:
    """The operator's definition, for whole crops."""
    size = out_NCHW.shape[-1]
    for image, row, out_CHW in zip(images, rows_N9.tolist(), out_NCHW, strict=True):
        _, _, _, _, height, width, top, left, mirror = row
        # The first dimension must be there before the others change places: torch then sees channels last, and is faster.
        x_1CHW = image[None].permute(0, 3, 1, 2)
        resized_CHW = interpolate(x_1CHW, (height, width), mode="bilinear", antialias=True)[0]
        square_CHW = resized_CHW[:, top : top + size, left : left + size]
        out_CHW.copy_(square_CHW.flip(2) if mirror else square_CHW)
        out_CHW.mul_(scale[:, None, None]).add_(shift[:, None, None])
