"""What happens to an image between file and network, as values; `pipelines.dali` carries it out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.errors import TransformError

RGB = tuple[float, float, float]

IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)

MANIPULATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda images_NCHW: images_NCHW,
    "rotate90": lambda images_NCHW: torch.rot90(images_NCHW, -1, (2, 3)),
    "rotate180": lambda images_NCHW: torch.rot90(images_NCHW, 2, (2, 3)),
    "rotate270": lambda images_NCHW: torch.rot90(images_NCHW, -3, (2, 3)),
    "upside_down": lambda images_NCHW: images_NCHW.flip(2),
}
"""Exact movements of pixels, of which robustness is measured; rotations are clockwise."""

ATTEMPTS = 10
"""Crops that are tried before the central one is taken."""
AREA, RATIO = slice(0, ATTEMPTS), slice(ATTEMPTS, 2 * ATTEMPTS)
PLACE = slice(2 * ATTEMPTS, 2 * ATTEMPTS + 2)
MIRROR = 2 * ATTEMPTS + 2
BLOCKS = 6
"""Philox makes four numbers at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """Random resized crop and flip for training, resize and center crop for validation.

    The defaults are the paper's values for ImageNet.

    Raises:
        TransformError: a field is outside the range that its description names.
    """

    size: int = 224
    """Side of the square that the network sees, pixels."""
    resize: int = 256
    """Length of the shorter side before the center crop of validation, pixels; at least `size`."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Least and greatest area of the random crop, as parts of the image, within 0..1."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and greatest width / height of the random crop."""
    flip: bool = True
    """Mirror half of the training images left to right."""
    mean: RGB = IMAGENET_MEAN
    """Subtracted from red, green, blue in 0..1."""
    std: RGB = IMAGENET_STD
    """Divides after that; above 0."""
    manipulation: str = "none"
    """How the finished squares are turned, in training and validation: a key of `MANIPULATIONS`."""

    def __post_init__(self) -> None:
        area, ratio = self.crop_area, self.crop_ratio
        demands = (
            ("size", self.size >= 1, "at least 1 pixel"),
            ("resize", self.resize >= self.size, f"at least size ({self.size})"),
            ("crop_area", 0 < area[0] <= area[1] <= 1, "two increasing numbers between 0 and 1"),
            ("crop_ratio", 0 < ratio[0] <= ratio[1], "two increasing numbers above 0"),
            ("mean", len(self.mean) == 3, "three numbers (red, green, blue)"),
            ("std", len(self.std) == 3 and min(self.std) > 0, "three numbers above 0"),
            ("manipulation", self.manipulation in MANIPULATIONS, f"one of {', '.join(MANIPULATIONS)}"),
        )
        broken = {name: f"must be {wanted}, not {getattr(self, name)}" for name, holds, wanted in demands if not holds}
        if broken:
            raise TransformError(broken)


class Windows(NamedTuple):
    """What becomes of each image of a batch, int32, pixels: a crop of it is resized, cropped again to the square, mirrored."""

    start_N2: NDArray[np.int32]
    """(top, left) of the crop."""
    extent_N2: NDArray[np.int32]
    """(height, width) of the crop."""
    length_N2: NDArray[np.int32]
    """(height, width) that it is resized to."""
    offset_N2: NDArray[np.int32]
    """(top, left) of the square in that."""
    mirror_N: NDArray[np.int32]
    """1 for an image that is mirrored left to right, else 0."""


def training_windows(transform: Transform, draws: NDArray[np.float64], sizes_N2: NDArray[np.int64]) -> Windows:
    """For images of these heights and widths: a random resized crop, mirrored at random."""
    start_N2, extent_N2 = crop_windows(transform, draws, sizes_N2)
    whole_N2 = np.full_like(extent_N2, transform.size)
    return Windows(start_N2, extent_N2, whole_N2, np.zeros_like(whole_N2), mirrored(transform, draws))


def validation_windows(transform: Transform, sizes_N2: NDArray[np.int64]) -> Windows:
    """For images of these heights and widths: the centre, after the shorter side has become `resize` long.

    Rounded as torchvision does, of which all published numbers are.
    """
    length_N2 = transform.resize * sizes_N2 // sizes_N2.min(axis=1, keepdims=True)
    offset_N2 = np.rint((length_N2 - transform.size) / 2)
    columns = (np.zeros_like(sizes_N2), sizes_N2, length_N2, offset_N2, np.zeros(len(sizes_N2)))
    return Windows(*(column.astype(np.int32) for column in columns))


def draws(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """The random numbers of images, uniform in [0, 1): a row for each index (>= 0) in the dataset.

    A row depends on the seed, the epoch and its index alone, and not on the rows beside it.
    """
    # One generator jumps to the place of each index: to make one for each image takes three times as long.
    philox = np.random.Philox(key=np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64))
    generator = np.random.Generator(philox)
    numbers = np.empty((len(indices), 4 * BLOCKS))
    reached = 0
    for row, index in zip(numbers, indices.tolist(), strict=True):
        philox.advance(BLOCKS * (index - reached))
        generator.random(out=row)
        reached = index + 1
    return numbers


def crop_windows(
    transform: Transform, draws: NDArray[np.float64], sizes_N2: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where images of these heights and widths are cropped for training: (top, left) and (height, width), pixels.

    The usual random resized crop: ten times an area and a ratio of the sides (uniform in its logarithm) are drawn; the first
    crop that fits into the image is put at a random place. Where none fits, it is the largest central one with such a ratio.
    """
    (least, most), (narrow, wide) = transform.crop_area, transform.crop_ratio
    height_N, width_N = sizes_N2.T
    area_NA = (least + (most - least) * draws[:, AREA]) * (height_N * width_N)[:, None]
    ratio_NA = np.exp(np.log(narrow) + (np.log(wide) - np.log(narrow)) * draws[:, RATIO])
    tried_N2A = np.rint(np.sqrt(np.stack([area_NA / ratio_NA, area_NA * ratio_NA], axis=1)))
    fits_NA = ((tried_N2A >= 1) & (tried_N2A <= sizes_N2[:, :, None])).all(axis=1)

    found_N2 = tried_N2A[np.arange(len(sizes_N2)), :, fits_NA.argmax(axis=1)]
    placed_N2 = np.floor((sizes_N2 - found_N2 + 1) * draws[:, PLACE])
    largest_N2 = np.clip(np.rint(np.stack([width_N / narrow, height_N * wide], axis=1)), 1, sizes_N2)
    central_N2 = (sizes_N2 - largest_N2) // 2

    any_N1 = fits_NA.any(axis=1)[:, None]
    start_N2, extent_N2 = np.where(any_N1, placed_N2, central_N2), np.where(any_N1, found_N2, largest_N2)
    return start_N2.astype(np.int32), extent_N2.astype(np.int32)


def mirrored(transform: Transform, draws: NDArray[np.float64]) -> NDArray[np.int32]:
    """1 for each training image that is mirrored, else 0."""
    return (draws[:, MIRROR] < 0.5 * transform.flip).astype(np.int32)
