"""Fused operators. Vector attention: relation, gamma, softmax and aggregation in one, which never holds K times a feature map.

For gamma = LRL (BatchNorm, ReLU, Linear, BatchNorm, ReLU, Linear), the paper's default. Shapes as in `san/ops/reference.py`;
d relation channels, E hidden channels of gamma. First derivatives only: `ops.backend("unfused")` has all of them.

Not for users: inputs are not checked and no backend is asked. `san.nn.fusion` calls them where `functional.fuses` lets it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from san.ops import library
from san.ops.footprint import check_footprint


class Normalization(NamedTuple):
    """A BatchNorm's parameters and running statistics, [channels] each."""

    gain: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor

    def parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """In the type that sums are kept in: at least float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return tuple(x.to(dtype) for x in self)


class LRL(NamedTuple):
    """gamma's parameters: weight1 [E, d], weight2 [outputs, E], bias3 [outputs]."""

    norm1: Normalization
    weight1: Tensor
    norm2: Normalization
    weight2: Tensor
    bias3: Tensor

    def parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """In the order of the operators' arguments, in the type that sums are kept in: at least float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        norm1, weight1, norm2, weight2, bias3 = self
        return tuple(x.to(dtype) for x in (*norm1[:2], weight1, *norm2[:2], weight2, bias3, *norm1[2:], *norm2[2:]))


class Statistics(NamedTuple):
    """Means and biased variances of the inputs of both BatchNorms over a batch, [d] and [E]."""

    mean1: Tensor
    var1: Tensor
    mean2: Tensor
    var2: Tensor


def pairwise_attention(
    center_NdHW: Tensor, around_NdHW: Tensor, beta_NMHW: Tensor, gamma: LRL, kernel_size: int, training: bool, eps: float
) -> tuple[Tensor, Statistics]:
    """y_i = sum_j softmax_j(gamma(center_i - around_j)) * beta_j, [N, M, H, W], and the batch's statistics.

    gamma's last bias has no influence, for softmax cancels it; its gradient is zero. The result has beta's memory format.
    """
    check_footprint(kernel_size, *beta_NMHW.shape[2:])
    maps = map(_channels_last, (center_NdHW, around_NdHW, beta_NMHW))
    _load()
    arguments = (*maps, *gamma.parameters(beta_NMHW), kernel_size, training, eps, _may_use_tf32())
    y_NHWM, _, *statistics = torch.ops.san.pairwise(*arguments)
    return _as_map(y_NHWM, beta_NMHW), Statistics(*statistics)


def patchwise_attention(
    center_NCHW: Tensor, around_NRHW: Tensor, beta_NMHW: Tensor, gamma: LRL, kernel_size: int, training: bool, eps: float
) -> tuple[Tensor, Statistics]:
    """y_i = sum_j gamma([center_i, around_j for all j])_j * beta_j, [N, M, H, W], and the batch's statistics.

    `center_NCHW` may have no channels. gamma's output g * K + j is the weight of position j for weight channel g. The result
    has beta's memory format.
    """
    check_footprint(kernel_size, *beta_NMHW.shape[2:])
    maps = map(_channels_last, (center_NCHW, around_NRHW, beta_NMHW))
    _load()
    arguments = (*maps, *gamma.parameters(beta_NMHW), kernel_size, training, eps, _may_use_tf32())
    y_NHWM, _, *statistics = torch.ops.san.patchwise(*arguments)
    return _as_map(y_NHWM, beta_NMHW), Statistics(*statistics)


def norm_relu(x_NCHW: Tensor, norm: Normalization, training: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """relu(batch_norm(x)), and the batch's mean and biased variance, [C]; the result has x's memory format."""
    _load()
    y_NHWC, mean, var = torch.ops.san.norm_relu(_channels_last(x_NCHW), *norm.parameters(x_NCHW), training, eps)
    return _as_map(y_NHWC, x_NCHW), mean, var


def norm_relu_(x_NCHW: Tensor, norm: Normalization, eps: float) -> Tensor:
    """relu(batch_norm(x)) in evaluation, in place of a channels-last x; it has no derivative."""
    torch.ops.san.norm_relu_(x_NCHW.permute(0, 2, 3, 1), *norm.parameters(x_NCHW), eps)
    return x_NCHW


@library.constant
def _load() -> bool:
    return library.load()


@library.constant
def _may_use_tf32() -> bool:
    """torch's setting for float32 products on GPUs, of which a compiled model keeps guard."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _channels_last(x_NCHW: Tensor) -> Tensor:
    """[N, H, W, C]: no copy of a map that is channels_last already."""
    return x_NCHW.permute(0, 2, 3, 1).contiguous()


def _as_map(y_NHWM: Tensor, beta_NMHW: Tensor) -> Tensor:
    y_NMHW = y_NHWM.permute(0, 3, 1, 2)
    is_channels_last = beta_NMHW.is_contiguous(memory_format=torch.channels_last)
    return y_NMHW if is_channels_last else y_NMHW.contiguous()
