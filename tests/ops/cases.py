"""The fused operators as all tests see them: sizes, random inputs, how kernels and the plain definitions are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from san.ops import definitions

KINDS = ("pairwise", "patchwise")
OPERATORS = ("pair_statistics", "pair_covariance", "pair_weights", "patch_linear")
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Of a direct call. Named so that a failing one can be read off the test id.

    `channels` of the relation or of a patch's piece, `hidden` and `weights` of the mapping. `own` says whether a patch has its
    pixel's own center, `products` how many channels of a relation are products.
    """

    batch: int = 2
    height: int = 6
    width: int = 5
    footprint: int = 3
    channels: int = 3
    hidden: int = 5
    weights: int = 2
    products: int = 0
    own: bool = True

    def __str__(self) -> str:
        rest = f"p{self.products}" if self.products else "" if self.own else "-no-center"
        channels = f"d{self.channels}e{self.hidden}g{self.weights}{rest}"
        return f"n{self.batch}-{self.height}x{self.width}-k{self.footprint}-{channels}"


SIZES = [
    Sizes(1, 7, 7, 7, 18, 16, 8),  # both mirror images overlap; the channels of SAN's second stage
    Sizes(2, 9, 6, 3, 6, 4, 2),  # of its first stage
    Sizes(1, 5, 5, 3, 34, 32, 16),
    Sizes(1, 3, 4, 3, 130, 128, 64),  # of its last stage
    Sizes(2, 6, 5, 5, 5, 3, 3, products=3, own=False),  # nothing fills its vectors
    Sizes(2, 5, 7, 1, 7, 9, 1, products=7, own=False),
    Sizes(2, 4, 3, 3, 1, 1, 1),
    Sizes(2, 4, 4, 7, 3, 1, 2),  # a map just large enough
    Sizes(1, 9, 8, 15, 2, 3, 1),
    Sizes(1, 33, 5, 5, 9, 2, 2),  # many bands of rows that are shorter than a vector
    Sizes(1, 3, 400, 3, 40, 2, 3),  # more pixels in a row than are worked on at a time
    Sizes(2, 9, 67, 7, 6, 0, 3, products=2),  # no hidden layer
]


def sample(operator: str, sizes: Sizes = Sizes(), dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    """An operator's tensors: maps, then parameters."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    s, image = sizes, (sizes.batch, sizes.height, sizes.width)
    around = random(*image, s.channels)
    if operator == "patch_linear":
        own = s.channels if s.own else 0
        columns = own + s.channels * s.footprint**2
        weight = random(max(s.hidden, 1), columns) / columns**0.5
        return random(*image, own), around, random(columns), random(columns), weight
    maps = random(*image, s.channels), around
    if operator == "pair_statistics":
        return maps
    shift = random(s.channels)
    if operator == "pair_covariance":
        return *maps, shift
    if s.hidden == 0:
        return *maps, shift, random(0, 0), random(0), random(s.weights, s.channels) / s.channels**0.5
    weight1, weight2 = random(s.hidden, s.channels) / s.channels**0.5, random(s.weights, s.hidden) / s.hidden**0.5
    return *maps, shift, weight1, random(s.hidden), weight2


def rest(operator: str, sizes: Sizes, tf32: bool = False) -> tuple[Any, ...]:
    """The arguments behind the tensors."""
    products = () if operator == "patch_linear" else (sizes.products,)
    return (sizes.footprint, *products, *(() if operator == "pair_statistics" else (tf32,)))


def defined(operator: str, tensors: Tensors, sizes: Sizes) -> Tensors:
    """What an operator is defined to be, in plain torch."""
    arguments = rest(operator, sizes)
    out = getattr(definitions, operator)(*tensors, *(arguments if operator == "pair_statistics" else arguments[:-1]))
    return out if isinstance(out, tuple) else (out,)


def computed(operator: str, tensors: Tensors, sizes: Sizes, namespace: Any = None, tf32: bool = False) -> Tensors:
    """What an operator of a namespace computes, by default the one that is differentiable."""
    out = getattr(namespace or torch.ops.san, operator)(*tensors, *rest(operator, sizes, tf32))
    return out if isinstance(out, tuple) else (out,)


def cotangents(outputs: Tensors) -> Tensors:
    """Fixed random gradients of outputs."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs)


def backward_arguments(
    operator: str, tensors: Tensors, outputs: Tensors, grads: Tensors, sizes: Sizes, tf32: bool = False
) -> tuple[Any, ...]:
    """The arguments of an operator's backward: gradients, what it kept, and the rest."""
    kept = {"pair_weights": (outputs[0], *tensors), "patch_linear": tensors}.get(operator, (*tensors, outputs[0]))
    return *grads, *kept, *rest(operator, sizes, tf32)


def differentiated(function: Callable[[Tensors], Tensors], tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Outputs of function(tensors), and the gradients of the tensors under fixed random cotangents."""
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    outputs = function(leaves)
    grads = torch.autograd.grad(outputs, leaves, cotangents(outputs), allow_unused=True, materialize_grads=True)
    return tuple(x.detach() for x in outputs), grads


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative, in norm: where a value is nearly 0, rounding decides whether ReLU passes its gradient. Some gradients are 0."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-2)).item()


def assert_near(got: Tensors, want: Tensors, most: float) -> None:
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) <= most, f"tensor {index}: {error(ours, theirs):.1e}"
