"""SAN: a residual network of self-attention blocks in stages (section 3.4, table "arch-imagenet")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from san.models.spec import ModelSpec
from san.nn import ATTENTION, SelfAttentionBlock
from san.ops.footprint import check_footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class SANSpec(ModelSpec):
    """A SAN by numbers; the defaults are the paper's. Stage 1 keeps a 3x3 footprint, the others have `footprint`."""

    attention: Literal["pairwise", "patchwise"]
    footprint: int = 7
    widths: tuple[int, ...] = (64, 256, 512, 1024, 2048)
    r1: int = 16
    r2: int = 4
    share: int = 8

    def footprints(self) -> tuple[int, ...]:
        """Side of the footprint for each stage, in pixels."""
        return (3, *[self.footprint] * (len(self.scaled_widths()) - 1))

    def check_input(self, size: int) -> None:
        """Every stage halves the map, and reflection needs a map larger than half the footprint."""
        for stage, footprint in enumerate(self.footprints(), start=1):
            side = size >> stage
            try:
                check_footprint(footprint, side, side)
            except ValueError as error:
                raise ValueError(f"stage {stage} of {self.name} at input size {size}: {error}") from None

    def build(self, num_classes: int) -> SAN:
        return SAN(self, num_classes)


class Stage(nn.Module):
    """Transition (2x2 max pool, Linear), self-attention blocks, BN, ReLU: [N, C, H, W] to [N, width, H/2, W/2]."""

    def __init__(self, width_in: int, width: int, depth: int, footprint: int, spec: SANSpec) -> None:
        super().__init__()
        attention = ATTENTION[spec.attention]
        self.linear = nn.Conv2d(width_in, width, 1, bias=False)
        self.blocks = nn.Sequential(
            *(SelfAttentionBlock(width, attention(width, footprint, spec.r1, spec.r2, spec.share)) for _ in range(depth))
        )
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return relu(self.norm(self.blocks(self.linear(max_pool2d(x_NCHW, 2)))), inplace=True)


class SAN(nn.Module):
    """Classifier: images [N, 3, H, W] to logits [N, num_classes]."""

    def __init__(self, spec: SANSpec, num_classes: int) -> None:
        super().__init__()
        self.spec = spec
        widths = spec.scaled_widths()
        self.stem = nn.Conv2d(3, widths[0], 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        rows = zip((widths[0], *widths), widths, spec.kept_depths(), spec.footprints(), strict=False)
        self.stages = nn.ModuleList(Stage(width_in, width, depth, k, spec) for width_in, width, depth, k in rows)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x_N3HW: Tensor) -> Tensor:
        x_NCHW = relu(self.stem_norm(self.stem(x_N3HW)), inplace=True)
        for stage in self.stages:
            x_NCHW = stage(x_NCHW)
        return self.head(x_NCHW.mean((2, 3)))
