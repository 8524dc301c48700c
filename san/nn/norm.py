"""BatchNorm in its affine form, as the fused operators take it, and together with the convolution, ReLU or pool beside it.

Fused code replaces several layers without calling them. `is_plain` decides whether that makes no difference: a layer with a
hook or of an unexpected type must be called. `san.ops.backend("unfused")` has the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, max_pool2d, relu
from torch.nn.modules.module import _has_any_global_hook

from san.nn.folding import kept, number
from san.ops import fused as kernels
from san.ops import library
from san.ops.functional import fuses
from san.ops.tracing import is_traced

MOST_IMAGE_CHANNELS = 4
"""Maps with so many channels are far smaller than the result of SAN's stem."""


def is_plain(layer: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether the layer has one of these types, and neither hooks nor a `forward` of its own: then it need not be called."""
    if type(layer) not in types or "forward" in layer.__dict__:
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooks and not _has_any_global_hook()


def uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Whether the norm uses the statistics of its batch, as in training."""
    return norm.training or norm.running_mean is None or norm.running_var is None


def affine_of(norm: nn.BatchNorm2d, values: int, dtype: torch.dtype, statistics: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """Rows mean, scale and shift of the norm as (x - mean) * scale + shift, [3, channels]. Updates running statistics.

    Args:
        values: number of values per channel.
        dtype: type of the result if it follows from running statistics.
        statistics: computes the batch's mean and biased variance, [channels] each; called only if they are needed.

    Raises:
        ValueError: it needs batch statistics, but there is only one value per channel.
    """
    if uses_batch(norm):
        require_several(values)
        mean, var = statistics()
        track(norm, mean, var, values)
    else:
        assert norm.running_mean is not None and norm.running_var is not None
        mean, var = norm.running_mean.to(dtype), norm.running_var.to(dtype)
    return kernels.norm_affine(mean, var, *weight_and_bias(norm, mean.dtype, mean.device), norm.eps)


def weight_and_bias(norm: nn.BatchNorm2d, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of the norm or, if it has none, ones and zeros of type `dtype`."""
    weight = torch.ones(norm.num_features, dtype=dtype, device=device) if norm.weight is None else norm.weight
    bias = torch.zeros(norm.num_features, dtype=dtype, device=device) if norm.bias is None else norm.bias
    return weight, bias


@torch.no_grad()
def track(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, values: int) -> None:
    """Updates running statistics as BatchNorm does: running means move towards the batch's; variances are corrected by
    n / (n - 1)."""
    if not norm.training or not norm.track_running_stats:
        return
    tracked = [x for x in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if x is not None]
    if norm.momentum is not None and _tracks_by_kernel(tracked, mean.device):
        kernels.track_statistics(tracked[0], tracked[1], tracked[2], mean, var, values, norm.momentum)
        return
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    momentum: float | Tensor = 0.0 if norm.momentum is None else norm.momentum
    for running, batch in ((norm.running_mean, mean), (norm.running_var, var * (values / (values - 1)))):
        if running is None:
            continue
        if norm.momentum is None and norm.num_batches_tracked is not None:
            momentum = norm.num_batches_tracked.to(running.dtype).reciprocal()
        running.lerp_(batch.to(running.dtype), momentum)


def _tracks_by_kernel(tracked: Sequence[Tensor], device: torch.device) -> bool:
    """Whether one kernel can update running mean, running variance and the count. In a compiled graph, the number of values is
    not a constant."""
    types = [x.dtype for x in tracked]
    is_usual = types in [[dtype, dtype, torch.int64] for dtype in (torch.float32, torch.float64)]
    is_here = all(x.device == device and x.is_contiguous() for x in tracked)
    return is_usual and is_here and not torch.compiler.is_compiling()


def norm_relu(norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> Tensor:
    """act(norm(x)), where `act` is a ReLU or what replaced it. Ordinary layers run fused on channels-last maps."""
    if isinstance(norm, nn.BatchNorm2d) and _fuses_norm_relu(norm, act, x_NCHW):
        (y_NCHW,) = _fused_norm_relu(norm, x_NCHW, kernels.norm_relu)
        return y_NCHW
    # A plain norm's output may be overwritten: no hook can have kept it, and it is not x itself.
    return activate(act, norm(x_NCHW), in_place=is_plain(norm, nn.BatchNorm2d, nn.SyncBatchNorm))


def norm_relu_branch(norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """x and act(norm(x)), for a residual branch. The gradient of the returned x is added where the norm's is computed."""
    if not isinstance(norm, nn.BatchNorm2d) or not _fuses_norm_relu(norm, act, x_NCHW) or not _adds_gradients(x_NCHW):
        return x_NCHW, norm_relu(norm, act, x_NCHW)
    x_NCHW, y_NCHW = _fused_norm_relu(norm, x_NCHW, kernels.norm_relu_branch)
    return x_NCHW, y_NCHW


def _adds_gradients(x_NCHW: Tensor) -> bool:
    return torch.is_grad_enabled() and x_NCHW.requires_grad and not torch.compiler.is_compiling()


def _fuses_norm_relu(norm: nn.BatchNorm2d, act: nn.Module, x_NCHW: Tensor) -> bool:
    if not fuses(x_NCHW) or not is_plain(norm, nn.BatchNorm2d) or not is_plain(act, nn.ReLU):
        return False
    if not _is_fused_map(x_NCHW):
        return False
    tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return all(x is None or x.dtype == torch.float32 for x in tensors)


def _is_fused_map(x_NCHW: Tensor) -> bool:
    """Whether the map has the format and a type of `norm_relu` and `max_pool`."""
    is_known = x_NCHW.dtype == torch.float32 or (x_NCHW.is_cuda and x_NCHW.dtype == torch.bfloat16)
    return is_known and _is_channels_last(x_NCHW)


def _fused_norm_relu(norm: nn.BatchNorm2d, x_NCHW: Tensor, compute: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The maps that `compute` returns before the statistics; it gets the arguments of `kernels.norm_relu`."""
    values = x_NCHW.numel() // x_NCHW.shape[1]
    if uses_batch(norm):
        require_several(values)
    weight, bias = weight_and_bias(norm, torch.float32, x_NCHW.device)
    statistics = (None, None) if uses_batch(norm) else (norm.running_mean, norm.running_var)
    *maps, mean, var = compute(x_NCHW, weight, bias, *statistics, norm.eps)
    track(norm, mean, var, values)
    return tuple(maps)


def require_several(values: int) -> None:
    """Refuses to compute the statistics of a single value per channel."""
    if values == 1:
        raise ValueError("training BatchNorm needs more than 1 value per channel; use a larger batch, image or footprint")


def activate(act: nn.Module, x_NCHW: Tensor, in_place: bool) -> Tensor:
    """act(x); a ReLU without hooks may overwrite x if `in_place` is set."""
    if in_place and is_plain(act, nn.ReLU) and not is_traced(x_NCHW):
        return relu(x_NCHW, inplace=True)
    y_NCHW: Tensor = act(x_NCHW)
    return y_NCHW


def convolve(conv: nn.Module, x_NCHW: Tensor) -> Tensor:
    """conv(x). 1x1 convolutions of channels-last maps run as matrix products where that is faster."""
    if not isinstance(conv, nn.Conv2d) or not _runs_as_product(conv, x_NCHW):
        y_NCHW: Tensor = conv(x_NCHW)
        return y_NCHW
    return linear(x_NCHW.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def convolve_each(convs: Sequence[nn.Module], x_NCHW: Tensor) -> list[Tensor]:
    """conv(x) for each convolution. Linear layers of one channels-last map run as one product with all of their weights.

    Then the map is read once, and its gradient is one product instead of a sum of several. The results are slices of it.
    """
    if not _run_as_one(convs, x_NCHW):
        return [convolve(conv, x_NCHW) for conv in convs]
    layers = [conv for conv in convs if isinstance(conv, nn.Conv2d)]
    weight = torch.cat([conv.weight for conv in layers])
    bias = torch.cat([conv.bias for conv in layers if conv.bias is not None])
    if _prefers_product(x_NCHW):
        y_NCHW = linear(x_NCHW.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    else:
        y_NCHW = conv2d(x_NCHW, weight, bias)
    return list(y_NCHW.split([conv.out_channels for conv in layers], 1))


def _run_as_one(convs: Sequence[nn.Module], x_NCHW: Tensor) -> bool:
    # In evaluation on a CPU, joining the weights costs more than it saves.
    if len(convs) < 2 or not _computes_products(x_NCHW) or not _is_channels_last(x_NCHW):
        return False
    return all(isinstance(c, nn.Conv2d) and is_plain(c, nn.Conv2d) and is_pointwise(c) and c.bias is not None for c in convs)


def _is_channels_last(x_NCHW: Tensor) -> bool:
    """Whether it is a channels-last map with pixels."""
    return x_NCHW.dim() == 4 and x_NCHW.numel() > 0 and x_NCHW.is_contiguous(memory_format=torch.channels_last)


def is_pointwise(conv: nn.Conv2d) -> bool:
    """Whether the convolution is a Linear layer for each pixel."""
    return (conv.kernel_size, conv.stride, conv.padding, conv.groups) == ((1, 1), (1, 1), (0, 0), 1)


def _runs_as_product(conv: nn.Conv2d, x_NCHW: Tensor) -> bool:
    if not _computes_products(x_NCHW) or not is_plain(conv, nn.Conv2d) or not is_pointwise(conv):
        return False
    return _is_channels_last(x_NCHW) and _prefers_product(x_NCHW)


def _computes_products(x_NCHW: Tensor) -> bool:
    """Whether convolutions may be replaced. In evaluation on a CPU, torch's are best."""
    return not is_traced(x_NCHW) and (x_NCHW.is_cuda or torch.is_grad_enabled()) and fuses(x_NCHW)


def _prefers_product(x_NCHW: Tensor) -> bool:
    """Whether Linear layers of a channels-last map are faster as matrix products.

    On a GPU, cuDNN needs another pass to add a bias. But a product must not be slower or less exact because torch's settings
    allow TF32 in only one of the two. On the CPU, torch would choose a slow convolution in training with few images and one
    thread; with more images, it is up to 1.3 times as fast as a product.
    """
    is_single = x_NCHW.dtype == torch.float32 and not torch.is_autocast_enabled(x_NCHW.device.type)
    if x_NCHW.is_cuda:
        return not is_single or _tf32_is_the_same()
    return is_single and len(x_NCHW) < 16


@library.constant
def _tf32_is_the_same() -> bool:
    """Whether torch may use TF32 in both convolutions and matrix products, or in neither."""
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return bool((convolutions == "tf32") == (torch.backends.cuda.matmul.fp32_precision == "tf32"))


def conv_norm(conv: nn.Conv2d, norm: nn.Module, x_NCHW: Tensor) -> Tensor:
    """norm(conv(x)). The BatchNorm is folded into the convolution in evaluation, and in training if the convolution is a Linear
    layer for the pixels of images. This saves passes over the map."""
    if isinstance(norm, nn.BatchNorm2d) and _folds(conv, norm, x_NCHW):
        return _folded(conv, *_with_norm(conv, norm, x_NCHW))
    y_NCHW: Tensor = norm(convolve(conv, x_NCHW))
    return y_NCHW


def conv_norm_relu(conv: nn.Conv2d, norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> Tensor:
    """act(norm(conv(x))), with the norm folded as in `conv_norm`."""
    if isinstance(norm, nn.BatchNorm2d) and _folds(conv, norm, x_NCHW):
        return activate(act, _folded(conv, *_with_norm(conv, norm, x_NCHW)), in_place=True)
    return norm_relu(norm, act, convolve(conv, x_NCHW))


def conv_norm_add_relu(conv: nn.Conv2d, norm: nn.Module, act: nn.Module, x_NCHW: Tensor, residual_NCHW: Tensor) -> Tensor:
    """act(norm(conv(x)) + residual), with the norm folded as in `conv_norm`, or norm, addition and ReLU in one operator."""
    if not isinstance(norm, nn.BatchNorm2d) or _folds(conv, norm, x_NCHW):
        return activate(act, conv_norm(conv, norm, x_NCHW) + residual_NCHW, in_place=True)
    x_NCHW = convolve(conv, x_NCHW)
    if not _fuses_norm_relu(norm, act, x_NCHW) or not _adds_residual(x_NCHW, residual_NCHW):
        return activate(act, norm(x_NCHW) + residual_NCHW, in_place=True)
    (y_NCHW,) = _fused_norm_relu(norm, x_NCHW, partial(kernels.norm_relu, residual_NCHW=residual_NCHW))
    return y_NCHW


def _adds_residual(x_NCHW: Tensor, residual_NCHW: Tensor) -> bool:
    kind, other = ((x.shape, x.dtype, x.device) for x in (x_NCHW, residual_NCHW))
    return kind == other


def conv_norm_relu_pool(conv: nn.Conv2d, norm: nn.Module, act: nn.ReLU, x_NCHW: Tensor) -> Tensor:
    """max_pool(act(norm(conv(x)))). The pool comes before the ReLU, with which it commutes. For images that need no gradient,
    Linear layer, folded norm, ReLU and pool are one operator, which stores only the pooled map."""
    if isinstance(norm, nn.BatchNorm2d) and _fuses_stem(conv, norm, x_NCHW):
        x_NCHW, weight, bias = _with_norm(conv, norm, x_NCHW)
        half = torch.is_autocast_enabled(x_NCHW.device.type)
        return kernels.stem(weight.flatten(1), bias, x_NCHW, half)
    return activate(act, max_pool(conv_norm(conv, norm, x_NCHW)), in_place=True)


def max_pool(x_NCHW: Tensor) -> Tensor:
    """2x2 max pooling, [N, C, H / 2, W / 2]."""
    return kernels.max_pool(x_NCHW) if _fuses_max_pool(x_NCHW) else max_pool2d(x_NCHW, 2)


def _fuses_max_pool(x_NCHW: Tensor) -> bool:
    return fuses(x_NCHW) and _is_fused_map(x_NCHW) and min(x_NCHW.shape[2:]) > 1


def _fuses_stem(conv: nn.Conv2d, norm: nn.BatchNorm2d, x_NCHW: Tensor) -> bool:
    if not _folds(conv, norm, x_NCHW) or x_NCHW.requires_grad:
        return False
    is_stem = is_pointwise(conv) and conv.in_channels <= MOST_IMAGE_CHANNELS and min(x_NCHW.shape[2:]) > 1
    is_single = x_NCHW.dtype == conv.weight.dtype == torch.float32
    return is_stem and is_single and (x_NCHW.is_cuda or not torch.is_autocast_enabled(x_NCHW.device.type))


def _folds(conv: nn.Conv2d, norm: nn.BatchNorm2d, x_NCHW: Tensor) -> bool:
    if not fuses(x_NCHW) or not is_plain(conv, nn.Conv2d) or not is_plain(norm, nn.BatchNorm2d):
        return False
    device = x_NCHW.device.type
    is_autocast = torch.is_autocast_enabled(device)
    if uses_batch(norm):
        is_stem = is_pointwise(conv) and conv.bias is None and conv.in_channels <= MOST_IMAGE_CHANNELS and x_NCHW.numel() > 0
        if not is_stem or not (is_autocast or x_NCHW.dtype == conv.weight.dtype):
            return False
    computed_in = torch.get_autocast_dtype(device) if is_autocast else conv.weight.dtype
    # Scaled, weights in float16 can exceed its range.
    return conv.padding_mode == "zeros" and computed_in != torch.float16


def _with_norm(conv: nn.Conv2d, norm: nn.BatchNorm2d, x_NCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias of a convolution whose result is norm(conv(x))."""
    if uses_batch(norm):
        return _with_norm_of_batch(conv, norm, x_NCHW)
    dtype = conv.weight.dtype

    def folded() -> tuple[Tensor, Tensor]:
        assert norm.running_mean is not None and norm.running_var is not None
        wide = torch.promote_types(dtype, torch.float32)
        mean, var = norm.running_mean.to(wide), norm.running_var.to(wide)
        mean, scale, shift = kernels.norm_affine(mean, var, *weight_and_bias(norm, wide, mean.device), norm.eps)
        bias = -mean if conv.bias is None else conv.bias - mean
        return (conv.weight * scale[:, None, None, None]).to(dtype), torch.addcmul(shift, bias, scale).to(dtype)

    weight, bias = kept(conv, conv.weight, number(norm), folded)  # convolutions can share their weights
    return x_NCHW, weight, bias


def _folded(conv: nn.Conv2d, x_NCHW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution of `_with_norm`."""
    if x_NCHW.is_cuda and (weight.dim() == 2 or _runs_as_product(conv, x_NCHW)):
        return linear(x_NCHW.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    weight = weight[:, :, None, None] if weight.dim() == 2 else weight
    return conv2d(x_NCHW, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def _with_norm_of_batch(conv: nn.Conv2d, norm: nn.BatchNorm2d, x_NCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u = W x has the mean W mean(x) and the covariance W cov(x) W^T, so the norm is known before u, a far larger map.

    The images are centered, and the covariance is a float64 product, also under autocast: the colors of most pixels are nearly
    equal, so that filters for differences of colors would lose their digits in float32, and far more in TF32.
    """
    x_NHWc, W_Cc = x_NCHW.permute(0, 2, 3, 1), conv.weight.flatten(1)
    c = x_NCHW.shape[1]
    values = x_NCHW.numel() // c
    mean_c = x_NHWc.mean((0, 1, 2), dtype=torch.float64)
    x_NHWc = x_NHWc.double() - mean_c
    x_MPc = x_NHWc.flatten(0, 1) if x_NCHW.is_cuda else x_NHWc.flatten(1, 2)  # many products fill a GPU
    square_cc = (x_MPc.mT @ x_MPc).sum(0)

    def statistics() -> tuple[Tensor, Tensor]:
        return W_Cc.double() @ mean_c, (W_Cc.double() @ (square_cc / values) * W_Cc).sum(1)

    _, scale_C, shift_C = affine_of(norm, values, torch.float64, statistics)
    # Grey is an additional channel, and the others are distances from it. In grey images, u is the sum of a filter's weights
    # times the grey, and weights that are rounded one by one lose the digits of a sum near zero.
    grey_c1 = torch.full_like(square_cc[:, :1], 1 / c)
    to_grey_cd = torch.cat([grey_c1, torch.eye(c, dtype=grey_c1.dtype, device=grey_c1.device) - grey_c1], 1)
    x_NHWd = (x_NHWc @ to_grey_cd).to(W_Cc.dtype)
    weight_Cd = torch.cat([W_Cc.double().sum(1, keepdim=True), W_Cc], 1) * scale_C[:, None]
    return x_NHWd.permute(0, 3, 1, 2), weight_Cd.to(W_Cc.dtype), shift_C.to(W_Cc.dtype)
