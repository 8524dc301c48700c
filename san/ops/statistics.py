"""Means and variances of the columns of patches, computed from sums of the map without visiting the patches.

For each offset of a footprint, a small matrix says which pixel j each pixel i of one axis reads, including reflection at the
border. Sums over all patches are products of the map with these matrices. Everything is differentiable torch code.
"""

from __future__ import annotations

import torch
from torch import Tensor


def patch_statistics(center_NCHW: Tensor, around_NRHW: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each column of a patch over all pixels, [C + R * K] each.

    Columns: `center`'s channels, which may be none, then channel c of `around` at position o in column C + c * K + o. The means
    of the maps should be near 0, or squares would cancel.
    """
    pixels = around_NRHW.numel() // around_NRHW.shape[1]
    rows_kH, columns_kW = (_views(size, kernel_size, around_NRHW).sum(1) for size in around_NRHW.shape[2:])
    around_NHWR = around_NRHW.permute(0, 2, 3, 1)
    mean_Rkk, square_Rkk = (_window_sums(rows_kH, columns_kW, x) / pixels for x in (around_NHWR, around_NHWR.square()))
    center_mean = center_NCHW.mean((0, 2, 3))
    center_var = center_NCHW.square().mean((0, 2, 3)) - center_mean.square()
    mean = torch.cat((center_mean, mean_Rkk.flatten()))
    return mean, torch.cat((center_var, (square_Rkk - mean_Rkk.square()).flatten())).clamp_min(0)


def _window_sums(rows_kH: Tensor, columns_kW: Tensor, x_NHWR: Tensor) -> Tensor:
    """The sum of each position of the footprint over all pixels, [R, k, k]; one axis after the other."""
    x_NkWR = (rows_kH @ x_NHWR.flatten(2)).unflatten(2, x_NHWR.shape[2:])
    return (columns_kW @ x_NkWR.sum(0)).permute(2, 0, 1)


def _views(size: int, kernel_size: int, like: Tensor) -> Tensor:
    """1 if pixel i reads pixel j at an offset along one axis, else 0: [k, i, j]."""
    # Not cached, because a cache could keep the tensors of a FakeTensorMode or of a CUDA graph.
    pixel = torch.arange(size, device=like.device)
    seen_ki = (pixel + torch.arange(kernel_size, device=like.device)[:, None] - kernel_size // 2).abs()
    seen_ki = torch.where(seen_ki < size, seen_ki, 2 * (size - 1) - seen_ki)
    return (seen_ki[:, :, None] == pixel).to(like.dtype)
