"""Decides whether layers run as fused operators (`san.ops.fused`), and turns norms into a scale and a shift.

A fused operator replaces several layers without calling them. If one of these layers has a hook or an unexpected type, all of
them run one by one. `san.ops.backend("unfused")` has the same effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, relu
from torch.nn.modules.module import _has_any_global_hook

from san.ops import fused as kernels
from san.ops.functional import fuses
from san.ops.statistics import patch_statistics
from san.ops.tracing import is_traced


class PairMaps(NamedTuple):
    """Maps [N, d, H, W]: delta is center_i * around_j in the first `products` channels, center_i - around_j in the others."""

    center: Tensor
    around: Tensor
    products: int = 0


class Affine(NamedTuple):
    """A norm as (x - mean) * scale + shift; float64, [channels] each."""

    mean: Tensor
    scale: Tensor
    shift: Tensor


def fuses_pairs(gamma: nn.Sequential, x: Tensor) -> bool:
    """Whether pairwise weights can be computed fused for maps like `x`: gamma is L or LRL and has no hooks."""
    return fuses("pair_weights", x) and _is_plain(gamma, x) and len(gamma) in (3, 6)


def fuses_patches(gamma: nn.Sequential, x: Tensor) -> bool:
    """Whether gamma's first norm, ReLU and Linear can run fused on the patches of maps like `x`."""
    if not fuses("patch_linear", x) or type(gamma) is not nn.Sequential or has_hooks(gamma):
        return False
    return _is_plain(nn.Sequential(*list(gamma)[:3]), x)


def pairwise_weights(gamma: nn.Sequential, maps: PairMaps, kernel_size: int, dtype: torch.dtype) -> Tensor:
    """softmax_j(gamma(delta_ij)), [N, G, K, P] of type `dtype`. Requires `fuses_pairs`; updates gamma's running statistics.

    Raises:
        ValueError: a norm needs batch statistics, but there is only one value per channel.
    """
    wide = torch.promote_types(maps.center.dtype, torch.float32)
    maps = maps._replace(center=maps.center.to(wide), around=maps.around.to(wide))
    values = maps.center.numel() // maps.center.shape[1] * kernel_size**2
    norm1 = affine_of(gamma[0], values, lambda: kernels.pair_statistics(maps.center, maps.around, kernel_size, maps.products))
    center, around, shift1 = _normalized(maps, norm1)
    last = gamma[-1]
    assert isinstance(last, nn.Conv2d), "a plain gamma"
    weight2 = last.weight.flatten(1)
    # Half weights give half attention weights; everything else stays in float32 or float64.
    to_weight = dtype if dtype.itemsize == 2 else shift1.dtype
    if len(gamma) == 3:
        weight1, shift2 = weight2.new_empty(0, 0), shift1.new_empty(0)
    else:
        weight1, shift2 = _folded(gamma[2], gamma[3], maps._replace(center=center, around=around), shift1, kernel_size)
    if last.bias is not None:  # cancels in the softmax, but DDP expects a gradient for it, which is 0
        shift1 = shift1 + (0 * last.bias.to(shift1.dtype)).sum()
    mapping = shift1, weight1.to(to_weight), shift2, weight2.to(to_weight)
    return kernels.pair_weights(center, around, *mapping, kernel_size, maps.products).to(dtype)


def _normalized(maps: PairMaps, norm: Affine) -> tuple[Tensor, Tensor, Tensor]:
    """Maps and shift with relu(norm(delta)) = relu(center - around + shift), or relu(center * around + shift) for products.

    Each image's mean is subtracted before the maps are scaled, so that large means cost no precision.
    """
    (x, y, p), dtype = maps, maps.center.dtype
    if p == 0:
        return *_normalized_difference(x, y, norm), norm.shift.to(dtype)
    shift = norm.shift - norm.mean * norm.scale
    products = x[:, :p] * norm.scale[:p, None, None].to(dtype), y[:, :p]
    if p == x.shape[1]:
        return *products, shift.to(dtype)
    differences = _normalized_difference(x[:, p:], y[:, p:], Affine(*(z[p:] for z in norm)))
    center, around = (torch.cat(pair, 1) for pair in zip(products, differences, strict=True))
    return center, around, torch.cat((shift[:p], norm.shift[p:])).to(dtype)


