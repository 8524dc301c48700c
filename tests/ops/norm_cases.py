"""Problems for the kernels of BatchNorm and ReLU in one: shapes, random inputs, the definition in float64, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.cuda_cases import EPS

SHAPES = [
    (2, 3, 5, 8),  # [N, H, W, C]; whole vectors in all types
    (3, 7, 5, 19),  # no vectors
    (1, 30, 20, 1),
    (1, 3, 3, 2048),  # several blocks beside each other
    (4, 20, 20, 48),  # and one behind the other
    (2, 3, 3, 258),  # the last one beside is cut off
]
# Sizes of SAN's maps.
DEVICE_SHAPES = [*SHAPES, (8, 56, 56, 64), (4, 7, 7, 2048), (2, 112, 112, 63)]
HALF = [torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Problem:
    """A map [N, H, W, C], gain, bias, mean and var [C], and the gradient of the result."""

    x: Tensor
    parameters: tuple[Tensor, ...]
    grad: Tensor

    @staticmethod
    def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Problem:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x, grad, C = normal(*shape) + 0.5, normal(*shape), shape[3]
        parameters = normal(C), normal(C), normal(C), normal(C).square() + 0.5
        sums = torch.promote_types(dtype, torch.float32)
        return Problem(x.to(dtype), tuple(p.to(sums) for p in parameters), grad.to(dtype))

    def to(self, device: str) -> Problem:
        return Problem(self.x.to(device), tuple(p.to(device) for p in self.parameters), self.grad.to(device))


def run(kernels: Any, problem: Problem, training: bool) -> tuple[Tensor, ...]:
    """y, mean, var, and the gradients of x, gain and bias."""
    gain, bias, mean, var = problem.parameters
    outputs = kernels.norm_relu(problem.x, gain, bias, mean, var, training, EPS)
    return *outputs, *kernels.norm_relu_backward(problem.grad, problem.x, gain, bias, *outputs[1:], training, EPS)


def reference(problem: Problem, training: bool) -> tuple[Tensor, ...]:
    """The same by plain torch in float64."""
    x = problem.x.double().permute(0, 3, 1, 2).requires_grad_()
    gain, bias, mean, var = (p.double() for p in problem.parameters)
    gain.requires_grad_(), bias.requires_grad_()
    if training:
        var, mean = (s.detach() for s in torch.var_mean(x, (0, 2, 3), correction=0))
    y = F.batch_norm(x, mean.clone(), var.clone(), gain, bias, training, 0.0, EPS).relu()
    grads = torch.autograd.grad(y, (x, gain, bias), problem.grad.double().permute(0, 3, 1, 2))
    return y.detach().permute(0, 2, 3, 1), mean, var, grads[0].permute(0, 2, 3, 1), *grads[1:]


def error_of(dtype: torch.dtype) -> float:
    """What rounding leaves in a map's norm, or in sums that cancel."""
    return {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps / 2)
