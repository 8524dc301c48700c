"""The operators of unfused attention: names, random inputs, kernels and references. Add a row for a new operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from san.ops import reference
from tests.ops.cases import cotangents


@dataclass(frozen=True)
class Case:
    """The sizes of a call, which the test id lists.

    With `channels_last`, maps are channels-last and weights are stored as [N, P, K, G], as in SAN's networks.
    """

    batch: int
    channels: int
    height: int
    width: int
    footprint: int
    groups: int | None = None
    """Weight channels, by default a quarter of `channels`."""
    channels_last: bool = False

    def __str__(self) -> str:
        layout = f"-g{self.weight_channels}-channels-last" if self.channels_last else ""
        return f"n{self.batch}c{self.channels}-{self.height}x{self.width}-k{self.footprint}{layout}"

    @property
    def weight_channels(self) -> int:
        return self.groups or self.channels // 4

    def map(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        shape = (self.batch, self.channels, self.height, self.width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def weight(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        shape = (self.batch, self.weight_channels, self.footprint**2, self.height * self.width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return stored_by_pixels(x) if self.channels_last else x


def stored_by_pixels(weight: Tensor) -> Tensor:
    """Stores weights [N, G, K, P] in the memory order [N, P, K, G]."""
    return weight.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "sliced channels_last": lambda x: torch.cat((x, x), 1).to(memory_format=torch.channels_last)[:, : x.shape[1]],
    "offset": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
}
"""Maps [N, C, H, W] in other memory orders."""
CHANNELS_LAST = [
    # The kernels load 4 channels at once; 8 channels share a weight, as in SAN.
    Case(2, 32, 5, 4, 3, groups=4, channels_last=True),
    Case(1, 64, 7, 7, 7, groups=8, channels_last=True),
    Case(1, 12, 3, 4, 3, groups=4, channels_last=True),  # 3 channels share a weight
]
CASES = [
    Case(2, 8, 7, 7, 7),  # both mirror images overlap
    Case(1, 8, 6, 6, 11),  # the smallest map for this footprint
    Case(3, 4, 9, 5, 3),
    Case(2, 12, 4, 13, 5),
    Case(1, 4, 2, 2, 3),
    Case(2, 4, 3, 1, 1),
    *CHANNELS_LAST,
]


@dataclass(frozen=True)
class Operator:
    name: str
    reference: Callable[..., Tensor]
    inputs: Callable[[Case, torch.Generator, torch.dtype], tuple[Tensor, ...]]
    saves_inputs: bool
    """Whether the backward operator takes the inputs or only the size of their maps."""
    groups: Callable[[Case], int] | None = None
    label: str = ""

    def sample(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
        return self.inputs(case, torch.Generator().manual_seed(seed), dtype)

    def rest(self, case: Case) -> tuple[int, ...]:
        """Returns the arguments that follow the tensors."""
        return (case.footprint,) if self.groups is None else (case.footprint, self.groups(case))

    def kernel(self, namespace: Any = None) -> Callable[..., Tensor]:
        return getattr(namespace or torch.ops.san, self.name)

    def backward(self, grad: Tensor, inputs: tuple[Tensor, ...], case: Case, namespace: Any = None) -> tuple[Any, Any]:
        """Returns the backward operator and its arguments."""
        rest = inputs if self.saves_inputs else (case.height, case.width)
        return getattr(namespace or torch.ops.san, f"{self.name}_backward"), (grad, *rest, case.footprint)

    def computed(
        self, inputs: tuple[Tensor, ...], case: Case, namespace: Any = None, grad: Tensor | None = None
    ) -> list[Tensor]:
        """Returns output and input gradients of the forward and the backward kernel, without autograd."""
        out = self.kernel(namespace)(*inputs, *self.rest(case))
        backward, arguments = self.backward(cotangent(out) if grad is None else grad, inputs, case, namespace)
        grads = backward(*arguments)
        return [out, *(grads if isinstance(grads, tuple) else (grads,))]

    def defined(self, inputs: tuple[Tensor, ...], case: Case) -> list[Tensor]:
        """Returns output and input gradients of the reference."""
        return gradients(self.reference, inputs, *self.rest(case))

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


def cotangent(out: Tensor) -> Tensor:
    """Returns a fixed random gradient of an output."""
    return cotangents((out,))[0]


def gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], *rest: int) -> list[Tensor]:
    """Returns the output and, for a fixed random cotangent, the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]  # not cloned: that could change the layout in memory
    out = function(*leaves, *rest)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent(out))]