def _normalized_difference(x: Tensor, y: Tensor, norm: Affine) -> tuple[Tensor, Tensor]:
    origin_Nd11 = _typical_value(y.detach())
    wanted = origin_Nd11 + norm.mean[:, None, None]
    center_origin = wanted.detach().to(x.dtype)
    rest = ((center_origin - wanted) * norm.scale[:, None, None]).to(x.dtype)
    scale = norm.scale[:, None, None].to(x.dtype)
    return torch.addcmul(rest, x - center_origin, scale), (y - origin_Nd11) * scale


def _typical_value(x_NdHW: Tensor) -> Tensor:
    """The middle of the means of three parts of each image, [N, d, 1, 1], so that a huge or infinite pixel has no influence."""
    H = x_NdHW.shape[2]
    parts = (x_NdHW[:, :, i * H // 3 : max((i + 1) * H // 3, i * H // 3 + 1)] for i in range(3))
    means = torch.stack([part.mean((2, 3), keepdim=True) for part in parts])
    return means.nanmedian(0).values.nan_to_num(0, 0, 0)


def _folded(linear: nn.Module, norm: nn.Module, maps: PairMaps, shift1: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """weight1 and shift2 of norm(linear(a1)). The statistics of linear(a1) follow from the mean and covariance of a1."""
    assert isinstance(linear, nn.Conv2d)
    weight = linear.weight.flatten(1).double()
    bias = 0 if linear.bias is None else linear.bias.double()

    def statistics() -> tuple[Tensor, Tensor]:
        center, around, products = maps
        mean, covariance = (x.double() for x in kernels.pair_covariance(center, around, shift1, kernel_size, products))
        return weight @ mean + bias, ((weight @ covariance) * weight).sum(1).clamp_min(0)

    mean, scale, shift = affine_of(norm, maps.center.numel() // maps.center.shape[1] * kernel_size**2, statistics)
    return scale[:, None] * weight, (shift + scale * (bias - mean)).to(shift1.dtype)


def patchwise_weights(gamma: nn.Sequential, center: Tensor, around: Tensor, kernel_size: int) -> Tensor:
    """gamma of every pixel's patch, [N, K * G, H, W]. Requires `fuses_patches`; the layers after the first Linear are called.

    Raises:
        ValueError: a norm needs batch statistics, but there is only one value per channel.
    """
    dtype, linear = torch.promote_types(around.dtype, torch.float32), gamma[2]
    assert isinstance(linear, nn.Conv2d), "a plain gamma"
    of_center, of_around = _origins(gamma[0], center, around, kernel_size**2)
    pairs = (center, of_center), (around, of_around)
    centered, other = (x.to(dtype) - of_x[:, None, None].to(dtype) for x, of_x in pairs)
    origin = torch.cat((of_center, of_around.repeat_interleave(kernel_size**2)))

    def statistics() -> tuple[Tensor, Tensor]:
        mean, var = patch_statistics(centered, other, kernel_size)
        return mean.double() + origin, var

    norm = affine_of(gamma[0], around.numel() // around.shape[1], statistics)
    shift = norm.shift - (norm.mean - origin) * norm.scale
    weight = linear.weight.flatten(1).to(around.dtype if around.dtype.itemsize == 2 else dtype)
    u_NEHW = kernels.patch_linear(centered, other, norm.scale.to(dtype), shift.to(dtype), weight, kernel_size)
    if linear.bias is not None:
        u_NEHW = u_NEHW + linear.bias[:, None, None]
    u_NEHW = u_NEHW.to(around.dtype)
    for layer in list(gamma)[3:]:
        u_NEHW = _linear(layer, u_NEHW) if isinstance(layer, nn.Conv2d) else layer(u_NEHW)
    return u_NEHW


def _origins(norm: nn.Module, center: Tensor, around: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Constants near the means of the maps' channels, which are subtracted so that large means cost no precision.

    In evaluation they come from the running means, so that an image's result does not depend on the rest of its batch.
    """
    assert isinstance(norm, nn.BatchNorm2d)
    if _uses_batch(norm):
        of_center, of_around = (x.detach().float().mean((0, 2, 3)).nan_to_num(0, 0, 0) for x in (center, around))
        return of_center, of_around
    assert norm.running_mean is not None
    means = norm.running_mean.float()
    return means[: center.shape[1]], means[center.shape[1] :].unflatten(0, (-1, positions)).mean(1)


def _uses_batch(norm: nn.BatchNorm2d) -> bool:
    return norm.training or norm.running_mean is None or norm.running_var is None


def _linear(layer: nn.Conv2d, x_NCHW: Tensor) -> Tensor:
    """A 1x1 convolution. On contiguous maps it runs as a matrix product, which is twice as fast as torch's convolution."""
    if has_hooks(layer) or layer.bias is None or not x_NCHW.is_contiguous() or type(layer) is not nn.Conv2d:
        y_NCHW: Tensor = layer(x_NCHW)
        return y_NCHW
    weight = layer.weight.flatten(1).expand(len(x_NCHW), -1, -1)
    return torch.baddbmm(layer.bias[:, None], weight, x_NCHW.flatten(2)).unflatten(2, x_NCHW.shape[2:])


def affine_of(norm: nn.Module, values: int, statistics: Callable[[], tuple[Tensor, Tensor]]) -> Affine:
    """A BatchNorm as a scale and a shift. Updates its running statistics in training.

    Args:
        values: number of values per channel.
        statistics: computes the batch's mean and biased variance, [channels] each; called only if they are needed.

    Raises:
        ValueError: it needs batch statistics, but there is only one value per channel.
    """
    assert isinstance(norm, nn.BatchNorm2d)
    if not _uses_batch(norm):
        return _running_affine(norm)
    _require_several(values)
    mean, var = (x.double() for x in statistics())
    if norm.training and norm.track_running_stats:
        _update_running_stats(norm, mean, var, values)
    return _affine(norm, mean, var)


def _running_affine(norm: nn.BatchNorm2d) -> Affine:
    assert norm.running_mean is not None and norm.running_var is not None
    return _affine(norm, norm.running_mean.double(), norm.running_var.double())


def _affine(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor) -> Affine:
    scale = (var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.double()
    return Affine(mean, scale, torch.zeros_like(mean) if norm.bias is None else norm.bias.double())


def has_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks or a `forward` of its own, or hooks for all modules are registered."""
    if "forward" in layer.__dict__:
        return True
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or _has_any_global_hook()


def _is_plain(gamma: nn.Sequential, x: Tensor) -> bool:
    """Whether gamma consists of ordinary BatchNorm, ReLU and 1x1 convolution layers without hooks."""
    if type(gamma) is not nn.Sequential or x.numel() == 0 or any(map(has_hooks, (gamma, *gamma))):
        return False
    if not all(layer.kernel_size == (1, 1) and layer.groups == 1 for layer in gamma if isinstance(layer, nn.Conv2d)):
        return False
    return tuple(map(type, gamma)) == (nn.BatchNorm2d, nn.ReLU, nn.Conv2d) * (len(gamma) // 3)


def norm_relu(norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> Tensor:
    """act(norm(x)), where `act` is a ReLU or what replaced it. Ordinary layers run fused on channels-last float32 maps."""
    if _fuses_norm_relu(norm, act, x_NCHW):
        assert isinstance(norm, nn.BatchNorm2d)
        return _fused_norm_relu(norm, x_NCHW)
    return activate(act, norm(x_NCHW), in_place=_owns_its_output(norm))


def _fuses_norm_relu(norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> bool:
    if type(norm) is not nn.BatchNorm2d or type(act) is not nn.ReLU or not fuses("norm_relu", x_NCHW):
        return False
    if has_hooks(norm) or has_hooks(act) or x_NCHW.dim() != 4 or x_NCHW.numel() == 0:
        return False
    tensors = x_NCHW, norm.weight, norm.bias, norm.running_mean, norm.running_var
    is_float = all(x is None or x.dtype == torch.float32 for x in tensors)
    return is_float and x_NCHW.is_contiguous(memory_format=torch.channels_last)


def _fused_norm_relu(norm: nn.BatchNorm2d, x_NCHW: Tensor) -> Tensor:
    values, uses_batch = x_NCHW.numel() // x_NCHW.shape[1], _uses_batch(norm)
    if uses_batch:
        _require_several(values)
    weight = x_NCHW.new_ones(norm.num_features) if norm.weight is None else norm.weight
    bias = x_NCHW.new_zeros(norm.num_features) if norm.bias is None else norm.bias
    statistics = (None, None) if uses_batch else (norm.running_mean, norm.running_var)
    y_NCHW, mean, var = kernels.norm_relu(x_NCHW, weight, bias, *statistics, norm.eps)
    if norm.training and norm.track_running_stats:
        _update_running_stats(norm, mean, var, values)
    return y_NCHW


def _owns_its_output(norm: nn.Module) -> bool:
    """Whether the norm's output may be overwritten: no hook can have kept it, and it is not x itself."""
    return type(norm) in (nn.BatchNorm2d, nn.SyncBatchNorm) and not has_hooks(norm)


def activate(act: nn.Module, x_NCHW: Tensor, in_place: bool) -> Tensor:
    """act(x); a ReLU without hooks may overwrite x if `in_place` is set."""
    if in_place and type(act) is nn.ReLU and not has_hooks(act) and not is_traced(x_NCHW):
        return relu(x_NCHW, inplace=True)
    y_NCHW: Tensor = act(x_NCHW)
    return y_NCHW


def convolve(conv: nn.Module, x_NCHW: Tensor) -> Tensor:
    """conv(x). In training, a 1x1 convolution of a channels-last map on the CPU runs as a matrix product.

    Its gradients are faster than those of torch's convolutions, which have a slow path for few images and one thread.
    """
    if not _is_pointwise(conv, x_NCHW):
        y_NCHW: Tensor = conv(x_NCHW)
        return y_NCHW
    assert isinstance(conv, nn.Conv2d)
    return linear(x_NCHW.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def _is_pointwise(conv: nn.Module, x_NCHW: Tensor) -> bool:
    if type(conv) is not nn.Conv2d or not torch.is_grad_enabled() or not fuses("pair_weights", x_NCHW) or has_hooks(conv):
        return False
    if x_NCHW.device.type != "cpu" or x_NCHW.dim() != 4 or torch.is_autocast_enabled("cpu"):
        return False
    if (conv.kernel_size, conv.stride, conv.padding, conv.groups) != ((1, 1), (1, 1), (0, 0), 1):
        return False
    return x_NCHW.dtype == torch.float32 and x_NCHW.is_contiguous(memory_format=torch.channels_last)


def conv_norm(conv: nn.Conv2d, norm: nn.Module, x_NCHW: Tensor) -> Tensor:
    """norm(conv(x)). In evaluation, the BatchNorm is folded into the convolution, which saves a pass over the map.

    Weights in float16 are not folded: scaled, they can exceed its range.
    """
    if not _folds(conv, norm, x_NCHW):
        y_NCHW: Tensor = norm(convolve(conv, x_NCHW))
        return y_NCHW
    assert isinstance(norm, nn.BatchNorm2d)
    dtype = conv.weight.dtype
    mean, scale, shift = _running_affine(norm)
    bias = shift - mean * scale if conv.bias is None else shift + (conv.bias - mean) * scale
    weight = conv.weight * scale[:, None, None, None].to(torch.promote_types(dtype, torch.float32))
    return conv2d(x_NCHW, weight.to(dtype), bias.to(dtype), conv.stride, conv.padding, conv.dilation, conv.groups)


def _folds(conv: nn.Conv2d, norm: nn.Module, x_NCHW: Tensor) -> bool:
    if not fuses("pair_weights", x_NCHW) or type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
        return False
    if has_hooks(conv) or has_hooks(norm) or _uses_batch(norm):
        return False
    return conv.padding_mode == "zeros" and conv.weight.dtype != torch.float16


def conv_norm_relu(conv: nn.Conv2d, norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> Tensor:
    """act(norm(conv(x))), with the norm folded in evaluation."""
    if _folds(conv, norm, x_NCHW):
        return activate(act, conv_norm(conv, norm, x_NCHW), in_place=True)
    return norm_relu(norm, act, convolve(conv, x_NCHW))


def _require_several(values: int) -> None:
    if values == 1:
        raise ValueError("training BatchNorm needs more than 1 value per channel; use a larger batch, image or footprint")


@torch.no_grad()
def _update_running_stats(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, values: int) -> None:
    """As BatchNorm does: running means move towards the batch's; variances are corrected by n / (n - 1)."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    for running, batch in ((norm.running_mean, mean), (norm.running_var, var * (values / (values - 1)))):
        if running is None:
            continue
        momentum: float | Tensor = 0.0 if norm.momentum is None else norm.momentum
        if norm.momentum is None and norm.num_batches_tracked is not None:
            momentum = norm.num_batches_tracked.to(running.dtype).reciprocal()
        running.lerp_(batch.to(running.dtype), momentum)
