"""Checks inputs before torch does, with clearer messages, and adapts compilation and autocast to them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from san.nn.norm import is_plain
from san.ops import library
from san.ops.tracing import is_traced


def check_map(x: Tensor, layer: nn.Module, name: str) -> None:
    """Checks the input of a module whose first layer is `layer`, unless another kind of layer has replaced it.

    Raises:
        ValueError: `x` is not [N, C, H, W] with the layer's number of channels, dtype and device. Autocast may convert it.
    """
    if is_traced(x) or not isinstance(layer, nn.Conv2d):
        return
    if x.dim() != 4 or x.shape[1] != layer.in_channels:
        raise ValueError(f"{name} must have shape [N, {layer.in_channels}, H, W], not {list(x.shape)}")
    if not is_plain(layer, nn.Conv2d):  # hooks may replace its weight
        return
    weight = layer.weight
    if x.device != weight.device:
        raise ValueError(f"{name} is on {x.device}, but the model is on {weight.device}; move one to the other")
    is_cast = x.dtype in (torch.float16, torch.bfloat16, torch.float32) and _is_autocast(x.device.type)
    if x.dtype != weight.dtype and not is_cast:
        raise ValueError(f"{name} is {x.dtype}, but the model is {weight.dtype}; convert one of them")


def specialize(x_NCHW: Tensor) -> None:
    """Fixes height and width in a compiled training graph on the CPU, so other sizes are compiled again. Batch sizes may vary.

    On the CPU, torch 2.13's inductor sorts the strides of views that it saves for backward and cannot compare symbolic ones:
    "cannot determine truth value of Relational" (https://github.com/pytorch/pytorch/issues/185510). Our models save such views:
    channels-last maps of the fused operators and indices of the reflection.
    """
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting() and torch.is_grad_enabled():
        if x_NCHW.device.type == "cpu":
            from torch._dynamo.comptime import comptime  # nothing else needs the compiler, which is slow to import

            height, width = x_NCHW.shape[2:]
            comptime.force_static(height)
            comptime.force_static(width)


def full_precision(device: str) -> AbstractContextManager[object]:
    """Turns autocast off inside the block."""
    return torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext()


def _is_autocast(device: str) -> bool:
    """Whether autocast is on for a device type, written so that torch.compile can trace it before torch 2.13, too."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


@library.constant
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)
