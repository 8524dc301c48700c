"""The fused operators in plain torch: every kernel is compared with them, and derivatives of derivatives use them.

Arguments and shapes as in `cuda_ext/schemas.py`; all tensors have the same type, and `tf32` has no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, linear, max_pool2d

from san.ops import reference


def norm_affine(mean_c: Tensor, var_c: Tensor, weight_c: Tensor, bias_c: Tensor, eps: float) -> Tensor:
    """Mean, scale and shift of a norm as (x - mean) * scale + shift, [3, c]."""
    return torch.stack((mean_c, (var_c.clamp_min(0) + eps).rsqrt() * weight_c, bias_c))


def normalized(x_NcM: Tensor, norm_3c: Tensor) -> Tensor:
    """(x - mean) * scale + shift, [N, c, M]."""
    mean, scale, shift = norm_3c[:, :, None]
    return (x_NcM - mean) * scale + shift


def unfold(x_NHWC: Tensor, kernel_size: int) -> Tensor:
    """The footprint of every pixel, [N, C, K, P]."""
    return reference.unfold(x_NHWC.permute(0, 3, 1, 2), kernel_size)


def relation(center_NHWd: Tensor, around_NHWd: Tensor, kernel_size: int, products: int) -> Tensor:
    """delta of every pair, [N, d, K, P]: products in the first channels, differences in the others."""
    center = center_NHWd.permute(0, 3, 1, 2).flatten(2).unsqueeze(2)
    around = unfold(around_NHWd, kernel_size)
    return torch.cat((center[:, :products] * around[:, :products], center[:, products:] - around[:, products:]), 1)


def pair_statistics(center_NHWd: Tensor, around_NHWd: Tensor, kernel_size: int, products: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of delta over all pairs, [d] each."""
    return _statistics(relation(center_NHWd, around_NHWd, kernel_size, products))


def pair_activation(center_NHWd: Tensor, around_NHWd: Tensor, norm_3d: Tensor, kernel_size: int, products: int) -> Tensor:
    """a1 of every pair, [N, d, K, P]."""
    delta = relation(center_NHWd, around_NHWd, kernel_size, products)
    return normalized(delta.flatten(2), norm_3d).relu().unflatten(2, delta.shape[2:])


def pair_covariance(
    center_NHWd: Tensor, around_NHWd: Tensor, norm_3d: Tensor, kernel_size: int, products: int
) -> tuple[Tensor, Tensor]:
    """Mean [d] and biased covariance [d, d] of a1 over all pairs."""
    a1_dM = pair_activation(center_NHWd, around_NHWd, norm_3d, kernel_size, products).transpose(0, 1).flatten(1)
    mean_d = a1_dM.mean(1)
    rest_dM = a1_dM - mean_d[:, None]
    return mean_d, rest_dM @ rest_dM.T / a1_dM.shape[1]


def pair_weights(
    center_NHWd: Tensor,
    around_NHWd: Tensor,
    norm_3d: Tensor,
    weight1_Ed: Tensor,
    shift2_E: Tensor,
    weight2_GE: Tensor,
    kernel_size: int,
    products: int,
) -> Tensor:
    """The attention weights, [N, G, K, P]."""
    hidden = pair_activation(center_NHWd, around_NHWd, norm_3d, kernel_size, products)
    if len(weight1_Ed):
        hidden = (torch.einsum("ed,ndkp->nekp", weight1_Ed, hidden) + shift2_E[:, None, None]).relu()
    return torch.einsum("ge,nekp->ngkp", weight2_GE, hidden).softmax(2)


def attend_pairs(
    center_NHWd: Tensor,
    around_NHWd: Tensor,
    norm_3d: Tensor,
    weight1_Ed: Tensor,
    shift2_E: Tensor,
    weight2_GE: Tensor,
    beta_NHWM: Tensor,
    kernel_size: int,
    products: int,
    tf32: bool = False,
) -> Tensor:
    """The weighted sum of beta with the weights of `pair_weights`, [N, H, W, M]."""
    mapping = norm_3d, weight1_Ed, shift2_E, weight2_GE
    return _aggregated(beta_NHWM, pair_weights(center_NHWd, around_NHWd, *mapping, kernel_size, products), kernel_size)


def attend_pairs_of_batch(
    center_NHWd: Tensor,
    around_NHWd: Tensor,
    norm_3d: Tensor,
    weight1_Ed: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight2_GE: Tensor,
    beta_NHWM: Tensor,
    kernel_size: int,
    tf32: bool,
    eps: float,
) -> Tensor:
    """`attend_pairs` with a BatchNorm between its layers, by the statistics of the batch, [N, H, W, M]."""
    mean_d, covariance_dd = pair_covariance(center_NHWd, around_NHWd, norm_3d, kernel_size, 0)
    mean_E, var_E = weight1_Ed @ mean_d, (weight1_Ed @ covariance_dd * weight1_Ed).sum(1)
    mean_E, scale_E, shift_E = norm_affine(mean_E, var_E, norm_weight_E, norm_bias_E, eps)
    layers = norm_3d, scale_E[:, None] * weight1_Ed, shift_E - scale_E * mean_E, weight2_GE
    return attend_pairs(center_NHWd, around_NHWd, *layers, beta_NHWM, kernel_size, 0)


