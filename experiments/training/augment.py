"""TrivialAugment Wide and RandAugment on a batch of images, with the operations and strengths of torchvision.

The random numbers come from torch's random state, which is in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample

from pipelines import Transform
from pipelines.loader import to_device

BINS = 31
"""Number of strengths, from none to the largest."""
RAND_OPERATIONS, RAND_BIN = 2, 9
"""Of RandAugment: operations for each image, and the bin of their strength."""

Change = Callable[[Tensor, Tensor], Tensor]
"""Changes images with values from 0 to 1, [n, 3, H, W], given the strength for each, [n]."""


def _geometric(matrix: Callable[[Tensor, int], Tensor]) -> Change:
    """A change that moves pixels: nearest neighbors, and black where the image ends.

    Given strengths and the side of the images, `matrix` returns where each pixel comes from, [n, 2, 3], in units of half a
    side, from the center.
    """

    def move(images_NCHW: Tensor, strength_N: Tensor) -> Tensor:
        grid_NHW2 = affine_grid(matrix(strength_N, images_NCHW.shape[-1]), list(images_NCHW.shape), align_corners=False)
        return grid_sample(images_NCHW, grid_NHW2, mode="nearest", align_corners=False)

    return move


def _matrix(rows: Sequence[Sequence[Tensor | float]], like_N: Tensor) -> Tensor:
    return torch.stack([torch.stack([like_N.new_zeros(len(like_N)) + value for value in row], 1) for row in rows], 1)


def _shear_x(strength_N: Tensor, size: int) -> Tensor:
    """The first row stays in place."""
    return _matrix(((1.0, -strength_N, -strength_N), (0.0, 1.0, 0.0)), strength_N)


def _shear_y(strength_N: Tensor, size: int) -> Tensor:
    return _matrix(((1.0, 0.0, 0.0), (-strength_N, 1.0, -strength_N)), strength_N)


def _translate_x(strength_N: Tensor, size: int) -> Tensor:
    """By whole pixels."""
    return _matrix(((1.0, 0.0, -2 * strength_N.trunc() / size), (0.0, 1.0, 0.0)), strength_N)


def _translate_y(strength_N: Tensor, size: int) -> Tensor:
    return _matrix(((1.0, 0.0, 0.0), (0.0, 1.0, -2 * strength_N.trunc() / size)), strength_N)


def _rotate(strength_N: Tensor, size: int) -> Tensor:
    """In degrees, counterclockwise."""
    radians_N = strength_N * (math.pi / 180)
    cos_N, sin_N = radians_N.cos(), radians_N.sin()
    return _matrix(((cos_N, -sin_N, 0.0), (sin_N, cos_N, 0.0)), strength_N)


def _blended(other: Callable[[Tensor], Tensor]) -> Change:
    """A change that mixes the images with another version of them; a strength of 0 keeps them, -1 is the other version."""

    def blend(images_NCHW: Tensor, strength_N: Tensor) -> Tensor:
        factor_N111 = 1 + strength_N[:, None, None, None]
        return torch.lerp(other(images_NCHW), images_NCHW, factor_N111).clamp(0, 1)

    return blend


def _gray(images_NCHW: Tensor) -> Tensor:
    """With the shares of red, green and blue of ITU-R 601-2."""
    red_NHW, green_NHW, blue_NHW = images_NCHW.unbind(1)
    return (0.2989 * red_NHW + 0.587 * green_NHW + 0.114 * blue_NHW)[:, None].expand_as(images_NCHW)


def _mean_gray(images_NCHW: Tensor) -> Tensor:
    return _gray(images_NCHW).mean((1, 2, 3), keepdim=True).expand_as(images_NCHW)


def _smooth(images_NCHW: Tensor) -> Tensor:
    """A 3x3 filter, except at the border."""
    kernel_33 = images_NCHW.new_ones(3, 3)
    kernel_33[1, 1] = 5
    smooth_NCHW = images_NCHW.clone()
    filtered_NCHW = conv2d(images_NCHW.flatten(0, 1)[:, None], (kernel_33 / 13)[None, None])
    smooth_NCHW[:, :, 1:-1, 1:-1] = filtered_NCHW.view_as(smooth_NCHW[:, :, 1:-1, 1:-1])
    return smooth_NCHW


def _posterize(images_NCHW: Tensor, bits_N: Tensor) -> Tensor:
    """Keeps the highest bits of each value."""
    step_N111 = (2 ** (8 - bits_N.round()))[:, None, None, None]
    return (255 * images_NCHW).round().div(step_N111).floor().mul(step_N111) / 255


def _solarize(images_NCHW: Tensor, threshold_N: Tensor) -> Tensor:
    """Inverts the values from a threshold on. Values have rounding errors, and thresholds may be between two levels."""
    return torch.where(images_NCHW >= threshold_N[:, None, None, None] - 0.25 / 255, 1 - images_NCHW, images_NCHW)


def _autocontrast(images_NCHW: Tensor, strength_N: Tensor) -> Tensor:
    """Stretches each channel to the range from 0 to 1, unless it has only one value."""
    low_NC11, high_NC11 = images_NCHW.amin((2, 3), keepdim=True), images_NCHW.amax((2, 3), keepdim=True)
    stretched_NCHW = (images_NCHW - low_NC11) / (high_NC11 - low_NC11)
    return torch.where(high_NC11 - low_NC11 > 0.5 / 255, stretched_NCHW, images_NCHW)


def _equalize(images_NCHW: Tensor, strength_N: Tensor) -> Tensor:
    """Makes all values of a channel about equally frequent, as Pillow does."""
    values_RP = (255 * images_NCHW).round().long().flatten(0, 1).flatten(1)  # R channels of P pixels
    counts_R256 = torch.zeros(len(values_RP), 256, dtype=torch.long, device=values_RP.device)
    counts_R256.scatter_add_(1, values_RP, torch.ones_like(values_RP))
    highest_R1 = values_RP.amax(1, keepdim=True)
    step_R1 = (values_RP.shape[1] - counts_R256.gather(1, highest_R1)) // 255
    below_R256 = counts_R256.cumsum(1) - counts_R256
    table_R256 = ((below_R256 + step_R1 // 2) // step_R1.clamp(min=1)).clamp(max=255)
    equal_RP = torch.where(step_R1 == 0, values_RP, table_R256.gather(1, values_RP))
    return (equal_RP / 255).to(images_NCHW.dtype).view_as(images_NCHW)


class Operation(NamedTuple):
    """A change with its strengths, from the first to the last of `BINS`."""

    change: Change
    trivial: tuple[float, float]
    """Strengths in TrivialAugment Wide."""
    rand: tuple[float, float]
    """Strengths in RandAugment."""
    signed: bool = True
    """Whether half of the strengths are negative."""


NO_STRENGTH = (0.0, 0.0)


def operations(size: int) -> list[Operation]:
    """The operations of both policies, for images with this side in pixels."""
    shift = size * 150 / 331
    return [
        Operation(lambda images_NCHW, strength_N: images_NCHW, NO_STRENGTH, NO_STRENGTH),
        Operation(_geometric(_shear_x), (0, 0.99), (0, 0.3)),
        Operation(_geometric(_shear_y), (0, 0.99), (0, 0.3)),
        Operation(_geometric(_translate_x), (0, 32), (0, shift)),
        Operation(_geometric(_translate_y), (0, 32), (0, shift)),
        Operation(_geometric(_rotate), (0, 135), (0, 30)),
        Operation(_blended(torch.zeros_like), (0, 0.99), (0, 0.9)),  # brightness
        Operation(_blended(_gray), (0, 0.99), (0, 0.9)),  # color
        Operation(_blended(_mean_gray), (0, 0.99), (0, 0.9)),  # contrast
        Operation(_blended(_smooth), (0, 0.99), (0, 0.9)),  # sharpness
        Operation(_posterize, (8, 2), (8, 4), signed=False),
        Operation(_solarize, (1, 0), (1, 0), signed=False),
        Operation(_autocontrast, NO_STRENGTH, NO_STRENGTH),
        Operation(_equalize, NO_STRENGTH, NO_STRENGTH),
    ]


class Augmentation:
    """Changes each image of a batch at random.

    Args:
        policy: `trivial` or `rand`.
        transform: size and normalization of the images.
        device: where the images are.
    """

    def __init__(self, policy: str, transform: Transform, device: torch.device) -> None:
        self.is_rand = policy == "rand"
        self.operations = operations(transform.size)
        ranges = [each.rand if self.is_rand else each.trivial for each in self.operations]
        self.strengths = torch.stack([torch.linspace(*ends, BINS) for ends in ranges])
        self.mean_311, self.std_311 = (
            to_device(torch.tensor(values)[:, None, None], device) for values in (transform.mean, transform.std)
        )

    def __call__(self, images_NCHW: Tensor) -> Tensor:
        """Takes and returns normalized images."""
        pixels_NCHW = (images_NCHW * self.std_311 + self.mean_311).clamp(0, 1)
        for _ in range(RAND_OPERATIONS if self.is_rand else 1):
            self._change(pixels_NCHW)
        return (pixels_NCHW - self.mean_311) / self.std_311

    def _change(self, pixels_NCHW: Tensor) -> None:
        """Applies a random operation to each image, in place."""
        N, device = len(pixels_NCHW), pixels_NCHW.device
        operation_N = torch.randint(len(self.operations), (N,))
        bin_N = torch.full((N,), RAND_BIN) if self.is_rand else torch.randint(BINS, (N,))
        sign_N = 1 - 2 * torch.randint(2, (N,))
        strength_N = self.strengths[operation_N, bin_N]
        for number, operation in enumerate(self.operations):
            chosen = (operation_N == number).nonzero()[:, 0]
            if len(chosen):
                strength = strength_N[chosen] * (sign_N[chosen] if operation.signed else 1)
                chosen, strength = to_device(chosen, device), to_device(strength, device)
                pixels_NCHW[chosen] = operation.change(pixels_NCHW[chosen], strength)
