"""The CUDA sources of pair_covariance and pair_weights, run on the CPU through the shim, against plain torch in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import oracle
from tests.ops.cuda_cases import assert_near, error

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A problem size. Named so that a failing one can be read off the test id."""

    batch: int
    height: int
    width: int
    footprint: int
    d: int
    products: int = 0
    hidden: int = 0
    weights: int = 1

    def __str__(self) -> str:
        return (
            f"n{self.batch}-{self.height}x{self.width}-k{self.footprint}-d{self.d}p{self.products}e{self.hidden}g{self.weights}"
        )


CASES = [
    Case(1, 7, 7, 7, 18, 0, 16, 8),  # both mirrors overlap; the channels of SAN's second stage
    Case(2, 9, 6, 3, 6, 4, 4, 2),  # the channels of its first stage; the first ones are products
    Case(2, 5, 6, 5, 5, 5, 3, 3),  # nothing is a multiple of anything
    Case(1, 5, 5, 3, 34, 0, 32, 16),
    Case(2, 5, 7, 1, 7, 3, 9, 1),
    Case(2, 4, 3, 3, 18, 18, 0, 20),  # no hidden layer
    Case(1, 6, 5, 5, 70, 40, 0, 5),
    Case(1, 3, 4, 3, 75, 20, 70, 34),  # several chunks of all channels
    Case(3, 3, 3, 3, 66, 66, 17, 9),
]
LAST_STAGE = Case(1, 2, 3, 3, 130, 0, 128, 64)
NAMES = ("center", "around", "shift1", "weight1", "shift2", "weight2")


@dataclass(frozen=True)
class Problem:
    """Inputs in float64, and gradients of the results."""

    case: Case
    inputs: Tensors  # in the order of NAMES
    grads: Tensors  # of mean and covariance
    grad_w: Tensor

    @staticmethod
    def sample(case: Case) -> Problem:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        size, d, e, g = (case.batch, case.height, case.width), case.d, case.hidden, case.weights
        depth = e or d
        weight1 = normal(e, d) / d**0.5 if e else torch.zeros(0, 0, dtype=torch.float64)
        inputs = normal(*size, d), normal(*size, d) + 0.5, normal(d), weight1, normal(e), 2 * normal(g, depth) / depth**0.5
        grad_w = normal(case.batch, g, case.footprint**2, case.height * case.width)
        return Problem(case, inputs, (normal(d), normal(d, d)), grad_w)

    def rounded(self, dtype: torch.dtype) -> Problem:
        """With weights that a half type can hold, so that only what a kernel does is to be seen."""
        center, around, shift1, weight1, shift2, weight2 = self.inputs
        weight1, weight2 = (x.to(dtype).double() for x in (weight1, weight2))
        inputs = center, around, shift1, weight1, shift2, weight2
        return replace(self, inputs=inputs, grad_w=self.grad_w.to(dtype).double())


def wanted_covariance(problem: Problem) -> Tensors:
    """mean, covariance and the gradients of center, around and shift."""
    maps = [x.clone().requires_grad_() for x in problem.inputs[:3]]
    outputs = oracle.pair_covariance(maps[0], maps[1], maps[2], problem.case.footprint, problem.case.products)
    return (*(x.detach() for x in outputs), *torch.autograd.grad(outputs, maps, problem.grads))


def covariance(kernels: Any, problem: Problem, dtype: torch.dtype, tf32: bool = False) -> Tensors:
    maps, grads = [x.to(dtype) for x in problem.inputs[:3]], [x.to(dtype) for x in problem.grads]
    rest = problem.case.footprint, problem.case.products, tf32
    mean, matrix = kernels.pair_covariance(*maps, *rest)
    return mean, matrix, *kernels.pair_covariance_backward(*grads, *maps, mean, *rest)


def wanted_weights(problem: Problem) -> Tensors:
    """w and the gradients of all inputs."""
    inputs = [x.clone().requires_grad_() for x in problem.inputs]
    center, around, shift1, weight1, shift2, weight2 = inputs
    sizes = problem.case.footprint, problem.case.products
    w = oracle.pair_weights(center, around, shift1, weight1, shift2, weight2, *sizes)
    grads = torch.autograd.grad(w, inputs, problem.grad_w, allow_unused=True)
    return w.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))


def weights(
    kernels: Any, problem: Problem, dtype: torch.dtype, of_weights: torch.dtype | None = None, tf32: bool = False
) -> Tensors:
    of_weights = of_weights or dtype
    inputs = [x.to(of_weights if name.startswith("weight") else dtype) for name, x in zip(NAMES, problem.inputs, strict=True)]
    rest = problem.case.footprint, problem.case.products, tf32
    w = kernels.pair_weights(*inputs, *rest)
    assert w.dtype == of_weights and w.transpose(1, 3).is_contiguous()
    gradients = kernels.pair_weights_backward(problem.grad_w.to(of_weights), w, *inputs, *rest)
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]
    return w, *gradients


def both(kernels: Any, problem: Problem, dtype: torch.dtype, tf32: bool = False) -> Tensors:
    return *covariance(kernels, problem, dtype, tf32), *weights(kernels, problem, dtype, tf32=tf32)


def wanted_both(problem: Problem) -> Tensors:
    return *wanted_covariance(problem), *wanted_weights(problem)


