"""ResNet baselines of the paper (section 5.1 and table "footprint"): ResNet26, 38, 50, and ResNet26 with 5x5 and 7x7.

Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (doi:10.1109/CVPR.2016.90). The stride is in
the spatial convolution. Parameters have torchvision's names, so torchvision's checkpoints can be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from san.choice import ModelError
from san.models.base import BaseModel, StagedSpec
from san.nn.depth import Blocks, drop_path
from san.nn.inputs import check_map
from san.nn.norm import activate, conv_norm, conv_norm_add_relu, conv_norm_relu, is_plain
from san.ops.footprint import check_side
from san.ops.functional import fuses

EXPANSION = 4  # a bottleneck's output channels over its inner channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetSpec(StagedSpec):
    """A bottleneck ResNet in numbers. `footprint` is the side of each bottleneck's spatial convolution."""

    stem_halvings = 1  # convolution and pooling halve the map twice, but the first stage does not
    footprint: int = 3
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    stem_width: int = 64

    def __post_init__(self) -> None:
        StagedSpec.__post_init__(self)  # slots make a new class, which super() without arguments does not find
        inner, stem = min(self.scaled_widths()) // EXPANSION, int(self.stem_width * self.width_mult)
        if min(inner, stem) < 1:
            raise ModelError(
                f"{self.name}: stem and bottlenecks need at least 1 channel, not {stem} and {inner}; increase widths"
            )

    def check_input(self, size: int) -> None:
        """Zero padding allows any odd footprint; at least one pixel must be left after the last stage."""
        check_side(self.footprint)
        least = 2 ** (len(self.kept_depths()) + 1)
        if size < least:
            raise ModelError(f"{self.name} needs images of at least {least} x {least} pixels, not {size} x {size}")

    def build(self, num_classes: int | None, in_channels: int = 3) -> ResNet:
        return ResNet(self, num_classes, in_channels)


class Bottleneck(nn.Module):
    """1x1 down, k x k with the stride, 1x1 up, each with BatchNorm; + identity or a 1x1 projection.

    `drop_path_rate` is the probability with which training skips the block for an image.
    """

    drop_path_rate = 0.0

    def __init__(self, width_in: int, width: int, stride: int, footprint: int) -> None:
        super().__init__()
        check_side(footprint)
        inner = width // EXPANSION
        self.conv1 = nn.Conv2d(width_in, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(inner, inner, footprint, stride, footprint // 2, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.relu3 = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y = conv_norm_relu(self.conv1, self.bn1, self.relu1, x_NCHW)
        y = conv_norm_relu(self.conv2, self.bn2, self.relu2, y)
        identity = self._identity(x_NCHW)
        if self.drop_path_rate == 0 or not self.training:
            return conv_norm_add_relu(self.conv3, self.bn3, self.relu3, y, identity)
        y = drop_path(conv_norm(self.conv3, self.bn3, y), self.drop_path_rate, self.training)
        return activate(self.relu3, y + identity, in_place=True)

    def _identity(self, x_NCHW: Tensor) -> Tensor:
        if self.downsample is None:
            return x_NCHW
        if isinstance(self.downsample, nn.Sequential) and is_plain(self.downsample, nn.Sequential):
            layers = list(self.downsample)
            if len(layers) == 2 and isinstance(layers[0], nn.Conv2d):
                return conv_norm(layers[0], layers[1], x_NCHW)
        y_NCHW: Tensor = self.downsample(x_NCHW)
        return y_NCHW


class ResNet(BaseModel):
    """7x7 convolution with stride 2, 3x3 max pool with stride 2, then stages of bottlenecks."""

    classifier_name = "fc"

    def __init__(self, spec: ResNetSpec, num_classes: int | None, in_channels: int) -> None:
        super().__init__(spec, in_channels)
        stem = int(spec.stem_width * spec.width_mult)
        widths = spec.scaled_widths()
        self.channels = (stem, *widths)
        self.reductions = tuple(2**step for step in range(1, len(widths) + 2))
        self.conv1 = nn.Conv2d(in_channels, stem, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.stage_names = [f"layer{i}" for i in range(1, len(widths) + 1)]
        for i, (name, width_in, width, depth) in enumerate(
            zip(self.stage_names, (stem, *widths), widths, spec.kept_depths(), strict=False)
        ):
            first = Bottleneck(width_in, width, 1 if i == 0 else 2, spec.footprint)
            rest = [Bottleneck(width, width, 1, spec.footprint) for _ in range(depth - 1)]
            self.add_module(name, Blocks(first, *rest))
        self._add_head(num_classes)
        for module in self.modules():
            # On the meta device there is nothing to draw, but torch would import its compiler for it, which takes a second.
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x_NCHW: Tensor) -> tuple[Tensor, ...]:
        """The map of the first convolution and of each stage."""
        check_map(x_NCHW, self.conv1, "the input")
        if fuses(x_NCHW) and not x_NCHW.is_cuda:  # its fastest layout
            x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        maps = [conv_norm_relu(self.conv1, self.bn1, self.relu, x_NCHW)]
        x_NCHW = self.maxpool(maps[0])
        for name in self.stage_names:
            x_NCHW = self.get_submodule(name)(x_NCHW)
            maps.append(x_NCHW)
        return tuple(maps)

    def parts(self) -> dict[str, list[nn.Module]]:
        stages = {f"stage{number}": [self.get_submodule(name)] for number, name in enumerate(self.stage_names, start=1)}
        return {"stem": [self.conv1, self.bn1, self.relu, self.maxpool], **stages, **self._head()}
