"""Vector self-attention, pairwise and patchwise (sections 3.1 and 3.2).

Shapes: N batch, C channels, R = C / r1 relation channels, M = C / r2 value channels, G = M / share weight channels, H W map,
P = H * W output positions, K = footprint^2 positions of a footprint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from san import ops
from san.nn.mapping import mapping
from san.nn.position import RelativePosition


class VectorAttention(nn.Module):
    """What both kinds share: the transformations phi, psi, beta, and the aggregation of beta by the weights.

    Args:
        channels: C, a multiple of `r1` and of `r2 * share`.
        footprint: side of the square footprint R(i) in pixels, odd.
        r1: reduction of phi and psi.
        r2: reduction of beta.
        share: value channels that share one attention weight.

    Raises:
        ValueError: channels that the reductions do not divide.
    """

    def __init__(self, channels: int, footprint: int, r1: int, r2: int, share: int) -> None:
        super().__init__()
        if min(r1, r2, share) < 1 or channels % r1 or channels % (r2 * share):
            raise ValueError(f"{channels} channels cannot be divided by r1={r1} and by r2 * share={r2 * share}")
        self.footprint = footprint
        self.relation_channels = channels // r1
        self.value_channels = channels // r2
        self.weight_channels = self.value_channels // share
        self.phi = nn.Conv2d(channels, self.relation_channels, 1)
        self.psi = nn.Conv2d(channels, self.relation_channels, 1)
        self.beta = nn.Conv2d(channels, self.value_channels, 1)

    def weights(self, x_NCHW: Tensor) -> Tensor:
        """The attention weights alpha, [N, G, K, P]."""
        raise NotImplementedError

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Maps [N, C, H, W] to [N, M, H, W]."""
        beta_NMHW = self.beta(x_NCHW)
        # Under autocast the softmax answers in float32 while beta is a half type.
        weight_NGKP = self.weights(x_NCHW).to(beta_NMHW.dtype)
        return ops.aggregation(beta_NMHW, weight_NGKP, self.footprint)

    def extra_repr(self) -> str:
        return f"footprint={self.footprint}, values={self.value_channels}, weights={self.weight_channels}"


class PairwiseAttention(VectorAttention):
    """y_i = sum_j softmax_j(gamma([phi_i - psi_j, p_i - p_j])) * beta_j (equations 1 and 2, subtraction relation)."""

    def __init__(self, channels: int, footprint: int = 7, r1: int = 16, r2: int = 4, share: int = 8) -> None:
        super().__init__(channels, footprint, r1, r2, share)
        self.position = RelativePosition()
        self.gamma = mapping((self.relation_channels + 2, self.relation_channels, self.weight_channels))

    def weights(self, x_NCHW: Tensor) -> Tensor:
        """Softmax over the footprint, so the weights of a pixel sum to one in each weight channel: [N, G, K, P]."""
        phi, psi = self.phi(x_NCHW), self.psi(x_NCHW)
        relation_NRKP = ops.subtraction(phi, psi, self.footprint)
        position_12KP = self.position(phi, self.footprint)
        position_N2KP = position_12KP.expand(relation_NRKP.shape[0], -1, -1, -1)
        return self.gamma(torch.cat((relation_NRKP, position_N2KP), 1)).softmax(dim=2)


class PatchwiseAttention(VectorAttention):
    """y_i = sum_j gamma([phi_i, psi_j for all j])_j * beta_j (equations 4 and 5, concatenation relation); no softmax."""

    def __init__(self, channels: int, footprint: int = 7, r1: int = 16, r2: int = 4, share: int = 8) -> None:
        super().__init__(channels, footprint, r1, r2, share)
        K, R, G = footprint**2, self.relation_channels, self.weight_channels
        self.gamma = mapping((R * (K + 1), G, K * G))

    def weights(self, x_NCHW: Tensor) -> Tensor:
        """One weight vector per position of the footprint, unbounded: [N, G, K, P]."""
        phi_NR1P = self.phi(x_NCHW).flatten(2).unsqueeze(2)
        psi_NRKP = ops.unfold(self.psi(x_NCHW), self.footprint)
        patch_N1P = torch.cat((phi_NR1P, psi_NRKP.flatten(1, 2).unsqueeze(2)), 1)
        return self.gamma(patch_N1P).unflatten(1, (self.weight_channels, self.footprint**2)).squeeze(3)


# The kinds of attention by name: the one place to add another.
ATTENTION: dict[str, type[VectorAttention]] = {"pairwise": PairwiseAttention, "patchwise": PatchwiseAttention}
