"""What a module asks of its input, told in the user's words before torch tells it in its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from san.ops import library


def check_map(x: Tensor, layer: nn.Conv2d, name: str) -> None:
    """Refuses what the first layer of a module cannot take.

    Raises:
        ValueError: `x` is not [N, C, H, W] with the layer's number of channels, or of another dtype or device.
    """
    if x.dim() != 4 or x.shape[1] != layer.in_channels:
        raise ValueError(f"{name} must have shape [N, {layer.in_channels}, H, W], not {list(x.shape)}")
    weight = layer.weight
    if x.device != weight.device:
        raise ValueError(f"{name} is on {x.device}, but the model is on {weight.device}; move one to the other")
    if x.dtype != weight.dtype and not _is_cast(x):
        raise ValueError(f"{name} is {x.dtype}, but the model is {weight.dtype}; convert one of them")


def specialize(x_NCHW: Tensor) -> None:
    """Makes a compiled training graph be one of this height and width: another size is compiled anew. Batches may vary.

    On the CPU, torch 2.13's inductor puts the strides of views that it keeps for backward in order, and cannot compare symbolic
    ones: "cannot determine truth value of Relational" (https://github.com/pytorch/pytorch/issues/185510). It keeps views here:
    channels-last maps of the fused operators, indices of the reflection. GPUs, inference and export keep symbolic sizes.
    """
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting() and torch.is_grad_enabled():
        if x_NCHW.device.type == "cpu":
            from torch._dynamo.comptime import comptime  # nothing else needs the compiler, which is slow to import

            height, width = x_NCHW.shape[2:]
            comptime.force_static(height)
            comptime.force_static(width)


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a device type. Dynamo traces it, which it cannot do with all of it before torch 2.13."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


@library.constant
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast makes the dtypes of floating tensors agree."""
    return x.is_floating_point() and is_autocast(x.device.type)
