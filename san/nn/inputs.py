"""What a module asks of its input, told in the user's words before torch tells it in its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_map(x: Tensor, layer: nn.Conv2d, name: str) -> None:
    """Refuses what the first layer of a module cannot take.

    Raises:
        ValueError: `x` is not [N, C, H, W] with the layer's number of channels, or of another dtype or device.
    """
    if x.dim() != 4 or x.shape[1] != layer.in_channels:
        raise ValueError(f"{name} must be [N, {layer.in_channels}, H, W], not {list(x.shape)}")
    weight = layer.weight
    if x.device != weight.device:
        raise ValueError(f"{name} is on {x.device}, but the model is on {weight.device}; move one of them")
    if x.dtype != weight.dtype and not _is_cast(x):
        raise ValueError(f"{name} is {x.dtype}, but the model is {weight.dtype}; convert one of them")


def _is_cast(x: Tensor) -> bool:
    """Whether autocast makes the dtypes of floating tensors agree."""
    device = x.device.type
    return x.is_floating_point() and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
