"""SAN: a residual network of self-attention blocks in stages (section 3.4, table "arch-imagenet")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from san.choice import ChoiceError
from san.models.spec import ModelSpec, Trunk
from san.nn import (
    GlobalAveragePool,
    PairwiseAttention,
    PatchwiseAttention,
    ScalarAttention,
    SelfAttention,
    SelfAttentionBlock,
)
from san.nn.fusion import conv_norm_relu, norm_relu
from san.nn.inputs import check_map, specialize
from san.ops.footprint import check_footprint
from san.ops.functional import fuses


@dataclass(frozen=True, slots=True, kw_only=True)
class SANSpec(ModelSpec):
    """A SAN by numbers; the defaults are the paper's. Stage 1 keeps a 3x3 footprint, the others have `footprint`.

    The kinds of attention differ in their fields, so each has a record of its own below.
    """

    footprint: int = 7
    widths: tuple[int, ...] = (64, 256, 512, 1024, 2048)
    r1: int = 16
    r2: int = 4

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
                raise ValueError(f"stage {stage} of {self.name} with images of {size} x {size} pixels: {error}") from None

    def attention(self, channels: int, footprint: int) -> SelfAttention:
        """The attention of one block."""
        raise NotImplementedError

    def build_classifier(self, num_classes: int, in_channels: int) -> SAN:
        return SAN(self, num_classes, in_channels)

    def build_backbone(self, in_channels: int = 3) -> SANBackbone:
        return SANBackbone(self, in_channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseSpec(SANSpec):
    """SAN with pairwise attention."""

    group_size: int = 8
    relation: str = "subtraction"
    mapping: str = "LRL"
    transformation: str = "distinct"
    position: str = "relative"

    def attention(self, channels: int, footprint: int) -> PairwiseAttention:
        return PairwiseAttention(
            channels,
            footprint,
            r1=self.r1,
            r2=self.r2,
            group_size=self.group_size,
            relation=self.relation,
            mapping=self.mapping,
            transformation=self.transformation,
            position=self.position,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchwiseSpec(SANSpec):
    """SAN with patchwise attention."""

    group_size: int = 8
    relation: str = "concatenation"
    mapping: str = "LRL"
    transformation: str = "distinct"

    def attention(self, channels: int, footprint: int) -> PatchwiseAttention:
        return PatchwiseAttention(
            channels,
            footprint,
            r1=self.r1,
            r2=self.r2,
            group_size=self.group_size,
            relation=self.relation,
            mapping=self.mapping,
            transformation=self.transformation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarSpec(SANSpec):
    """SAN with scalar attention: the stand-alone self-attention baseline of section 5.3."""

    r1: int = 4
    heads: int = 8

    def attention(self, channels: int, footprint: int) -> ScalarAttention:
        return ScalarAttention(channels, footprint, r1=self.r1, r2=self.r2, heads=self.heads)


class Stage(nn.Module):
    """Transition (2x2 max pool, Linear), self-attention blocks, BN, ReLU: [N, C, H, W] to [N, width, H/2, W/2]."""

    def __init__(self, width_in: int, width: int, depth: int, footprint: int, spec: SANSpec) -> None:
        super().__init__()
        self.linear = nn.Conv2d(width_in, width, 1, bias=False)
        self.blocks = nn.Sequential(*(SelfAttentionBlock(width, spec.attention(width, footprint)) for _ in range(depth)))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return norm_relu(self.norm, self.blocks(self.linear(max_pool2d(x_NCHW, 2))))


class SANTrunk(Trunk):
    """Linear stem at the image's resolution, then stages that halve it."""

    def __init__(self, spec: SANSpec, in_channels: int) -> None:
        super().__init__(in_channels)
        self.spec = spec
        widths = spec.scaled_widths()
        self.channels = widths
        self.reductions = tuple(2**stage for stage in range(1, len(widths) + 1))
        self.stem = nn.Conv2d(in_channels, widths[0], 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        rows = zip((widths[0], *widths), widths, spec.kept_depths(), spec.footprints(), strict=False)
        self.stages = nn.ModuleList()
        for number, (width_in, width, depth, k) in enumerate(rows, start=1):
            try:
                self.stages.append(Stage(width_in, width, depth, k, spec))
            except ChoiceError:
                raise  # all stages have the same name of a relation, mapping, ...
            except ValueError as error:
                raise ValueError(f"stage {number} of {spec.name} ({width} channels): {error}") from None

    def features(self, x_N3HW: Tensor) -> tuple[Tensor, ...]:
        check_map(x_N3HW, self.stem, "the input")
        specialize(x_N3HW)
        if fuses("pair_weights", x_N3HW):  # the kernels work on channels-last maps
            x_N3HW = x_N3HW.contiguous(memory_format=torch.channels_last)
        x_NCHW = conv_norm_relu(self.stem, self.stem_norm, x_N3HW)
        maps = []
        for stage in self.stages:
            x_NCHW = stage(x_NCHW)
            maps.append(x_NCHW)
        return tuple(maps)

    def parts(self) -> dict[str, list[nn.Module]]:
        stages: dict[str, list[nn.Module]] = {f"stage{number}": [stage] for number, stage in enumerate(self.stages, start=1)}
        return {"stem": [self.stem, self.stem_norm], **stages}


class SANBackbone(SANTrunk):
    """Images [N, in_channels, H, W] to the map of each stage."""

    def forward(self, x_N3HW: Tensor) -> tuple[Tensor, ...]:
        return self.features(x_N3HW)


class SAN(SANTrunk):
    """Classifier: images [N, in_channels, H, W] to logits [N, num_classes]."""

    def __init__(self, spec: SANSpec, num_classes: int, in_channels: int) -> None:
        super().__init__(spec, in_channels)
        self.pool = GlobalAveragePool()
        self.head = nn.Linear(self.channels[-1], num_classes)

    def forward(self, x_N3HW: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x_N3HW)[-1]))

    def parts(self) -> dict[str, list[nn.Module]]:
        return {**super().parts(), "head": [self.pool, self.head]}
