"""Parameters and FLOPs of a model, counted on a copy of it on the meta device: nothing is computed.

Two counts that are never mixed:

- *paper*, the convention of the released code's counter: one per multiply-accumulate of Linear, convolution and aggregation;
  one per output element for a convolution's bias (the classifier's is left out, as there); two per element for an affine
  BatchNorm; one per element for ReLU; one per input element for pooling; one per element of an elementwise relation and of
  p_i - p_j. Softmax and residual additions are not counted.
- *actual*, what the machine does: two FLOPs per multiply-accumulate of matrix products, convolutions and our operators, from
  `torch.utils.flop_counter`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from san import ops
from san.ops import library


@dataclass(frozen=True, slots=True)
class Complexity:
    """`params` in numbers; `flops_paper` and `flops_actual` for one image."""

    params: int
    flops_paper: int
    flops_actual: int


def complexity(model: nn.Module, input_size: int | tuple[int, int] = 224) -> Complexity:
    """Counts a model in evaluation mode for one RGB image of `input_size` pixels (a side, or height and width).

    Raises:
        ValueError: the input is too small for the model's footprints.
        RuntimeError: the kernels cannot be built here; the reference operators cannot be told apart from the rest.
    """
    height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
    if not library.load():
        raise RuntimeError("counting needs the compiled operators: install g++ (the warning above says what is missing)")
    meta = copy.deepcopy(model).to("meta").eval()
    image = torch.empty(1, 3, height, width, device="meta")
    with ops.backend("auto"), torch.no_grad(), FlopCounterMode(display=False) as actual, _PaperCounter() as paper:
        meta(image)
    params = sum(p.numel() for p in model.parameters())
    return Complexity(params, paper.total, actual.get_total_flops())


def _numel(x: Any) -> int:
    return int(x.numel()) if isinstance(x, Tensor) else int(x[0].numel())


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    weight, bias = args[1], args[2]
    return out.numel() * weight[0].numel() + (out.numel() if bias is not None else 0)


def _linear(args: tuple[Any, ...], out: Tensor) -> int:  # addmm(bias, x, weight)
    return out.numel() * args[1].shape[1]


def _per_input(times: int) -> Callable[[tuple[Any, ...], Any], int]:
    return lambda args, out: times * _numel(args[0])


def _per_output(args: tuple[Any, ...], out: Any) -> int:
    return _numel(out)


# The paper's count for each operator that a model runs; those not listed count nothing.
PAPER_COUNTS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "aten::convolution": _convolution,
    "aten::addmm": _linear,
    "aten::native_batch_norm": _per_input(2),
    "aten::_native_batch_norm_legit_no_training": _per_input(2),
    "aten::cudnn_batch_norm": _per_input(2),
    "aten::relu": _per_output,
    "aten::relu_": _per_output,
    "aten::max_pool2d_with_indices": _per_input(1),
    "aten::mean": _per_input(1),
    "san::subtraction": _per_output,
    "san::aggregation": lambda args, out: out.numel() * args[2] ** 2,
}


class _PaperCounter(TorchDispatchMode):
    """Sums PAPER_COUNTS over every operator that is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = PAPER_COUNTS.get(func._schema.name)
        if count is not None:
            self.total += count(args, out)
        return out
