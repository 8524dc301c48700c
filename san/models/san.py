"""SAN: a residual network of self-attention blocks in stages (section 3.4, table "arch-imagenet")."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor, nn

from san.choice import ChoiceError, ModelError
from san.models.base import BaseModel, StagedSpec
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention, SelfAttentionBlock
from san.nn.depth import Blocks
from san.nn.inputs import check_map, specialize
from san.nn.norm import conv_norm_relu, conv_norm_relu_pool, convolve, is_plain, max_pool, norm_relu
from san.ops.footprint import check_footprint, check_side
from san.ops.functional import fuses
from san.ops.tracing import is_traced


@dataclass(frozen=True, slots=True, kw_only=True)
class SANSpec(StagedSpec):
    """A SAN in numbers, with the paper's defaults. Stage 1 has a 3x3 footprint; `footprint` applies to the other stages.

    Each kind of attention has a subclass with fields for the arguments of its module.
    """

    module: ClassVar[type[SelfAttention]]
    footprint: int = 7
    widths: tuple[int, ...] = (64, 256, 512, 1024, 2048)
    r1: int = 16
    r2: int = 4

    def footprints(self) -> tuple[int, ...]:
        """Side of the footprint for each stage, in pixels."""
        return (3, *[self.footprint] * (len(self.scaled_widths()) - 1))

    def check_input(self, size: int, width: int | None = None) -> None:
        """Every stage halves the map, and reflection needs a map larger than half the footprint."""
        width = size if width is None else width
        for stage, footprint in enumerate(self.footprints(), start=1):
            check_side(footprint)
            try:
                check_footprint(footprint, size >> stage, width >> stage)
            except ModelError as error:
                where = f"stage {stage} of {self.name} with images of {size} x {width} pixels"
                least = max((side // 2 + 1) << number for number, side in enumerate(self.footprints(), start=1))
                reason = str(error).partition(";")[0]
                raise ModelError(
                    f"{where}: {reason}; use images of at least {least} x {least} pixels, or a smaller footprint"
                ) from None

    def attention(self, channels: int, footprint: int) -> SelfAttention:
        """The attention of one block. The fields of the subclass, r1 and r2 are its other arguments."""
        others = {"footprint", *(field.name for field in fields(StagedSpec))}
        arguments = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
        return self.module(channels, footprint, **arguments)

    def build(self, num_classes: int | None, in_channels: int = 3) -> SAN:
        return SAN(self, num_classes, in_channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseSpec(SANSpec):
    """SAN with pairwise attention."""

    module = PairwiseAttention
    group_size: int = 8
    hidden_reduction: int = 16
    relation: str = "subtraction"
    mapping: str = "LRL"
    transformation: str = "distinct"
    position: str = "relative"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchwiseSpec(SANSpec):
    """SAN with patchwise attention."""

    module = PatchwiseAttention
    group_size: int = 8
    relation: str = "concatenation"
    mapping: str = "LRL"
    transformation: str = "distinct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarSpec(SANSpec):
    """SAN with scalar attention: the stand-alone self-attention baseline of section 5.3."""

    module = ScalarAttention
    r1: int = 4
    heads: int = 8


class Stage(nn.Module):
    """Transition (2x2 max pool, Linear), self-attention blocks, BN, ReLU: [N, C, H, W] to [N, width, H/2, W/2]."""

    def __init__(self, width_in: int, width: int, depth: int, footprint: int, spec: SANSpec) -> None:
        super().__init__()
        self.linear = nn.Conv2d(width_in, width, 1, bias=False)
        self.blocks = Blocks(*(SelfAttentionBlock(width, spec.attention(width, footprint)) for _ in range(depth)))
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x_NCHW: Tensor, is_pooled: bool = False) -> Tensor:
        x_NCHW = x_NCHW if is_pooled else max_pool(x_NCHW)
        return norm_relu(self.norm, self.relu, self.blocks(convolve(self.linear, x_NCHW)))


class SAN(BaseModel):
    """A Linear stem at the resolution of the image, then stages, each of which halves the resolution."""

    classifier_name = "head"

    def __init__(self, spec: SANSpec, num_classes: int | None, in_channels: int) -> None:
        super().__init__(spec, in_channels)
        widths = spec.scaled_widths()
        self.channels = widths
        self.reductions = tuple(2**stage for stage in range(1, len(widths) + 1))
        self.stem = nn.Conv2d(in_channels, widths[0], 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.stem_relu = nn.ReLU()
        self.stage_names = [f"stage{number}" for number in range(1, len(widths) + 1)]
        sizes = zip((widths[0], *widths), widths, spec.kept_depths(), spec.footprints(), strict=False)
        for number, (width_in, width, depth, k) in enumerate(sizes, start=1):
            try:
                self.add_module(f"stage{number}", Stage(width_in, width, depth, k, spec))
            except ChoiceError:
                raise  # not the fault of this stage: all stages have the same relation, mapping, ...
            except ModelError as error:
                raise ModelError(f"stage {number} of {spec.name} ({width} channels): {error}") from None
        self._add_head(num_classes)

    def features(self, x_NCHW: Tensor) -> tuple[Tensor, ...]:
        check_map(x_NCHW, self.stem, "the input")
        if not is_traced(x_NCHW) and not torch.compiler.is_compiling():
            self.spec.check_input(*x_NCHW.shape[2:])
        specialize(x_NCHW)
        is_fused = fuses(x_NCHW)  # the kernels work on channels-last maps
        if is_fused:
            x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        is_pooled = self._pools_before_relu(x_NCHW)
        if is_pooled:
            x_NCHW = conv_norm_relu_pool(self.stem, self.stem_norm, self.stem_relu, x_NCHW)
        else:
            x_NCHW = conv_norm_relu(self.stem, self.stem_norm, self.stem_relu, x_NCHW)
        if is_fused and self.in_channels == 1:  # images with one channel have both formats, and the stem chooses the other
            x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = []
        for name in self.stage_names:
            x_NCHW = self.get_submodule(name)(x_NCHW, True) if is_pooled and not maps else self.get_submodule(name)(x_NCHW)
            maps.append(x_NCHW)
        return tuple(maps)

    def _pools_before_relu(self, x_NCHW: Tensor) -> bool:
        """Whether the pool of the first stage may be part of the stem."""
        first = self.get_submodule(self.stage_names[0])
        return not is_traced(x_NCHW) and is_plain(self.stem_relu, nn.ReLU) and is_plain(first, Stage)

    def parts(self) -> dict[str, list[nn.Module]]:
        stages: dict[str, list[nn.Module]] = {name: [self.get_submodule(name)] for name in self.stage_names}
        return {"stem": [self.stem, self.stem_norm, self.stem_relu], **stages, **self._head()}