def patches(center_NHWC: Tensor, around_NHWR: Tensor, kernel_size: int) -> Tensor:
    """The patch of every pixel, [N, columns, P]."""
    center_NCP = center_NHWC.permute(0, 3, 1, 2).flatten(2)
    return torch.cat((center_NCP, unfold(around_NHWR, kernel_size).flatten(1, 2)), 1)


def patch_statistics(center_NHWC: Tensor, around_NHWR: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each column of a patch over all pixels, [columns] each."""
    return _statistics(patches(center_NHWC, around_NHWR, kernel_size))


def patch_linear(
    center_NHWC: Tensor, around_NHWR: Tensor, norm: Tensor, weight: Tensor, kernel_size: int, tf32: bool = False
) -> Tensor:
    """The Linear layer after BatchNorm and ReLU of the patches, [N, E, H, W]."""
    activated = normalized(patches(center_NHWC, around_NHWR, kernel_size), norm).relu()
    return torch.einsum("ec,ncp->nep", weight, activated).unflatten(2, center_NHWC.shape[1:3])


def attend_patches(
    hidden_NHWE: Tensor, weight: Tensor, bias: Tensor, beta_NHWM: Tensor, kernel_size: int, tf32: bool = False
) -> Tensor:
    """The weighted sum of beta with the weights linear(hidden), [N, H, W, M]."""
    weight_NGKP = linear(hidden_NHWE.flatten(1, 2), weight, bias).mT.unflatten(1, (-1, kernel_size**2))
    return _aggregated(beta_NHWM, weight_NGKP, kernel_size)


def attend_dot(phi_NHWR: Tensor, psi_NHWR: Tensor, scores: Tensor, beta_NHWM: Tensor, kernel_size: int) -> Tensor:
    """The weighted sum of beta with the softmax of dot products and scores, [N, H, W, M]."""
    phi_NRHW, psi_NRHW = (x.permute(0, 3, 1, 2) for x in (phi_NHWR, psi_NHWR))
    of_row, of_column = scores.split(kernel_size, 2)
    offsets_NGKP = (of_row.unsqueeze(3) + of_column.unsqueeze(2)).flatten(2, 3)
    z_NGKP = reference.dot(phi_NRHW, psi_NRHW, kernel_size, scores.shape[1]) + offsets_NGKP
    return _aggregated(beta_NHWM, z_NGKP.softmax(2), kernel_size)


def norm_relu(
    x_NHWC: Tensor, weight_C: Tensor, bias_C: Tensor, mean_C: Tensor | None, var_C: Tensor | None, eps: float
) -> Tensor:
    """BatchNorm and ReLU, [N, H, W, C], with the statistics `mean` and `var` or, without them, with those of x."""
    x_NCHW = x_NHWC.permute(0, 3, 1, 2)
    return batch_norm(x_NCHW, mean_C, var_C, weight_C, bias_C, mean_C is None, eps=eps).relu().permute(0, 2, 3, 1)


def norm_add_relu(
    x_NHWC: Tensor,
    residual_NHWC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    mean_C: Tensor | None,
    var_C: Tensor | None,
    eps: float,
) -> Tensor:
    """BatchNorm as in `norm_relu`, addition of a residual, and ReLU, [N, H, W, C]."""
    x_NCHW = batch_norm(x_NHWC.permute(0, 3, 1, 2), mean_C, var_C, weight_C, bias_C, mean_C is None, eps=eps)
    return (x_NCHW.permute(0, 2, 3, 1) + residual_NHWC).relu()


def max_pool(x_NHWC: Tensor) -> Tensor:
    """2x2 max pooling, [N, H / 2, W / 2, C]."""
    return max_pool2d(x_NHWC.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


def stem(weight_Cc: Tensor, bias_C: Tensor, x_NHWc: Tensor, half: bool = False) -> Tensor:
    """A Linear layer, ReLU and 2x2 max pooling, [N, H / 2, W / 2, C]."""
    return max_pool(linear(x_NHWc, weight_Cc, bias_C).relu())


def _aggregated(beta_NHWM: Tensor, weight_NGKP: Tensor, kernel_size: int) -> Tensor:
    return reference.aggregation(beta_NHWM.permute(0, 3, 1, 2), weight_NGKP, kernel_size).permute(0, 2, 3, 1)


def _statistics(x_Nc: Tensor) -> tuple[Tensor, Tensor]:
    x_cM = x_Nc.transpose(0, 1).flatten(1)
    return x_cM.mean(1), x_cM.var(1, correction=0)
