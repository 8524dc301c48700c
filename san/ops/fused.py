"""Fused operators on all pairs (i, j) of a pixel and a pixel of its footprint, and on patches. They store only the weights.

They contain no BatchNorm: `san.nn.fusion` turns norms into a scale and a shift, with the statistics of `pair_statistics`,
`pair_covariance` and `san.ops.statistics`. Shapes: `cuda_ext/schemas.py`; formulas: docs/explanation/operators.md.
Derivatives with `create_graph=True` run their definitions in `san.ops.definitions`.

Internal: they do not check their inputs or the chosen backend. `functional.fuses` decides whether `san.nn.fusion` calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from san.ops import library
from san.ops.footprint import check_footprint


def pair_statistics(center_NdHW: Tensor, around_NdHW: Tensor, kernel_size: int, products: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of delta = center_i - around_j over all pairs, [d] each.

    The first `products` channels multiply instead: center_i * around_j. Maps are float32 or float64.
    """
    check_footprint(kernel_size, *center_NdHW.shape[2:])
    _load()
    maps = _channels_last(center_NdHW), _channels_last(around_NdHW)
    mean, var = torch.ops.san.pair_statistics(*maps, kernel_size, products)
    return mean, var


def pair_covariance(
    center_NdHW: Tensor, around_NdHW: Tensor, shift_d: Tensor, kernel_size: int, products: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean [d] and biased covariance [d, d] over all pairs of a1 = relu(center_i - around_j + shift).

    The first `products` channels multiply instead: relu(center_i * around_j + shift). Maps and shift are float32 or float64.
    """
    check_footprint(kernel_size, *center_NdHW.shape[2:])
    _load()
    maps = _channels_last(center_NdHW), _channels_last(around_NdHW)
    mean, covariance = torch.ops.san.pair_covariance(*maps, shift_d, kernel_size, products, _may_use_tf32())
    return mean, covariance


def pair_weights(
    center_NdHW: Tensor,
    around_NdHW: Tensor,
    shift1_d: Tensor,
    weight1_Ed: Tensor,
    shift2_E: Tensor,
    weight2_GE: Tensor,
    kernel_size: int,
    products: int = 0,
) -> Tensor:
    """The softmax over the footprint of weight2 relu(weight1 a1 + shift2), [N, G, K, P], with a1 as in `pair_covariance`.

    Without a hidden layer, weight1 is empty, [0, 0], and weight2 [G, d] is applied to a1. Weights may be half types; the result
    has the type of weight2.
    """
    check_footprint(kernel_size, *center_NdHW.shape[2:])
    _load()
    maps = _channels_last(center_NdHW), _channels_last(around_NdHW)
    mapping = shift1_d, weight1_Ed, shift2_E, weight2_GE
    w_NGKP: Tensor = torch.ops.san.pair_weights(*maps, *mapping, kernel_size, products, _may_use_tf32())
    return w_NGKP


def patch_linear(
    center_NCHW: Tensor, around_NRHW: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, kernel_size: int
) -> Tensor:
    """weight relu(scale * patch + shift) of every pixel, [N, E, H, W].

    A patch is `center`'s channels at the pixel, which may be none, and then channel c of `around` at position o of the
    footprint in column C + c * K + o. scale and shift [columns], weight [E, columns].
    """
    check_footprint(kernel_size, *around_NRHW.shape[2:])
    _load()
    maps = _channels_last(center_NCHW), _channels_last(around_NRHW)
    u_NEHW: Tensor = torch.ops.san.patch_linear(*maps, scale, shift, weight, kernel_size, _may_use_tf32())
    return u_NEHW


def norm_relu(
    x_NCHW: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(batch_norm(x)) of a float32 map, [N, C, H, W] and channels-last, and the mean and biased variance in float64.

    Without `mean` and `var`, the statistics are those of x.
    """
    _load()
    y_NHWC, mean, var = torch.ops.san.norm_relu(_channels_last(x_NCHW), weight, bias, mean, var, eps)
    return y_NHWC.permute(0, 3, 1, 2), mean, var


@library.constant
def _load() -> bool:
    return library.load()


@library.constant
def _may_use_tf32() -> bool:
    """torch's setting for float32 matrix products on GPUs."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _channels_last(x_NCHW: Tensor) -> Tensor:
    """[N, H, W, C]; a map that is channels-last already is not copied."""
    return x_NCHW.permute(0, 2, 3, 1).contiguous()
