"""The operators as the tests see them: name, inputs for a case, kernel and reference. A new operator is a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from san.ops import reference


@dataclass(frozen=True)
class Case:
    """A problem size. Named so that a failing one can be read off the test id."""

    batch: int
    channels: int
    height: int
    width: int
    footprint: int

    def __str__(self) -> str:
        return f"n{self.batch}c{self.channels}-{self.height}x{self.width}-k{self.footprint}"

    def map(self, generator: torch.Generator, dtype: torch.dtype, channels: int | None = None) -> Tensor:
        shape = (self.batch, channels or self.channels, self.height, self.width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def weight(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        shape = (self.batch, self.channels // 4, self.footprint**2, self.height * self.width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


CASES = [
    Case(2, 8, 7, 7, 7),  # both mirror images overlap
    Case(1, 8, 6, 6, 11),  # a map just large enough
    Case(3, 4, 9, 5, 3),
    Case(2, 12, 4, 13, 5),
    Case(1, 4, 2, 2, 3),
    Case(2, 4, 3, 1, 1),
]


@dataclass(frozen=True)
class Operator:
    name: str
    reference: Callable[..., Tensor]
    inputs: Callable[[Case, torch.Generator, torch.dtype], tuple[Tensor, ...]]
    saves_inputs: bool
    """Whether the backward operator takes the inputs again, or only the size of their maps."""
    groups: Callable[[Case], int] | None = None
    label: str = ""

    def sample(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
        return self.inputs(case, torch.Generator().manual_seed(seed), dtype)

    def rest(self, case: Case) -> tuple[int, ...]:
        """The arguments behind the tensors."""
        return (case.footprint,) if self.groups is None else (case.footprint, self.groups(case))

    def kernel(self, namespace: Any = None) -> Callable[..., Tensor]:
        return getattr(namespace or torch.ops.san, self.name)

    def backward(self, grad: Tensor, inputs: tuple[Tensor, ...], case: Case, namespace: Any = None) -> tuple[Any, Any]:
        """The backward operator and its arguments."""
        rest = inputs if self.saves_inputs else (case.height, case.width)
        return getattr(namespace or torch.ops.san, f"{self.name}_backward"), (grad, *rest, case.footprint)

    def __str__(self) -> str:
        return self.label or self.name


def _one(case: Case, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (case.map(g, dtype),)


def _two(case: Case, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return case.map(g, dtype), case.map(g, dtype)


def _weighted(case: Case, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return case.map(g, dtype), case.weight(g, dtype)


OPERATORS = [
    Operator("unfold", reference.unfold, _one, False),
    Operator("subtraction", reference.subtraction, _two, False),
    Operator("dot", reference.dot, _two, True, lambda case: 1),
    Operator("dot", reference.dot, _two, True, lambda case: case.channels // 2, "dot in groups"),
    Operator("dot", reference.dot, _two, True, lambda case: case.channels, "hadamard"),
    Operator("aggregation", reference.aggregation, _weighted, True),
]


def gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], *rest: int) -> list[Tensor]:
    """Output and input gradients under a fixed random cotangent."""
    leaves = [x.detach().requires_grad_() for x in inputs]  # not cloned: that could change the layout in memory
    out = function(*leaves, *rest)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
