"""The fused operators in plain torch: every kernel is compared with them, and derivatives of derivatives use them.

Shapes as in `cuda_ext/schemas.py`; all tensors have the same type.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from san.ops import reference


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
    delta_dM = relation(center_NHWd, around_NHWd, kernel_size, products).transpose(0, 1).flatten(1)
    return delta_dM.mean(1), delta_dM.var(1, correction=0)


def pair_activation(center_NHWd: Tensor, around_NHWd: Tensor, shift_d: Tensor, kernel_size: int, products: int) -> Tensor:
    """a1 of every pair, [N, d, K, P]."""
    return (relation(center_NHWd, around_NHWd, kernel_size, products) + shift_d[:, None, None]).relu()


def pair_covariance(
    center_NHWd: Tensor, around_NHWd: Tensor, shift_d: Tensor, kernel_size: int, products: int
) -> tuple[Tensor, Tensor]:
    """Mean [d] and biased covariance [d, d] of a1 over all pairs."""
    a1_dM = pair_activation(center_NHWd, around_NHWd, shift_d, kernel_size, products).transpose(0, 1).flatten(1)
    mean_d = a1_dM.mean(1)
    rest_dM = a1_dM - mean_d[:, None]
    return mean_d, rest_dM @ rest_dM.T / a1_dM.shape[1]


def pair_weights(
    center_NHWd: Tensor,
    around_NHWd: Tensor,
    shift1_d: Tensor,
    weight1_Ed: Tensor,
    shift2_E: Tensor,
    weight2_GE: Tensor,
    kernel_size: int,
    products: int,
) -> Tensor:
    """The attention weights, [N, G, K, P]."""
    hidden = pair_activation(center_NHWd, around_NHWd, shift1_d, kernel_size, products)
    if len(weight1_Ed):
        hidden = (torch.einsum("ed,ndkp->nekp", weight1_Ed, hidden) + shift2_E[:, None, None]).relu()
    return torch.einsum("ge,nekp->ngkp", weight2_GE, hidden).softmax(2)


def patch_linear(
    center_NHWC: Tensor, around_NHWR: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, kernel_size: int
) -> Tensor:
    """The Linear layer after BatchNorm and ReLU of the patches, [N, E, H, W]."""
    H, W = center_NHWC.shape[1:3]
    center_NCP = center_NHWC.permute(0, 3, 1, 2).flatten(2)
    patch = torch.cat((center_NCP, unfold(around_NHWR, kernel_size).flatten(1, 2)), 1)
    activated = (scale[:, None] * patch + shift[:, None]).relu()
    return torch.einsum("ec,ncp->nep", weight, activated).unflatten(2, (H, W))


def norm_relu(x_NHWC: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, of_batch: bool) -> Tensor:
    """BatchNorm and ReLU, [N, H, W, C], with the statistics `mean` and `var` or, if `of_batch` is set, with those of x."""
    x_NCHW = x_NHWC.permute(0, 3, 1, 2)
    used_mean, used_var = (None, None) if of_batch else (mean, var)
    return batch_norm(x_NCHW, used_mean, used_var, weight, bias, of_batch, eps=eps).relu().permute(0, 2, 3, 1)
