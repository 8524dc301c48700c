"""The specification of the operators, in plain torch, in the paper's symbols. Every kernel is tested against it.

Source: Zhao, Jia, Koltun, "Exploring Self-attention for Image Recognition", CVPR 2020 (arXiv:2004.13621), section 3.

Shapes: N batch, C channels, R relation channels, G weight channels, H W map, P = H * W output positions i,
K = kernel_size^2 footprint positions j (row by row). It avoids in-place operations and data-dependent shapes, because
`torch.export` and ONNX export this code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unfold(x_NCHW: Tensor, kernel_size: int) -> Tensor:
    """x_j for every j in the footprint R(i) of every pixel i: [N, C, K, P]."""
    N, C, H, W = x_NCHW.shape
    if x_NCHW.numel() == 0:  # F.unfold refuses an empty batch
        return x_NCHW.new_empty(N, C, kernel_size**2, H * W) + x_NCHW.sum()
    padded = F.pad(x_NCHW, (kernel_size // 2,) * 4, mode="reflect")
    # Under autocast on a CPU, the padding is in float32.
    return F.unfold(padded, kernel_size).view(N, C, kernel_size**2, H * W).to(x_NCHW.dtype)


def subtraction(phi_NRHW: Tensor, psi_NRHW: Tensor, kernel_size: int) -> Tensor:
    """delta(x_i, x_j) = phi(x_i) - psi(x_j), section 3.1: [N, R, K, P]."""
    return phi_NRHW.flatten(2).unsqueeze(2) - unfold(psi_NRHW, kernel_size)


def dot(phi_NRHW: Tensor, psi_NRHW: Tensor, kernel_size: int, groups: int) -> Tensor:
    """delta(x_i, x_j) = phi(x_i)^T psi(x_j) within each group of channels, section 3.1: [N, groups, K, P].

    Channel c belongs to group c % groups. One group is the dot product, a group per channel the Hadamard product.
    """
    center = phi_NRHW.flatten(2).unflatten(1, (-1, groups))  # [N, S, groups, P]
    around = unfold(psi_NRHW, kernel_size).unflatten(1, (-1, groups))  # [N, S, groups, K, P]
    return torch.einsum("nsgp,nsgkp->ngkp", center, around)


def aggregation(beta_NCHW: Tensor, weight_NGKP: Tensor, kernel_size: int) -> Tensor:
    """y_i = sum over j in R(i) of alpha_ij * beta(x_j), equations 2 and 4: [N, C, H, W].

    Value channel c uses weight channel c % G, as in the released code.
    """
    C, H, W = beta_NCHW.shape[1:]
    G = weight_NGKP.shape[1]
    values = unfold(beta_NCHW, kernel_size).unflatten(1, (C // G, G))  # [N, S, G, K, P]
    y_NSGP = torch.einsum("ngkp,nsgkp->nsgp", weight_NGKP, values)
    # In these steps, because torch.export cannot prove one reshape valid for every size if G = 1.
    return y_NSGP.flatten(1, 2).contiguous().unflatten(2, (H, W))
