"""Problems for the patchwise kernels: sizes, random inputs, the definition in float64, and how the kernels are called."""

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
    center: int
    around: int
    hidden: int
    weights: int
    values: int

    def __str__(self) -> str:
        map_size = f"n{self.batch}-{self.height}x{self.width}-k{self.footprint}"
        return f"{map_size}-c{self.center}r{self.around}e{self.hidden}g{self.weights}m{self.values}"


CASES = [
    Case(1, 7, 7, 7, 16, 16, 8, 8, 64),  # both mirrors overlap; the channels of SAN's second stage
    Case(2, 9, 10, 3, 4, 4, 2, 2, 16),  # the channels of its first stage; tiles that the map cuts off
    Case(2, 5, 6, 5, 0, 5, 3, 3, 6),  # no center, and nothing is a multiple of anything
    Case(2, 5, 7, 1, 20, 20, 9, 1, 9),  # a footprint of one pixel, and more shares than are worked on at once
    Case(1, 11, 3, 5, 3, 3, 4, 5, 5),  # a map just wide enough, and higher than a tile
    Case(1, 6, 5, 9, 3, 3, 4, 2, 4),  # more pieces than a block takes the moments of
    Case(1, 3, 4, 3, 128, 128, 64, 64, 512),  # the channels of the last stage
    Case(1, 3, 3, 3, 0, 8, 72, 40, 40),  # more hidden channels than lie in shared memory at once
]

# Sizes that only a GPU computes in reasonable time.
DEVICE_CASES = [
    *CASES,
    Case(32, 7, 7, 7, 128, 128, 64, 64, 512),  # SAN's stages, from the last
    Case(3, 14, 14, 7, 64, 64, 32, 32, 256),
    Case(2, 28, 28, 7, 32, 32, 16, 16, 128),
    Case(2, 56, 56, 7, 16, 16, 8, 8, 64),
    Case(2, 112, 112, 3, 4, 4, 2, 2, 16),
    Case(1, 24, 24, 11, 16, 16, 8, 8, 64),  # the largest footprint of the paper
]


class Problem(cuda_cases.Problem):
    @staticmethod
    def sample(case: Case, distance: float = 0.5) -> Problem:
        """With maps whose mean is `distance`."""
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        size, positions = (case.batch, case.height, case.width), case.footprint**2
        channels, e, outputs = case.center + case.around * positions, case.hidden, case.weights * positions
        maps = normal(*size, case.center) - distance, normal(*size, case.around) + distance, normal(*size, case.values)
        norm1, norm2 = (normal(channels) + 1, normal(channels)), (normal(e) + 1, normal(e).abs())
        weight1, weight2 = normal(e, channels) / channels**0.5, normal(outputs, e) / e**0.5
        parameters = *norm1, weight1, *norm2, weight2, normal(outputs)
        mean1 = torch.full((channels,), distance, dtype=torch.float64) + normal(channels) / 4
        statistics = mean1, 1 + normal(channels).square(), normal(e) / 4 + 0.5, 1 + normal(e).square()
        return Problem(maps, parameters, statistics, normal(*size, case.values), case.footprint)


def reference(problem: Problem, training: bool, rounded: Rounding = exact) -> Results:
    """The operator's outputs, and the gradients of maps and parameters.

    gamma's products take rounded factors; gradients pass through the rounding.
    """

    def factor(x: Tensor) -> Tensor:
        return x + (rounded(x.detach()) - x).detach()

    maps = tuple(x.clone().requires_grad_() for x in problem.maps)
    parameters = tuple(x.clone().requires_grad_() for x in problem.parameters)
    gain1, bias1, weight1, gain2, bias2, weight2, bias3 = parameters
    mean1, var1, mean2, var2 = problem.statistics
    center, around, beta = (x.permute(0, 3, 1, 2) for x in maps)
    N, M, H, W = beta.shape

    def unfold(x: Tensor) -> Tensor:
        padded = F.pad(x, (problem.footprint // 2,) * 4, mode="reflect")
        return F.unfold(padded, problem.footprint)

    def normalize(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return (x.mean((0, 2)), x.var((0, 2), unbiased=False)) if training else (mean, var)

    delta = torch.cat((center.flatten(2), unfold(around)), 1)
    mean1, var1 = normalize(delta, mean1, var1)
    a1 = F.batch_norm(delta, mean1.detach(), var1.detach(), gain1, bias1, training, 0.0, EPS).relu()
    u = torch.einsum("ec,ncp->nep", factor(weight1), factor(a1))
    mean2, var2 = normalize(u, mean2, var2)
    a2 = F.batch_norm(u, mean2.detach(), var2.detach(), gain2, bias2, training, 0.0, EPS).relu()
    positions = problem.footprint**2
    weight = (torch.einsum("oe,nep->nop", factor(weight2), factor(a2)) + bias3[:, None]).view(N, -1, positions, H * W)
    values = unfold(beta).view(N, M, positions, H * W)
    y = (weight.repeat(1, M // weight.shape[1], 1, 1) * values).sum(2).view(N, M, H, W).permute(0, 2, 3, 1)
    hidden = u.view(N, -1, H, W).permute(0, 2, 3, 1)
    gradients = torch.autograd.grad(y, (*maps, *parameters), problem.grad)
    return tuple(x.detach() for x in (y, hidden, mean1, var1, mean2, var2)), gradients


def run(kernels: Any, problem: Problem, training: bool, dtype: torch.dtype, tf32: bool = False) -> Results:
    """The operator's outputs and gradients for maps of a type."""
    sums = torch.promote_types(dtype, torch.float32)
    maps, grad = [x.to(dtype) for x in problem.maps], problem.grad.to(dtype)
    parameters, statistics = ([x.to(sums) for x in some] for some in (problem.parameters, problem.statistics))
    outputs = kernels.patchwise(*maps, *parameters, *statistics, *problem.rest(training, tf32))
    _, hidden, *used = outputs
    gradients = kernels.patchwise_backward(grad, *maps, *parameters, *used, hidden, *problem.rest(training, tf32))
    return outputs, gradients
