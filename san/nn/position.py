"""Position encoding of pairwise attention (section 3.1, "Position encoding")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from san import ops


def coordinates(like_NRHW: Tensor) -> Tensor:
    """Coordinates in [-1, 1] of a map's pixels, width first: [1, 2, H, W], in the map's dtype and on its device."""
    height, width = like_NRHW.shape[2:]
    across = torch.linspace(-1, 1, width, dtype=like_NRHW.dtype, device=like_NRHW.device).expand(height, width)
    down = torch.linspace(-1, 1, height, dtype=like_NRHW.dtype, device=like_NRHW.device).unsqueeze(1).expand(height, width)
    return torch.stack((across, down)).unsqueeze(0)


class RelativePosition(nn.Module):
    """p_i - p_j over the footprint, where p is a trainable linear map of the coordinates: [1, 2, K, P]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv2d(2, 2, 1)

    def forward(self, like_NRHW: Tensor, footprint: int) -> Tensor:
        """`like_NRHW` gives the map's size, dtype and device; its values are not read."""
        p_12HW = self.linear(coordinates(like_NRHW))
        return ops.subtraction(p_12HW, p_12HW, footprint)
