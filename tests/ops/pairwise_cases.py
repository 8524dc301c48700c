"""Problems for the pairwise kernels: sizes, random inputs, the definition in float64, and how the kernels are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import cuda_cases
from tests.ops.cuda_cases import EPS, Results, Rounding, exact


@dataclass(frozen=True)
class Case:
    """A problem size. Named so that a failing one can be read off the test id."""

    batch: int
    height: int
    width: int
    footprint: int
    relation: int
    hidden: int
    weights: int
    values: int

    def __str__(self) -> str:
        map_size = f"n{self.batch}-{self.height}x{self.width}-k{self.footprint}"
        return f"{map_size}-d{self.relation}e{self.hidden}g{self.weights}m{self.values}"


CASES = [
    Case(1, 7, 7, 7, 18, 16, 8, 64),  # both mirrors overlap; the channels of SAN's second stage
    Case(2, 9, 6, 3, 6, 4, 2, 16),  # the channels of its first stage; tiles that the map cuts off
    Case(2, 5, 6, 5, 5, 3, 3, 6),  # nothing is a multiple of anything
    Case(1, 5, 5, 3, 34, 32, 16, 128),
    Case(2, 5, 7, 1, 7, 9, 1, 5),
    Case(1, 3, 4, 3, 130, 128, 64, 512),  # the channels of the last stage, whose weights overflow shared memory in float64
]

# Sizes that only a GPU computes in reasonable time.
DEVICE_CASES = [
    *CASES,
    Case(3, 14, 14, 7, 66, 64, 32, 256),
    Case(2, 28, 28, 7, 34, 32, 16, 128),
    Case(2, 56, 56, 7, 18, 16, 8, 64),
]


class Problem(cuda_cases.Problem):
    @staticmethod
    def sample(case: Case) -> Problem:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        size, d, e, g = (case.batch, case.height, case.width), case.relation, case.hidden, case.weights
        maps = normal(*size, d), normal(*size, d) + 0.5, normal(*size, case.values)
        norm1, norm2 = (normal(d) + 1, normal(d)), (normal(e) + 1, normal(e))
        parameters = *norm1, normal(e, d) / d**0.5, *norm2, 2 * normal(g, e) / e**0.5, normal(g)
        statistics = normal(d) / 4 - 0.5, 2 + normal(d).square(), normal(e) / 4 + 0.5, 1 + normal(e).square()
        return Problem(maps, parameters, statistics, normal(*size, case.values), case.footprint)


def reference(problem: Problem, training: bool, rounded: Rounding = exact) -> Results:
    """The operator's outputs, and the gradients of maps and parameters without the last bias.

    gamma's products take rounded factors; gradients pass through the rounding.
    """

    def factor(x: Tensor) -> Tensor:
        return x + (rounded(x.detach()) - x).detach()

    maps = tuple(x.clone().requires_grad_() for x in problem.maps)
    parameters = tuple(x.clone().requires_grad_() for x in problem.parameters)
    gain1, bias1, weight1, gain2, bias2, weight2, _ = parameters
    mean1, var1, mean2, var2 = problem.statistics
    center, around, beta = (x.permute(0, 3, 1, 2) for x in maps)
    N, M, H, W = beta.shape

    def unfold(x: Tensor) -> Tensor:
        padded = F.pad(x, (problem.footprint // 2,) * 4, mode="reflect")
        return F.unfold(padded, problem.footprint).view(N, x.shape[1], -1, H * W)

    def normalize(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)) if training else (mean, var)

    delta = center.flatten(2).unsqueeze(2) - unfold(around)
    mean1, var1 = normalize(delta, mean1, var1)
    relation = F.batch_norm(delta, mean1.detach(), var1.detach(), gain1, bias1, training, 0.0, EPS).relu()
    u = torch.einsum("ed,ndkp->nekp", factor(weight1), factor(relation))
    mean2, var2 = normalize(u, mean2, var2)
    hidden = F.batch_norm(u, mean2.detach(), var2.detach(), gain2, bias2, training, 0.0, EPS).relu()
    logits = torch.einsum("ge,nekp->ngkp", factor(weight2), factor(hidden))
    share = M // weight2.shape[0]
    weight = logits.softmax(2).repeat(1, share, 1, 1)
    y = (weight * unfold(beta)).sum(2).view(N, M, H, W).permute(0, 2, 3, 1)
    logsumexp = logits.logsumexp(2).view(N, -1, H, W).permute(0, 2, 3, 1)
    gradients = torch.autograd.grad(y, (*maps, *parameters[:-1]), problem.grad)
    return tuple(x.detach() for x in (y, logsumexp, mean1, var1, mean2, var2)), gradients


def run(kernels: Any, problem: Problem, training: bool, dtype: torch.dtype, tf32: bool = False) -> Results:
    """The operator's outputs and gradients for maps of a type."""
    sums = torch.promote_types(dtype, torch.float32)
    maps, grad = [x.to(dtype) for x in problem.maps], problem.grad.to(dtype)
    parameters, statistics = ([x.to(sums) for x in some] for some in (problem.parameters, problem.statistics))
    outputs = kernels.pairwise(*maps, *parameters, *statistics, *problem.rest(training, tf32))
    _, logsumexp, *used = outputs
    gradients = kernels.pairwise_backward(grad, *maps, *parameters[:-1], *used, logsumexp, *problem.rest(training, tf32))
    return outputs, gradients
