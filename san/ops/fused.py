"""Fused operators on all pairs (i, j) of a pixel and a pixel of its footprint, and on patches. They store no hidden layer and
no attention weights.

Except for `attend_pairs_of_batch`, they contain no BatchNorm, but take its affine form, [3, channels] (`norm_affine`),
computed with `pair_statistics`, `pair_covariance` and `patch_statistics`. Maps are [N, C, H, W] and best channels-last. Other
shapes: `cuda_ext/schemas.py`; formulas: docs/explanation/operators.md.

Internal: of their inputs, they check only the footprint. `functional.fuses` loads the kernels and decides whether `san.nn`
calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from san.ops import library
from san.ops.footprint import check_footprint


def norm_affine(mean_c: Tensor, var_c: Tensor, weight_c: Tensor, bias_c: Tensor, eps: float) -> Tensor:
    """Rows mean, scale and shift, [3, c], of a BatchNorm as (x - mean) * scale + shift."""
    return torch.ops.san.norm_affine(mean_c, var_c, weight_c, bias_c, eps)


def track_statistics(
    running_mean: Tensor, running_var: Tensor, batches: Tensor, mean_c: Tensor, var_c: Tensor, values: int, momentum: float
) -> None:
    """Moves running statistics, float32 or float64, towards those of a batch, and counts it, as BatchNorm does in training.

    `var_c` is the biased variance of `values` values per channel; the running variance is corrected by n / (n - 1).
    """
    torch.ops.san.track_statistics(running_mean, running_var, batches, mean_c, var_c, values, momentum)
    torch.autograd.graph.increment_version((running_mean, running_var, batches))  # autograd detects the change


def pair_statistics(center_NdHW: Tensor, around_NdHW: Tensor, kernel_size: int, products: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of delta = center_i - around_j over all pairs, [d] each.

    The first `products` channels multiply instead: center_i * around_j. Maps are float32 or float64.
    """
    maps = _maps(center_NdHW, around_NdHW, kernel_size)
    mean, var = torch.ops.san.pair_statistics(*maps, kernel_size, products)
    return mean, var


