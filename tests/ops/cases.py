"""Sizes, random inputs and calls of the fused operators and of their definitions in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from san.ops import fused_reference

KINDS = ("pairwise", "patchwise")
OPERATORS = ("pair_statistics", "attend_pairs", "patch_statistics", "patch_linear", "attend_patches", "attend_dot")
ON_CPU = (*OPERATORS, "pair_covariance")
ON_GPU = (*OPERATORS, "attend_pairs_of_batch")
ATTENDING = ("attend_pairs", "attend_pairs_of_batch", "attend_dot")
STATISTICS = ("pair_statistics", "patch_statistics")
PRODUCTS = ("attend_pairs", "attend_pairs_of_batch", "patch_linear", "attend_patches")
"""On a GPU, they may use TF32."""
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a direct call.

    Args:
        channels: number of channels of the relation, or of one map of a patch.
        hidden: number of hidden channels of the mapping; 0 for a mapping without a hidden layer.
        weights: number of weight channels.
        shares: number of value channels that share a weight channel.
        products: number of channels of the relation that are products; the others are differences.
        own: whether a patch contains the center of its pixel.
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
    shares: int = 2

    def __str__(self) -> str:
        rest = f"p{self.products}" if self.products else "" if self.own else "-no-center"
        channels = f"d{self.channels}e{self.hidden}g{self.weights}{rest}"
        return f"n{self.batch}-{self.height}x{self.width}-k{self.footprint}-{channels}"


STAGE_5 = Sizes(1, 7, 7, 7, 130, 128, 64)
"""The map, footprint and channels of SAN10's last stage."""
SIZES = [
    Sizes(1, 7, 7, 7, 18, 16, 8, shares=8),  # both mirror images overlap; channels of SAN's stage 2
    Sizes(2, 9, 6, 3, 6, 4, 2),  # channels of stage 1
    Sizes(1, 5, 5, 3, 34, 32, 16),  # of stage 3
    Sizes(1, 3, 4, 3, 130, 128, 64),  # of stage 5
    Sizes(2, 6, 5, 5, 5, 3, 3, products=3, own=False),  # sizes that are no multiple of a vector
    Sizes(2, 5, 7, 1, 7, 9, 1, products=7, own=False, shares=9),
    Sizes(2, 4, 3, 3, 1, 1, 1),
    Sizes(2, 4, 4, 7, 3, 1, 2),  # the smallest map for this footprint
    Sizes(1, 9, 8, 15, 2, 3, 1),
    Sizes(1, 8, 8, 15, 3, 2, 300, shares=1),  # far more weight channels than others: forward needs more scratch memory
    Sizes(1, 33, 5, 5, 9, 2, 2),  # many bands of rows that are shorter than a vector
    Sizes(1, 3, 400, 3, 40, 2, 3),  # rows longer than a block of pixels
    Sizes(2, 9, 67, 7, 6, 0, 3, products=2, shares=17),  # no hidden layer
    # More channels than one chunk of the CUDA kernels: products in some or all of them, no hidden layer.
    Sizes(1, 4, 3, 3, 45, 9, 5, products=20),
    Sizes(1, 3, 4, 3, 66, 64, 32, products=66),
    Sizes(1, 4, 3, 3, 66, 0, 32),
    Sizes(1, 3, 4, 3, 50, 0, 5, products=50),
    Sizes(1, 4, 5, 3, 66, 64, 32),  # channels of stage 4
    Sizes(1, 4, 5, 3, 10, 32, 4),  # fewer weight channels than in the stages of SAN with as many hidden ones
    Sizes(1, 4, 5, 3, 34, 64, 8),
    STAGE_5,
]


