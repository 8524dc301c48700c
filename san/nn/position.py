"""Position encoding of pairwise attention (section 3.1, "Position encoding", and table "position")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from san import ops
from san.nn.folding import kept
from san.nn.inputs import full_precision
from san.nn.mapping import PairMaps
from san.nn.norm import is_plain
from san.ops.tracing import is_traced, leaf

CHANNELS = 2
"""Channels of a position feature."""


def coordinates(like_NRHW: Tensor, dtype: torch.dtype) -> Tensor:
    """Coordinates in [-1, 1] of a map's pixels, width first: [1, 2, H, W], on the map's device."""
    height, width = like_NRHW.shape[2:]
    across, down = (_axis(size, dtype, like_NRHW.device) for size in (width, height))
    return torch.stack((across.expand(height, width), down.unsqueeze(1).expand(height, width))).unsqueeze(0)


def _axis(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`size` numbers from -1 to 1 at equal distances."""
    if not torch.compiler.is_compiling() and not torch._C._is_tracing():
        return torch.linspace(-1, 1, size, dtype=dtype, device=device)
    # linspace would fix the size in a graph. Other code for eager mode, because the last bits differ.
    pixel = torch.arange(size, dtype=dtype, device=device)
    return 2 * pixel / pixel[-1:].clamp_min(1) - 1


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding of the pair (i, j), computed from position features p [1, 2, H, W]."""

    encode: Callable[[Tensor, int], Tensor]
    """(p, side of the footprint) to [1, 2, K, P]."""
    difference: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Two maps, [1, 2, H, W] each, with encode(p) = center_i - around_j."""


POSITIONS: dict[str, Encoding | None] = {
    "none": None,
    "absolute": Encoding(ops.unfold, lambda p: (torch.zeros_like(p), -p)),  # p_j
    "relative": Encoding(lambda p, footprint: ops.subtraction(p, p, footprint), lambda p: (p, p)),  # p_i - p_j
}


class Position(nn.Module):
    """Position features over the footprint, where p is a trainable linear map of the coordinates: [1, 2, K, P].

    p is computed in float32 or float64, because half types would round neighboring coordinates unevenly.
    """

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding
        self.linear = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, like_NRHW: Tensor, footprint: int) -> Tensor:
        """Only the size, dtype and device of `like_NRHW` are used."""
        return self.row.encode(self.features(like_NRHW), footprint).to(like_NRHW.dtype)

    def appended_to(self, maps: PairMaps) -> PairMaps:
        """The maps of a relation plus two channels for the position, in p's type because half types would round differences."""

        def positions() -> tuple[Tensor, ...]:
            return self.row.difference(self.features(maps.center))

        plain = is_plain(self.linear, nn.Conv2d)
        positions_12HW = kept(self, maps.center, maps.center.shape[2:], positions) if plain else positions()
        # Joined as [N, H, W, channels]: maps stay channels-last, because `cat` is told the format by neither of its inputs.
        center, around = (
            torch.cat((x.permute(0, 2, 3, 1), p.expand(len(x), -1, -1, -1).permute(0, 2, 3, 1)), 3).permute(0, 3, 1, 2)
            for x, p in zip(maps[:2], positions_12HW, strict=True)
        )
        return PairMaps(center, around, maps.products)

    @property
    def row(self) -> Encoding:
        """The encoding, a row of `POSITIONS`."""
        row = POSITIONS[self.encoding]
        assert row is not None, "attention without position has no such module"
        return row

    def features(self, like_NRHW: Tensor) -> Tensor:
        """p of every pixel, [1, 2, H, W], in float32 or float64."""
        if isinstance(self.linear, nn.Conv2d) and (is_traced(like_NRHW) or is_plain(self.linear, nn.Conv2d)):
            return _projected(like_NRHW, self.linear.weight, self.linear.bias)
        dtype = torch.promote_types(like_NRHW.dtype, torch.float32)
        computed_in = next((weight.dtype for weight in self.linear.parameters()), dtype)
        with full_precision(like_NRHW.device.type):
            return self.linear(coordinates(like_NRHW, computed_in)).to(dtype)


@leaf
def _projected(like_NRHW: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(like_NRHW.dtype, torch.float32)
    with full_precision(like_NRHW.device.type):
        return conv2d(coordinates(like_NRHW, dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