def pair_covariance(
    center_NdHW: Tensor, around_NdHW: Tensor, norm_3d: Tensor, kernel_size: int, products: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean [d] and biased covariance [d, d] over all pairs of a1 = relu(norm(delta)), with delta as in `pair_statistics`. On
    CPUs only."""
    maps = _maps(center_NdHW, around_NdHW, kernel_size)
    mean, covariance = torch.ops.san.pair_covariance(*maps, norm_3d, kernel_size, products)
    return mean, covariance


def attend_pairs(
    center_NdHW: Tensor,
    around_NdHW: Tensor,
    norm_3d: Tensor,
    weight1_Ed: Tensor,
    shift2_E: Tensor,
    weight2_GE: Tensor,
    beta_NMHW: Tensor,
    kernel_size: int,
    products: int = 0,
) -> Tensor:
    """The weighted sum of beta over the footprint, [N, M, H, W], with weights that are never stored.

    They are the softmax of weight2 relu(weight1 a1 + shift2), with a1 as in `pair_covariance`. Without a hidden layer, weight1
    is empty, [0, 0], and weight2 [G, d] is applied to a1.
    """
    maps = _maps(center_NdHW, around_NdHW, kernel_size)
    mapping = norm_3d, weight1_Ed, shift2_E, weight2_GE
    beta_NHWM = beta_NMHW.permute(0, 2, 3, 1)
    y_NHWM, _ = torch.ops.san.attend_pairs(*maps, *mapping, beta_NHWM, kernel_size, products, _may_use_tf32())
    return _in_format_of(beta_NMHW, y_NHWM)


def attend_pairs_of_batch(
    center_NdHW: Tensor,
    around_NdHW: Tensor,
    norm_3d: Tensor,
    weight1_Ed: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight2_GE: Tensor,
    beta_NMHW: Tensor,
    kernel_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_pairs` of differences, with a BatchNorm of the batch between weight1 and the ReLU; on GPUs only.

    Returns the weighted sum, and the mean and biased variance of weight1 a1 over all pairs, [E] each. Only beta may be a half
    type.
    """
    maps = _maps(center_NdHW, around_NdHW, kernel_size)
    layers = norm_3d, weight1_Ed, norm_weight_E, norm_bias_E, weight2_GE
    beta_NHWM = beta_NMHW.permute(0, 2, 3, 1)
    y_NHWM, mean, var, *_ = torch.ops.san.attend_pairs_of_batch(*maps, *layers, beta_NHWM, kernel_size, _may_use_tf32(), eps)
    return _in_format_of(beta_NMHW, y_NHWM), mean, var


def patch_statistics(center_NCHW: Tensor, around_NRHW: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each column of a patch over all pixels, [columns] each; columns as in `patch_linear`."""
    mean, var = torch.ops.san.patch_statistics(*_maps(center_NCHW, around_NRHW, kernel_size), kernel_size)
    return mean, var


def patch_linear(center_NCHW: Tensor, around_NRHW: Tensor, norm: Tensor, weight: Tensor, kernel_size: int) -> Tensor:
    """weight relu(norm(patch)) of every pixel, [N, E, H, W].

    A patch is `center`'s channels at the pixel, which may be none, and then channel c of `around` at position o of the
    footprint in column C + c * K + o. norm [3, columns], weight [E, columns].
    """
    maps = _maps(center_NCHW, around_NRHW, kernel_size)
    u_NEHW: Tensor = torch.ops.san.patch_linear(*maps, norm, weight, kernel_size, _may_use_tf32())
    return u_NEHW


def attend_patches(hidden_NEHW: Tensor, weight: Tensor, bias: Tensor, beta_NMHW: Tensor, kernel_size: int) -> Tensor:
    """The weighted sum of beta over the footprint, [N, M, H, W], with the weights weight hidden + bias, which are never stored.

    weight [G * K, E], bias [G * K].
    """
    check_footprint(kernel_size, *beta_NMHW.shape[2:])
    hidden_NHWE, beta_NHWM = hidden_NEHW.permute(0, 2, 3, 1), beta_NMHW.permute(0, 2, 3, 1)
    y_NHWM = torch.ops.san.attend_patches(hidden_NHWE, weight, bias, beta_NHWM, kernel_size, _may_use_tf32())
    return _in_format_of(beta_NMHW, y_NHWM)


def attend_dot(phi_NRHW: Tensor, psi_NRHW: Tensor, scores: Tensor, beta_NMHW: Tensor, kernel_size: int) -> Tensor:
    """The weighted sum of beta over the footprint, [N, M, H, W], with weights that are never stored.

    They are the softmax of the dot product of phi_i and psi_j in each of G groups of channels plus two scores: `scores`
    [N, G, 2 k, P] has those of the footprint's k rows, then those of its columns.
    """
    check_footprint(kernel_size, *beta_NMHW.shape[2:])
    phi_NHWR, psi_NHWR, beta_NHWM = (x.permute(0, 2, 3, 1) for x in (phi_NRHW, psi_NRHW, beta_NMHW))
    y_NHWM, _ = torch.ops.san.attend_dot(phi_NHWR, psi_NHWR, scores, beta_NHWM, kernel_size)
    return _in_format_of(beta_NMHW, y_NHWM)


def norm_relu(
    x_NCHW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    mean_C: Tensor | None,
    var_C: Tensor | None,
    eps: float,
    residual_NCHW: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(batch_norm(x) + residual) of a channels-last map, [N, C, H, W], and the mean and biased variance in float64.

    Without `mean` and `var`, the statistics are those of x. Maps are float32, on a GPU also bfloat16.
    """
    x_NHWC, vectors = x_NCHW.permute(0, 2, 3, 1).contiguous(), (weight_C, bias_C, mean_C, var_C, eps)
    if residual_NCHW is None:
        y_NHWC, mean, var = torch.ops.san.norm_relu(x_NHWC, *vectors)
    else:
        y_NHWC, mean, var = torch.ops.san.norm_add_relu(x_NHWC, residual_NCHW.permute(0, 2, 3, 1), *vectors)
    return y_NHWC.permute(0, 3, 1, 2), mean, var


def norm_relu_branch(
    x_NCHW: Tensor, weight_C: Tensor, bias_C: Tensor, mean_C: Tensor | None, var_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x itself and the results of `norm_relu`. The gradient of the returned x is added where that of the norm is computed."""
    x_NHWC = x_NCHW.permute(0, 2, 3, 1).contiguous()
    vectors = weight_C, bias_C, mean_C, var_C, eps
    x_NHWC, y_NHWC, mean, var = library.NormReluBranch.apply(x_NHWC, *vectors)  # type: ignore[no-untyped-call]
    return x_NHWC.permute(0, 3, 1, 2), y_NHWC.permute(0, 3, 1, 2), mean, var


def max_pool(x_NCHW: Tensor) -> Tensor:
    """2x2 max pooling of a channels-last map, [N, C, H / 2, W / 2]. The map is float32, on a GPU also bfloat16."""
    y_NHWC, _ = torch.ops.san.max_pool(x_NCHW.permute(0, 2, 3, 1).contiguous())
    y_NCHW: Tensor = y_NHWC.permute(0, 3, 1, 2)
    return y_NCHW


def stem(weight_Cc: Tensor, bias_C: Tensor, x_NcHW: Tensor, half: bool = False) -> Tensor:
    """A Linear layer, ReLU and 2x2 max pooling of float32 images, [N, C, H / 2, W / 2]; with `half`, on a GPU, in bfloat16.

    There are no gradients of the images: if they are wanted, the backward pass raises RuntimeError.
    """
    y_NHWC, _ = torch.ops.san.stem(weight_Cc, bias_C, x_NcHW.permute(0, 2, 3, 1).contiguous(), half)
    y_NCHW: Tensor = y_NHWC.permute(0, 3, 1, 2)
    return y_NCHW


def _maps(center_NCHW: Tensor, around_NCHW: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """The maps as [N, H, W, C]; a map that is channels-last already is not copied."""
    check_footprint(kernel_size, *around_NCHW.shape[2:])
    return center_NCHW.permute(0, 2, 3, 1).contiguous(), around_NCHW.permute(0, 2, 3, 1).contiguous()


def _in_format_of(beta_NMHW: Tensor, y_NHWM: Tensor) -> Tensor:
    """y as [N, M, H, W], channels-last if beta is, otherwise contiguous."""
    y_NMHW = y_NHWM.permute(0, 3, 1, 2)
    return y_NMHW if library.is_channels_last(beta_NMHW) else y_NMHW.contiguous()


@library.constant
def _may_use_tf32() -> bool:
    """torch's setting for float32 matrix products on GPUs."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
