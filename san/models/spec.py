"""What every model's record has: a name, stages, and the two ways to make it smaller without changing its kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model by numbers: a row of the registry.

    `stages` keeps only that many first stages, `width_factor` scales every width: a small profile uses both, so that each
    named variant still differs from the others as it does at full size.
    """

    name: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    stages: int | None = None
    width_factor: float = 1.0

    def __post_init__(self) -> None:
        if len(self.depths) != len(self.widths):
            raise ValueError(f"{self.name}: {len(self.depths)} depths but {len(self.widths)} widths; give one per stage")
        if self.stages is not None and not 1 <= self.stages <= len(self.depths):
            raise ValueError(f"{self.name}: stages must be 1 to {len(self.depths)}, not {self.stages}")
        if not 0 < self.width_factor < math.inf:
            raise ValueError(f"{self.name}: width_factor must be positive, not {self.width_factor}")
        if not self.depths or min(self.depths) < 1 or min(self.scaled_widths()) < 1:
            shape = f"depths {self.depths} and widths {self.scaled_widths()}"
            raise ValueError(f"{self.name}: each stage needs a block and a channel, not {shape}")

    def kept_depths(self) -> tuple[int, ...]:
        """Blocks in each stage that is kept."""
        return self.depths[: self.stages]

    def scaled_widths(self) -> tuple[int, ...]:
        """Channels of each stage that is kept."""
        return tuple(int(width * self.width_factor) for width in self.widths[: self.stages])

    def check_input(self, size: int) -> None:
        """Raises ValueError where a square input of `size` pixels is too small for the model."""
        raise NotImplementedError

    def build(self, num_classes: int) -> nn.Module:
        """The model with fresh weights, images [N, 3, H, W] to logits [N, num_classes]."""
        raise NotImplementedError
