"""Settings and random numbers of image transforms, computed in numpy; `pipelines.dali` and `pipelines.resample` apply them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

RGB = tuple[float, float, float]

IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)

ATTEMPTS = 10
"""Random crops to try before using the central crop."""
AREA, RATIO = slice(0, ATTEMPTS), slice(ATTEMPTS, 2 * ATTEMPTS)
POSITION = slice(2 * ATTEMPTS, 2 * ATTEMPTS + 2)
MIRROR = 2 * ATTEMPTS + 2
BLOCKS = 6
"""Blocks of four numbers that Philox generates per image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """Random crop and flip for training, resize and center crop for validation.

    The defaults are the paper's values for ImageNet.
    """

    size: int = 224
    """Side of the network's input in pixels."""
    resize: int = 256
    """Length of the shorter side in pixels before the center crop in validation; at least `size`."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Minimum and maximum area of the random crop as fractions of the image, in (0, 1]."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Minimum and maximum width / height of the random crop."""
    crop_padding: int | None = None
    """Replaces random resized crops by those of the CIFAR literature (He et al. 2016, section 4.2): images are resized and
    cropped as in validation, then padded with this many black pixels on each side; a random square of `size` is cut out."""
    flip: bool = True
    """Mirror half of the training images left to right."""
    mean: RGB = IMAGENET_MEAN
    """Subtracted from red, green and blue values from 0 to 1."""
    std: RGB = IMAGENET_STD
    """Divisors after the subtraction, above 0."""


class CropParams(NamedTuple):
    """How each image of a batch is cropped, resized, cropped again to a square and mirrored; int32, in pixels."""

    start_N2: NDArray[np.int32]
    """(top, left) of the first crop."""
    extent_N2: NDArray[np.int32]
    """(height, width) of the first crop."""
    resized_N2: NDArray[np.int32]
    """(height, width) of the crop after resizing."""
    offset_N2: NDArray[np.int32]
    """(top, left) of the square in the resized crop."""
    mirror_N: NDArray[np.int32]
    """1 if the image is mirrored left to right, else 0."""


def training_crops(transform: Transform, numbers: NDArray[np.float64], sizes_N2: NDArray[np.int64]) -> CropParams:
    """A random resized crop, mirrored at random, for images with these heights and widths and these `random_numbers`.

    With `crop_padding`, the crop is central, and `shifted` moves its square.
    """
    if transform.crop_padding is not None:
        return validation_crops(transform, sizes_N2)._replace(mirror_N=random_mirrors(transform, numbers))
    start_N2, extent_N2 = random_crops(transform, numbers, sizes_N2)
    resized_N2 = np.full_like(extent_N2, transform.size)
    return CropParams(start_N2, extent_N2, resized_N2, np.zeros_like(resized_N2), random_mirrors(transform, numbers))


def validation_crops(transform: Transform, sizes_N2: NDArray[np.int64]) -> CropParams:
    """The center of images with these heights and widths after the shorter side was resized to `resize`.

    Rounds like torchvision, because all published results do.
    """
    resized_N2 = transform.resize * sizes_N2 // sizes_N2.min(axis=1, keepdims=True)
    offset_N2 = np.rint((resized_N2 - transform.size) / 2)
    columns = (np.zeros_like(sizes_N2), sizes_N2, resized_N2, offset_N2, np.zeros(len(sizes_N2)))
    return CropParams(*(column.astype(np.int32) for column in columns))


def random_numbers(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """One row of random numbers, uniform in [0, 1), for each index (>= 0) in the dataset.

    A row depends only on the seed, the epoch and its index.
    """
    # Jumping to each index with one generator is three times as fast as creating a generator for each image.
    philox = np.random.Philox(key=np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64))
    generator = np.random.Generator(philox)
    numbers = np.empty((len(indices), 4 * BLOCKS))
    position = 0
    for row, index in zip(numbers, indices.tolist(), strict=True):
        philox.advance(BLOCKS * (index - position))
        generator.random(out=row)
        position = index + 1
    return numbers


def random_crops(
    transform: Transform, numbers: NDArray[np.float64], sizes_N2: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(top, left) and (height, width) of the usual random resized crops for images with these heights and widths, in pixels.

    Draws an area and an aspect ratio (uniform in its logarithm) ten times. The first crop that fits into the image is put at a
    random position. If none fits, the crop is the largest central one with an allowed ratio.
    """
    (min_area, max_area), (min_ratio, max_ratio) = transform.crop_area, transform.crop_ratio
    height_N, width_N = sizes_N2.T
    area_NA = (min_area + (max_area - min_area) * numbers[:, AREA]) * (height_N * width_N)[:, None]
    ratio_NA = np.exp(np.log(min_ratio) + (np.log(max_ratio) - np.log(min_ratio)) * numbers[:, RATIO])
    tried_N2A = np.rint(np.sqrt(np.stack([area_NA / ratio_NA, area_NA * ratio_NA], axis=1)))
    fits_NA = ((tried_N2A >= 1) & (tried_N2A <= sizes_N2[:, :, None])).all(axis=1)

    first_N2 = tried_N2A[np.arange(len(sizes_N2)), :, fits_NA.argmax(axis=1)]
    position_N2 = np.floor((sizes_N2 - first_N2 + 1) * numbers[:, POSITION])
    largest_N2 = np.clip(np.rint(np.stack([width_N / min_ratio, height_N * max_ratio], axis=1)), 1, sizes_N2)
    central_N2 = (sizes_N2 - largest_N2) // 2

    any_N1 = fits_NA.any(axis=1)[:, None]
    start_N2, extent_N2 = np.where(any_N1, position_N2, central_N2), np.where(any_N1, first_N2, largest_N2)
    return start_N2.astype(np.int32), extent_N2.astype(np.int32)


def shifted(images_NCHW: torch.Tensor, transform: Transform, numbers: NDArray[np.float64]) -> torch.Tensor:
    """Random crops from normalized squares that are padded with `crop_padding` black pixels."""
    assert transform.crop_padding is not None
    H, W = images_NCHW.shape[2:]
    device = images_NCHW.device
    start_N2 = np.floor((2 * transform.crop_padding + 1) * numbers[:, POSITION]) - transform.crop_padding
    top_N1, left_N1 = torch.from_numpy(start_N2.astype(np.int64)).to(device).split(1, dim=1)
    row_NH, column_NW = top_N1 + torch.arange(H, device=device), left_N1 + torch.arange(W, device=device)
    inside_N1HW = ((row_NH >= 0) & (row_NH < H))[:, None, :, None] & ((column_NW >= 0) & (column_NW < W))[:, None, None, :]
    row_NCHW = row_NH.clamp(0, H - 1)[:, None, :, None].expand(images_NCHW.shape)
    column_NCHW = column_NW.clamp(0, W - 1)[:, None, None, :].expand(images_NCHW.shape)
    black_C = (-torch.tensor(transform.mean) / torch.tensor(transform.std)).to(device)
    moved_NCHW = images_NCHW.gather(2, row_NCHW).gather(3, column_NCHW)
    return torch.where(inside_N1HW, moved_NCHW, black_C[:, None, None])


def random_mirrors(transform: Transform, numbers: NDArray[np.float64]) -> NDArray[np.int32]:
    """1 for each training image that is mirrored, else 0."""
    return (numbers[:, MIRROR] < 0.5 * transform.flip).astype(np.int32)
