"""Parameters and FLOPs of a model and of its stages, counted on a copy on the meta device without computing anything.

There are two counts:

- *paper*, the convention of the released code's counter: one per multiply-accumulate of Linear, convolution and aggregation;
  one per output element for a convolution's bias (the classifier's is left out, as there); two per element for an affine
  BatchNorm; one per element for ReLU; one per input element for pooling; one per element of an elementwise relation and of
  p_i - p_j. Softmax, residual additions and the inner products of dot, star and clique are not counted; the inner products of
  the scalar baseline are.
- *actual*, the work of the machine: two FLOPs per multiply-accumulate of matrix products, convolutions and our operators, inner
  products included, and five per element of a softmax, from `torch.utils.flop_counter`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from san import ops
from san.models.base import BaseModel
from san.nn import ScalarAttention


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters and FLOPs of one part of a model, for one image."""

    name: str
    params: int
    flops_paper: int
    flops_actual: int


@dataclass(frozen=True, slots=True)
class Complexity:
    """Parameters, and FLOPs for one image. The numbers of `stages` add up to those of the model."""

    params: int
    flops_paper: int
    flops_actual: int
    stages: tuple[Part, ...]
    """Stem, stages and head of our models; any other module is one part."""


def complexity(model: nn.Module, input_size: int | tuple[int, int] = 224) -> Complexity:
    """Counts a model in evaluation mode for one image of `input_size` pixels (a side, or height and width).

    The image has the channels of the model's first convolution, and the dtype of its parameters.

    Raises:
        ValueError: the input is too small for the model's footprints.
    """
    height, width = _height_and_width(input_size)
    meta = copy.deepcopy(model).to("meta").eval().requires_grad_(False)  # the counter looks for gradients of submodules
    image = _image(meta, height, width)
    with (
        ops.backend("unfused"),  # fused operators would hide the layers that they replace
        torch.no_grad(),
        FlopCounterMode(display=False, custom_mapping=SOFTMAX) as actual,
        _PaperCounter() as paper,
    ):
        paper.watch(meta)
        parts = _Parts(meta, lambda: (paper.total, actual.get_total_flops()))
        meta(image)
    stages = parts.counted()
    params = sum(p.numel() for p in meta.parameters())
    return Complexity(params, paper.total, actual.get_total_flops(), stages)


def _image(model: nn.Module, height: int, width: int) -> Tensor:
    """An image with the model's number of channels and dtype."""
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    return torch.empty(1, channels, height, width, device="meta", dtype=dtype)


def _height_and_width(input_size: object) -> tuple[int, int]:
    sides = (input_size, input_size) if isinstance(input_size, int) else input_size
    if isinstance(sides, tuple | list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        return sides[0], sides[1]
    raise ValueError(f"input_size must be an integer or (height, width) in pixels, not {input_size!r}")


def _softmax_flops(shape: Any, *args: Any, **options: Any) -> int:
    """Maximum, difference, exponential, sum and quotient for every element."""
    return 5 * math.prod(shape)


SOFTMAX = {torch.ops.aten._softmax: _softmax_flops}


class _Parts:
    """Reads the counters whenever a part of the model starts. Layers that run between two parts count for the earlier one."""

    def __init__(self, model: nn.Module, read: Callable[[], tuple[int, int]]) -> None:
        self.modules = model.parts() if isinstance(model, BaseModel) else {"model": [model]}
        self.read = read
        self.started: list[tuple[str, int, int]] = []
        for name, modules in self.modules.items():
            for module in modules:
                module.register_forward_pre_hook(lambda module, args, name=name: self.started.append((name, *read())))

    def counted(self) -> tuple[Part, ...]:
        flops = {name: [0, 0] for name in self.modules}
        ends = [*self.started[1:], ("", *self.read())]
        for (name, *start), (_, *end) in zip(self.started, ends, strict=True):
            for count, (before, after) in enumerate(zip(start, end, strict=True)):
                flops[name][count] += after - before
        params = {name: sum(p.numel() for m in modules for p in m.parameters()) for name, modules in self.modules.items()}
        return tuple(Part(name, params[name], *counts) for name, counts in flops.items())


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    weight, bias, is_transposed = args[1], args[2], args[6]
    products = (args[0] if is_transposed else out).numel() * weight[0].numel()
    return int(products) + (out.numel() if bias is not None else 0)


def _linear(args: tuple[Any, ...], out: Tensor) -> int:  # addmm(bias, x, weight)
    return out.numel() * args[1].shape[1]


def _dot(args: tuple[Any, ...], out: Tensor) -> int:  # dot(phi, psi, kernel_size, groups)
    """The Hadamard relation, a group per channel, is elementwise; inner products are not counted."""
    return out.numel() if args[3] == args[0].shape[1] else 0


def _per_input(times: int) -> Callable[[tuple[Any, ...], Any], int]:
    return lambda args, out: times * args[0].numel()


def _per_output(args: tuple[Any, ...], out: Tensor) -> int:
    return out.numel()


Counts = dict[str, Callable[[tuple[Any, ...], Any], int]]

# The paper's count of each operator; operators that are not listed count as 0.
PAPER_COUNTS: Counts = {
    "aten::convolution": _convolution,
    "aten::addmm": _linear,
    "aten::mm": lambda args, out: out.numel() * args[0].shape[1],
    "aten::native_batch_norm": _per_input(2),
    "aten::_native_batch_norm_legit_no_training": _per_input(2),
    "aten::relu": _per_output,
    "aten::relu_": _per_output,
    "aten::max_pool2d_with_indices": _per_input(1),
    "aten::mean": _per_input(1),
    "aten::avg_pool2d": _per_input(1),
    "aten::_adaptive_avg_pool2d": _per_input(1),
    "san::subtraction": _per_output,
    "san::dot": _dot,
    "san::aggregation": lambda args, out: out.numel() * args[2] ** 2,
}
# Counted inside scalar attention: phi_i^T psi_j, and as much for phi_i^T r_{j-i}.
SCALAR_COUNTS: Counts = {"san::dot": lambda args, out: 2 * args[0].numel() * args[2] ** 2}


class _PaperCounter(TorchDispatchMode):
    """Sums the paper's counts of all operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.counts = PAPER_COUNTS

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = self.counts.get(func._schema.name)
        if count is not None:
            self.total += count(args, out)
        return out

    def watch(self, model: nn.Module) -> None:
        """Uses `SCALAR_COUNTS` inside scalar attention."""

        def enter(module: nn.Module, args: Any) -> None:
            self.counts = PAPER_COUNTS | SCALAR_COUNTS

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self.counts = PAPER_COUNTS

        for module in model.modules():
            if isinstance(module, ScalarAttention):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)