def sample(operator: str, sizes: Sizes = Sizes(), dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    """Returns random tensors for an operator: maps, then parameters."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    s, image = sizes, (sizes.batch, sizes.height, sizes.width)
    beta = random(*image, s.weights * s.shares)
    generator.manual_seed(seed)  # so that the other tensors do not depend on `shares`
    if operator == "attend_dot":
        keys = s.weights * min(s.channels, 64)
        scores = random(s.batch, s.weights, 2 * s.footprint, s.height * s.width)
        return random(*image, keys) / s.channels**0.5, random(*image, keys), scores, beta
    if operator == "attend_pairs_of_batch":
        folded = sample("attend_pairs", sizes, dtype, seed)
        return *folded[:4], random(s.hidden), *folded[4:]
    if operator == "attend_patches":
        hidden, rows = min(max(s.hidden, 1), 64), s.weights * s.footprint**2  # GPUs take at most 64
        layer = random(rows, hidden) / hidden**0.5, random(rows)
        return random(*image, hidden), *layer, random(*image, s.weights * min(s.shares, 8))  # 8
    around = random(*image, s.channels)
    if operator.startswith("patch"):
        own = s.channels if s.own else 0
        columns = own + s.channels * s.footprint**2
        maps = random(*image, own), around
        if operator == "patch_statistics":
            return maps
        return *maps, random(3, columns), random(max(s.hidden, 1), columns) / columns**0.5
    maps = random(*image, s.channels), around
    if operator == "pair_statistics":
        return maps
    norm = random(3, s.channels)
    if operator == "pair_covariance":
        return *maps, norm
    depth = s.hidden or s.channels
    weight1, weight2 = random(s.hidden, s.channels if s.hidden else 0), random(s.weights, depth)
    layers = weight1 / s.channels**0.5, random(s.hidden), weight2 / depth**0.5
    return *maps, norm, *layers, beta


def rest(operator: str, sizes: Sizes, tf32: bool = False) -> tuple[Any, ...]:
    """Returns the arguments that follow the tensors."""
    is_of_batch = operator == "attend_pairs_of_batch"
    products = (sizes.products,) if "pair" in operator and not is_of_batch else ()
    eps = (1e-5,) if is_of_batch else ()
    return (sizes.footprint, *products, *((tf32,) if operator in PRODUCTS else ()), *eps)


def defined(operator: str, tensors: Tensors, sizes: Sizes) -> Tensors:
    """Returns the outputs of the definition in plain PyTorch."""
    out = getattr(fused_reference, operator)(*tensors, *rest(operator, sizes))
    return out if isinstance(out, tuple) else (out,)


def computed(operator: str, tensors: Tensors, sizes: Sizes, namespace: Any = None, tf32: bool = False) -> Tensors:
    """Returns the outputs of an operator that its definition has, too, by default of the differentiable operator."""
    return _defined_outputs(operator, with_saved(operator, tensors, sizes, namespace, tf32))


def _defined_outputs(operator: str, outputs: Tensors) -> Tensors:
    return outputs[:1] if operator in ATTENDING else outputs


def with_saved(operator: str, tensors: Tensors, sizes: Sizes, namespace: Any = None, tf32: bool = False) -> Tensors:
    """Returns all outputs, also those that only the backward operator reads."""
    out = getattr(namespace or torch.ops.san, operator)(*tensors, *rest(operator, sizes, tf32))
    return out if isinstance(out, tuple) else (out,)


def cotangents(outputs: Tensors) -> Tensors:
    """Returns fixed random gradients of the outputs."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs)


def backward_arguments(
    operator: str, tensors: Tensors, outputs: Tensors, grads: Tensors, sizes: Sizes, tf32: bool = False
) -> tuple[Any, ...]:
    """Returns the arguments of the backward operator: gradients, saved tensors, and the rest. `outputs` are all of them."""
    own = dict.fromkeys(("attend_pairs", "attend_dot"), (*outputs, *tensors))
    own["attend_pairs_of_batch"] = outputs[0], *outputs[3:], *tensors
    saved = own.get(operator) or (tensors if operator in ("patch_linear", "attend_patches") else (*tensors, outputs[0]))
    return *grads, *saved, *rest(operator, sizes, tf32)


def run_kernels(
    operator: str, tensors: Tensors, sizes: Sizes, namespace: Any, tf32: bool = False, grads: Tensors | None = None
) -> Tensors:
    """Returns outputs and gradients of the forward and backward operators, without autograd; by default for `cotangents`."""
    saved = with_saved(operator, tensors, sizes, namespace, tf32)
    outputs = _defined_outputs(operator, saved)
    grads = cotangents(outputs) if grads is None else grads
    arguments = backward_arguments(operator, tensors, saved, grads, sizes, tf32)
    return *outputs, *getattr(namespace, f"{operator}_backward")(*arguments)


def with_half_weights(operator: str, exact: Tensors, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Returns the tensors with weights and values of a half type, all others in float32, and the same numbers in float64."""
    halves = {"attend_pairs": {3, 5, 6}, "attend_pairs_of_batch": {7}, "patch_linear": {3}}
    weights = halves.get(operator, set())
    rounded = tuple(x.to(dtype).double() if i in weights else x for i, x in enumerate(exact))
    return tuple(x.to(dtype if i in weights else torch.float32) for i, x in enumerate(exact)), rounded


def differentiated(function: Callable[[Tensors], Tensors], tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Returns the outputs of function(tensors) and, for fixed random cotangents, the gradients of the tensors."""
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    outputs = function(leaves)
    grads = torch.autograd.grad(outputs, leaves, cotangents(outputs), allow_unused=True, materialize_grads=True)
    return tuple(x.detach() for x in outputs), grads


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error in the Euclidean norm, in which single values count little.

    Near 0, rounding decides whether ReLU passes a value's gradient. Some gradients are 0, so the divisor is at least 0.01.
    """
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-2)).item()


def assert_near(got: Sequence[Tensor], want: Sequence[Tensor], most: float, case: object = "") -> None:
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == theirs.shape, f"{case}, tensor {index}"
        assert error(ours, theirs) <= most, f"{case}, tensor {index}: {error(ours, theirs):.1e}"
