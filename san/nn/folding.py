"""Frozen copies of networks for inference. They compute folded weights only once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
_KEPT, _NUMBER = "_san_kept", "_san_number"
MOST_KEPT = 16
"""Values of a layer. Others, for more sizes of images, are computed at each call. None is dropped: a CUDA graph may read
it."""


def fold(model: M) -> M:
    """A frozen copy for inference: norms are folded into the convolutions before them once, not at each call.

    Useful for single small images: one of 32x32 takes half the time in ResNet26, two thirds in SAN10 with pairwise attention.
    Results are those of the model in evaluation, up to rounding. The copy can be moved to another device or type, and gradients
    flow to its images, but its weights must not change: they need no gradients, and `train` and `load_state_dict` raise
    RuntimeError. Fold the model again after you have changed it.
    """
    folded = copy.deepcopy(model).eval().requires_grad_(False)
    for number, layer in enumerate(folded.modules()):
        layer.__dict__[_KEPT], layer.__dict__[_NUMBER] = {}, number
        layer.train = functools.partial(_only_evaluates, layer)  # type: ignore[method-assign]
        layer.register_load_state_dict_pre_hook(_refuse)
    return folded


def kept(layer: nn.Module, like: Tensor, options: Hashable, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """compute(), which depends only on the weights of the layer and on the options. A folded copy keeps the value for each type
    and device of `like`, up to a number."""
    values: dict[Hashable, tuple[Tensor, ...]] | None = layer.__dict__.get(_KEPT)
    if values is None or torch.compiler.is_compiling():
        return compute()
    key = like.device, like.dtype, options
    if key not in values:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():  # the graph owns the memory of what it computes
            return compute()
        with torch.inference_mode(False), torch.no_grad():
            value = compute()
        if len(values) >= MOST_KEPT or not all(type(x) is Tensor for x in value):  # fake ones
            return value
        values[key] = value
    return values[key]


def number(layer: nn.Module) -> int | None:
    """The number of a layer in a folded copy; it is the same in copies of that."""
    return layer.__dict__.get(_NUMBER)


def _only_evaluates(model: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        _refuse()
    return nn.Module.train(model, False)


def _refuse(*_: Any) -> None:
    raise RuntimeError("this copy from san.fold is frozen; change the model that was folded, and fold it again")
