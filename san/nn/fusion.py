"""Where it is decided whether layers run as one kernel (`san.ops.fused`), and how they meet that kernel.

The layers are not called then, so a hook on one of them, or another kind of layer in its place, makes it run operator by
operator, as does `san.ops.backend("unfused")`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.modules.module import _has_any_global_hook

from san.ops import fused as kernels
from san.ops.functional import fuses
from san.ops.fused import LRL, Normalization, Statistics


class Layers(NamedTuple):
    """What gamma = LRL is made of; ReLU stands after each BatchNorm."""

    norm1: nn.BatchNorm2d
    linear1: nn.Conv2d
    norm2: nn.BatchNorm2d
    linear2: nn.Conv2d


def fusable(operator: str, gamma: nn.Sequential, x: Tensor) -> Layers | None:
    """gamma's layers if attention over maps like `x` can run as `operator`: plain ones of an LRL that nobody watches."""
    if type(gamma) is not nn.Sequential or not fuses(operator, x) or x.numel() == 0:
        return None
    if is_watched(gamma) or any(map(is_watched, gamma)):
        return None
    if tuple(map(type, gamma)) != (nn.BatchNorm2d, nn.ReLU, nn.Conv2d) * 2:
        return None
    norm1, _, linear1, norm2, _, linear2 = gamma
    assert isinstance(norm1, nn.BatchNorm2d) and isinstance(norm2, nn.BatchNorm2d)
    assert isinstance(linear1, nn.Conv2d) and isinstance(linear2, nn.Conv2d)
    if not (_is_plain(norm1) and _is_plain(norm2) and norm1.eps == norm2.eps and norm1.training == norm2.training):
        return None
    if linear1.bias is not None or linear2.bias is None:
        return None
    return Layers(norm1, linear1, norm2, linear2)


Attention = Callable[[Tensor, Tensor, Tensor, LRL, int, bool, float], tuple[Tensor, Statistics]]


def fused(attention: Attention, center: Tensor, around: Tensor, beta: Tensor, layers: Layers, footprint: int) -> Tensor:
    """Runs `attention` with gamma's parameters, and updates its running statistics in training.

    Raises:
        ValueError: one value per channel, of which no statistics can be had, in training.
    """
    norm1, linear1, norm2, linear2 = layers
    assert linear2.bias is not None, "gamma's last Linear layer has a bias"
    weight1, weight2 = linear1.weight.flatten(1), linear2.weight.flatten(1)
    gamma = LRL(_normalization(norm1), weight1, _normalization(norm2), weight2, linear2.bias)
    values = beta.numel() // beta.shape[1] * (1 if attention is kernels.patchwise_attention else footprint**2)
    _require_several(norm1, values)
    y, statistics = attention(center, around, beta, gamma, footprint, norm1.training, norm1.eps)
    if norm1.training:
        _remember(norm1, statistics.mean1, statistics.var1, values)
        _remember(norm2, statistics.mean2, statistics.var2, values)
    return y


def is_watched(layer: nn.Module) -> bool:
    """Whether a hook waits for the layer to be called: one of its own, or one for all modules."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or _has_any_global_hook()


def norm_relu(norm: nn.BatchNorm2d, x_NCHW: Tensor, last_use: bool = False) -> Tensor:
    """relu(norm(x)), in one kernel where x is channels-last; x may be overwritten if this is its `last_use`."""
    if not (fuses("norm_relu", x_NCHW) and _is_channels_last(x_NCHW) and _is_plain(norm)) or is_watched(norm):
        # Another layer in its place may answer with x itself, and a hook may keep what it saw.
        is_ours = type(norm) in (nn.BatchNorm2d, nn.SyncBatchNorm) and not is_watched(norm)
        return relu(norm(x_NCHW), inplace=is_ours)
    values = x_NCHW.numel() // x_NCHW.shape[1]
    _require_several(norm, values)
    if last_use and not norm.training and not torch.is_grad_enabled():
        return kernels.norm_relu_(x_NCHW, _normalization(norm), norm.eps)
    y_NCHW, mean, var = kernels.norm_relu(x_NCHW, _normalization(norm), norm.training, norm.eps)
    if norm.training:
        _remember(norm, mean, var, values)
    return y_NCHW


def _is_channels_last(x_NCHW: Tensor) -> bool:
    return x_NCHW.is_contiguous(memory_format=torch.channels_last) and x_NCHW.numel() > 0


def _is_plain(norm: nn.Module) -> bool:
    if type(norm) is not nn.BatchNorm2d:
        return False
    return norm.affine and norm.track_running_stats and norm.momentum is not None


def _require_several(norm: nn.BatchNorm2d, values: int) -> None:
    if norm.training and values == 1:
        raise ValueError("training BatchNorm needs more than 1 value per channel; use a larger batch, image or footprint")


def _normalization(norm: nn.BatchNorm2d) -> Normalization:
    assert norm.running_mean is not None and norm.running_var is not None, "plain ones keep running statistics"
    return Normalization(norm.weight, norm.bias, norm.running_mean, norm.running_var)


@torch.no_grad()
def _remember(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, values: int) -> None:
    """As BatchNorm does: running means move towards the batch's; variances are corrected by n / (n - 1)."""
    assert norm.momentum is not None and norm.num_batches_tracked is not None, "plain ones have both"
    assert norm.running_mean is not None and norm.running_var is not None, "plain ones keep running statistics"
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_((var * (values / (values - 1))).to(norm.running_var.dtype), norm.momentum)