def with_products(cases: Iterable[Case]) -> list[Case]:
    return [replace(case, products=products) for case in cases for products in (0, case.d // 2, case.d)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_matches_oracle(case: Case, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    assert_near(both(shim, problem, torch.float64), wanted_both(problem), 1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_matches_oracle(case: Case, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    assert_near(both(shim, problem, torch.float32), wanted_both(problem), 1e-5)


@pytest.mark.parametrize("case", with_products(CASES[1:3]), ids=str)
def test_any_number_of_products(case: Case, shim: Any) -> None:
    problem = Problem.sample(case)
    assert_near(both(shim, problem, torch.float32), wanted_both(problem), 1e-5)


def test_the_last_stage(shim: Any) -> None:
    problem = Problem.sample(LAST_STAGE)
    assert_near(both(shim, problem, torch.float32), wanted_both(problem), 1e-5)
    assert_near(both(shim, problem, torch.float32, tf32=True), wanted_both(problem), 0.05)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tf32_is_used_where_it_is_allowed(case: Case, shim: Any) -> None:
    problem = Problem.sample(case)
    wanted, got = wanted_both(problem), both(shim, problem, torch.float32, tf32=True)
    accurate = both(shim, problem, torch.float32)
    values = [1] if case.footprint == 1 else [1, 5]  # covariance and w
    for index in values:
        assert error(got[index], wanted[index]) <= 3e-3
    assert_near(got, wanted, 0.1)  # gradients of so few pixels feel each relu that rounding flips
    for index in values:
        assert 10 * error(accurate[index], wanted[index]) < error(got[index], wanted[index])


@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[:7], ids=str)
def test_half_weights_match_oracle(case: Case, of_weights: torch.dtype, shim: Any) -> None:
    problem = Problem.sample(case).rounded(of_weights)
    wanted, got = wanted_weights(problem), weights(shim, problem, torch.float32, of_weights)
    epsilon = torch.finfo(of_weights).eps
    assert error(got[0], wanted[0]) <= max(3e-3, epsilon)
    assert_near(got[1:], wanted[1:], 0.15)  # as for TF32


@pytest.mark.parametrize("case", [Case(3, 7, 7, 7, 18, 0, 16, 8), Case(5, 9, 9, 3, 6, 2, 4, 2)], ids=str)
def test_the_same_inputs_give_the_same_bits(case: Case, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.sample(case)
    first = both(shim, problem, torch.float32)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    for one, other in zip(first, both(shim, problem, torch.float32), strict=True):
        assert torch.equal(one, other)


def test_one_outlier_does_not_spoil_the_covariance(shim: Any) -> None:
    """The first pixel is unlike all others: products of distances from it would cancel."""
    problem = Problem.sample(Case(1, 24, 24, 3, 6))
    center, around, *rest = problem.inputs
    center, around = center.clone(), around.clone()
    center[0, 0, 0], around[0, 1, 1] = 1000, -1000
    problem = replace(problem, inputs=(center, around, *rest))
    got, wanted = covariance(shim, problem, torch.float32), wanted_covariance(problem)
    torch.testing.assert_close(got[1], wanted[1].float(), rtol=1e-5, atol=1e-3)


def test_nan_stays(shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    problem.inputs[0][0, 2, 3, 1] = torch.nan
    mean, matrix, *_ = covariance(shim, problem, torch.float32)
    w, *_ = weights(shim, problem, torch.float32)
    assert mean[1].isnan() and matrix[1].isnan().all() and not mean[0].isnan()
    pixel = 2 * problem.case.width + 3
    assert w[0, :, :, pixel].isnan().all() and not w[1].isnan().any()


def test_an_empty_batch(shim: Any) -> None:
    for case in (CASES[0], CASES[5]):
        problem = Problem.sample(replace(case, batch=0))
        got = both(shim, problem, torch.float32)
        assert got[0].isnan().all() and got[1].isnan().all()  # as of torch's mean
        assert not any(x.any() for x in got[2:])
        assert [x.shape for x in got] == [x.shape for x in wanted_both(problem)]


def test_grad_in_any_memory_order(shim: Any) -> None:
    problem = Problem.sample(CASES[2])
    moved = replace(problem, grad_w=problem.grad_w.transpose(1, 3).contiguous().transpose(1, 3))
    for one, other in zip(weights(shim, problem, torch.float32), weights(shim, moved, torch.float32), strict=True):
        assert torch.equal(one, other)


REFUSALS = {
    0: (torch.zeros(1, 7, 7, 19), "the same shape"),
    2: (torch.zeros(3), "shift does not fit center's 18 channels"),
    3: (torch.zeros(16, 3), r"weight1 must be \[E, 18\], not \[16, 3\]"),
    4: (torch.zeros(3), "shift2 must have 16 values"),
    5: (torch.zeros(8, 3), r"weight2 must be \[G, 16\], not \[8, 3\]"),
    6: (15, "a 15x15 footprint does not fit a 7x7 map"),
    7: (19, "products must be between 0 and the 18 channels, not 19"),
}


@pytest.mark.parametrize("argument", REFUSALS)
def test_refuses_what_does_not_fit(argument: int, shim: Any) -> None:
    problem = Problem.sample(CASES[0])
    arguments: list[Any] = [*(x.float() for x in problem.inputs), 7, 0, False]
    arguments[argument], complaint = REFUSALS[argument]
    with pytest.raises(RuntimeError, match=complaint):
        shim.pair_weights(*arguments)


def test_refuses_more_channels_than_shared_memory_holds(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_SHIM_SHARED_MEMORY", "1024")
    with pytest.raises(RuntimeError, match=r"18 relation channels need .* bytes of shared memory, .* has 1024; use fewer"):
        weights(shim, Problem.sample(CASES[0]), torch.float32)


def test_a_failed_launch_names_kernel_and_operator(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_SHIM_FAIL", "fold_kernel")
    wanted = r"san::pair_weights_backward: kernel fold_kernel<T> failed: as the test asked; an earlier kernel may be"
    with pytest.raises(RuntimeError, match=wanted):
        weights(shim, Problem.sample(CASES[1]), torch.float32)
