"""What tests of the CUDA kernels share: problems, rounding, and how results are compared. Needs only torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

EPS = 1e-5
Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # outputs, gradients

Rounding = Callable[[Tensor], Tensor]  # what a kernel does to the factors of its products


def exact(x: Tensor) -> Tensor:
    return x


def rounded_to(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).double()


def truncated_to_tf32(x: Tensor) -> Tensor:
    """Tensor cores ignore the lowest 13 bits of a float32 factor."""
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


@dataclass(frozen=True)
class Problem:
    """Inputs in float64: maps [N, H, W, channels], parameters and statistics in the order of the operator's arguments."""

    maps: tuple[Tensor, Tensor, Tensor]  # center, around, beta
    parameters: tuple[Tensor, ...]
    statistics: tuple[Tensor, ...]
    grad: Tensor
    footprint: int

    def rounded_to(self, dtype: torch.dtype) -> Self:
        """With maps that a type can hold, so that only what a kernel does in it is to be seen."""
        center, around, beta = (x.to(dtype).double() for x in self.maps)
        return replace(self, maps=(center, around, beta), grad=self.grad.to(dtype).double())

    def to(self, device: str) -> Self:
        center, around, beta = (x.to(device) for x in self.maps)
        parameters, statistics = (tuple(x.to(device) for x in some) for some in (self.parameters, self.statistics))
        grad = self.grad.to(device)
        return replace(self, maps=(center, around, beta), parameters=parameters, statistics=statistics, grad=grad)

    def rest(self, training: bool, tf32: bool = False) -> tuple[Any, ...]:
        return self.footprint, training, EPS, tf32


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-6)).item()


def assert_near(got: tuple[Tensor, ...], want: tuple[Tensor, ...], most: float) -> None:
    """Compares by norm: where a value of gamma is nearly 0, rounding decides whether ReLU passes its gradient."""
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) <= most, f"tensor {index}: {error(ours, theirs):.1e}"


def outcome(operator: Callable[..., Any], *arguments: Any) -> str | None:
    """How an operator refuses arguments; None if it takes them."""
    try:
        operator(*arguments)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def assert_same_bits(got: Results, want: Results) -> None:
    for one, other in zip(sum(got, ()), sum(want, ()), strict=True):
        assert torch.equal(one, other)


def assert_graph_gives_the_same_bits(compute: Callable[[], Results]) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = compute()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = compute()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(got, wanted)
