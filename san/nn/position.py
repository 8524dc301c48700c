"""Position encoding of pairwise attention (section 3.1, "Position encoding", and table "position")."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from san import ops

CHANNELS = 2
"""Channels of a position feature."""


def coordinates(like_NRHW: Tensor, dtype: torch.dtype) -> Tensor:
    """Coordinates in [-1, 1] of a map's pixels, width first: [1, 2, H, W], on the map's device."""
    height, width = like_NRHW.shape[2:]
    across = torch.linspace(-1, 1, width, dtype=dtype, device=like_NRHW.device).expand(height, width)
    down = torch.linspace(-1, 1, height, dtype=dtype, device=like_NRHW.device).unsqueeze(1).expand(height, width)
    return torch.stack((across, down)).unsqueeze(0)


def _relative(p_12HW: Tensor, footprint: int) -> Tensor:
    """p_i - p_j."""
    return ops.subtraction(p_12HW, p_12HW, footprint)


# What is concatenated to the relation, [1, 2, K, P], from the position features p [1, 2, H, W]; absolute is p_j.
POSITIONS: dict[str, Callable[[Tensor, int], Tensor] | None] = {"none": None, "absolute": ops.unfold, "relative": _relative}


class Position(nn.Module):
    """Position features over the footprint, where p is a trainable linear map of the coordinates: [1, 2, K, P].

    Half types could not tell neighbours from each other evenly, so p is computed in float32 at least.
    """

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding
        self.linear = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, like_NRHW: Tensor, footprint: int) -> Tensor:
        """`like_NRHW` gives the map's size, dtype and device; its values are not read."""
        device = like_NRHW.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._encoded(like_NRHW, footprint)
        return self._encoded(like_NRHW, footprint)

    def _encoded(self, like_NRHW: Tensor, footprint: int) -> Tensor:
        encode = POSITIONS[self.encoding]
        assert encode is not None, "attention without position has no such module"
        dtype = torch.promote_types(like_NRHW.dtype, torch.float32)
        weight, bias = self.linear.weight.to(dtype), self.linear.bias
        assert bias is not None, "p is an affine map"
        p_12HW = conv2d(coordinates(like_NRHW, dtype), weight, bias.to(dtype))
        return encode(p_12HW, footprint).to(like_NRHW.dtype)
