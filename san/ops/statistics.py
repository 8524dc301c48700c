"""Means and variances over all pairs, and over all patches, from sums over footprints: no pair is visited.

With reflection at the border, how often pixel j is seen at offset o by the pixels of one axis is a small matrix, so every sum over
pairs is a product of maps with such matrices. All is plain differentiable torch, in float64: where neighbours differ little, as
those of a slope do, large terms cancel.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def pair_statistics(center_NdHW: Tensor, around_NdHW: Tensor, kernel_size: int, products: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of delta over all pairs, float64 [d] each.

    delta is center_i * around_j in the first `products` channels and center_i - around_j in the others.
    """
    x, y = center_NdHW.double(), around_NdHW.double()
    if products == 0:
        return _difference(x, y, kernel_size)
    if products == x.shape[1]:
        return _product(x, y, kernel_size)
    parts = _product(x[:, :products], y[:, :products], kernel_size), _difference(x[:, products:], y[:, products:], kernel_size)
    mean, var = (torch.cat(pair) for pair in zip(*parts, strict=True))
    return mean, var


def _difference(x: Tensor, y: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    x_mean, y_mean = x.mean((0, 2, 3)), y.mean((0, 2, 3))
    x, y = x - x_mean[:, None, None], y - y_mean[:, None, None]  # the larger the means, the more would cancel
    pairs, (rows, columns) = _pairs(x, kernel_size), _boxes(x, kernel_size)
    box_NdHW = _product_of_axes(rows, columns, y)
    seen_HW = rows.sum(0)[:, None] * columns.sum(0)
    mean = (kernel_size**2 * x.sum((0, 2, 3)) - box_NdHW.sum((0, 2, 3))) / pairs
    squares = kernel_size**2 * x.square() + seen_HW * y.square() - 2 * x * box_NdHW
    var = squares.sum((0, 2, 3)) / pairs - mean.square()
    return mean + x_mean - y_mean, var.clamp_min(0)


def _product(x: Tensor, y: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    pairs, (rows, columns) = _pairs(x, kernel_size), _boxes(x, kernel_size)
    box, box_of_squares = (_product_of_axes(rows, columns, z) for z in (y, y.square()))
    mean = (x * box).sum((0, 2, 3)) / pairs
    var = (x.square() * box_of_squares).sum((0, 2, 3)) / pairs - mean.square()
    return mean, var.clamp_min(0)


def patch_statistics(center_NCHW: Tensor, around_NRHW: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all pixels of what each column of a patch shows, float64 [C + R * K].

    Columns: `center`'s channels, which may be none, then channel c of `around` at position o in column C + c * K + o.
    """
    center, around = center_NCHW.double(), around_NRHW.double()
    pixels = around.numel() // around.shape[1]
    origin = around.mean((0, 2, 3))
    around = around - origin[:, None, None]
    rows, columns = (_views(size, kernel_size, around).sum(1) for size in around.shape[2:])
    mean_Rkk, square_Rkk = (_product_of_axes(rows, columns, z).sum(0) / pixels for z in (around, around.square()))
    var = (square_Rkk - mean_Rkk.square()).flatten().clamp_min(0)
    center_mean = center.mean((0, 2, 3))
    center_var = (center - center_mean[:, None, None]).square().mean((0, 2, 3))
    return torch.cat((center_mean, (mean_Rkk + origin[:, None, None]).flatten())), torch.cat((center_var, var))


def _product_of_axes(rows: Tensor, columns: Tensor, x_NCHW: Tensor) -> Tensor:
    """rows [I, H] times each channel of x times columns^T [W, J]: [N, C, I, J], one axis after the other, as channels-last maps lie."""
    N, C, H, W = x_NCHW.shape
    x_NIWC = (rows @ x_NCHW.permute(0, 2, 3, 1).reshape(N, H, W * C)).unflatten(2, (W, C))
    return (columns @ x_NIWC).permute(0, 3, 1, 2)


def _pairs(x: Tensor, kernel_size: int) -> int:
    return x.numel() // x.shape[1] * kernel_size**2


def _boxes(x: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """For rows and for columns: how often i sees j, [H, H] and [W, W]."""
    rows, columns = (_views(size, kernel_size, x).sum(0) for size in x.shape[2:])
    return rows, columns


def _views(size: int, kernel_size: int, like: Tensor) -> Tensor:
    """1 where pixel i sees pixel j at offset o of an axis, else 0: [k, i, j]."""
    if torch.compiler.is_compiling():
        return _make_views(size, kernel_size, like.device)
    return _kept_views(size, kernel_size, like.device)


def _make_views(size: int, kernel_size: int, device: torch.device) -> Tensor:
    offset = torch.arange(kernel_size, device=device)[:, None] - kernel_size // 2
    seen_ki = (torch.arange(size, device=device) + offset).abs()
    seen_ki = torch.where(seen_ki < size, seen_ki, 2 * (size - 1) - seen_ki)
    return (seen_ki[:, :, None] == torch.arange(size, device=device)).double()


_kept_views = functools.lru_cache(64)(_make_views)
