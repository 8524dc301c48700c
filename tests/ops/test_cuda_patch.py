"""The CUDA sources of patch_linear and of aggregation's memory formats, run on the CPU through the shim."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from san.ops import reference
from tests.ops import oracle
from tests.ops.cuda_cases import assert_near, error


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

    def __str__(self) -> str:
        return f"n{self.batch}-{self.height}x{self.width}-k{self.footprint}-c{self.center}r{self.around}e{self.hidden}"


CASES = [
    Case(1, 7, 7, 7, 16, 16, 8),  # both mirror images overlap; the channels of SAN's second stage
    Case(2, 9, 10, 3, 4, 4, 2),  # the channels of its first stage; the tiles are not filled
    Case(1, 4, 5, 3, 32, 32, 16),  # of its third
    Case(2, 5, 6, 5, 0, 5, 3),  # no center, and nothing is a multiple of anything
    Case(2, 23, 17, 1, 20, 20, 9),  # a footprint of one pixel; its gradients have several parts
    Case(1, 11, 3, 5, 3, 3, 40),  # a map just wide enough; hidden channels for two strips
    Case(1, 3, 4, 3, 0, 72, 1),
]


@dataclass(frozen=True)
class Problem:
    inputs: tuple[Tensor, ...]  # center, around, scale, shift, weight
    grad: Tensor
    footprint: int

    @staticmethod
    def sample(case: Case) -> Problem:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        size, columns = (case.batch, case.height, case.width), case.center + case.around * case.footprint**2
        weight = normal(case.hidden, columns) / columns**0.5
        inputs = normal(*size, case.center), normal(*size, case.around), normal(columns), normal(columns), weight
        return Problem(inputs, normal(case.batch, case.hidden, case.height, case.width), case.footprint)

    def rounded(self, dtype: torch.dtype) -> Problem:
        """With a weight that a type can hold, and the others as float32 holds them."""
        *maps, weight = (x.float().double() for x in self.inputs)
        return replace(self, inputs=(*maps, weight.to(dtype).double()), grad=self.grad.float().double())


def wanted(problem: Problem) -> tuple[Tensor, ...]:
    """The value and the gradients of all inputs in float64."""
    leaves = center, around, scale, shift, weight = tuple(x.clone().requires_grad_() for x in problem.inputs)
    out = oracle.patch_linear(center, around, scale, shift, weight, problem.footprint)
    return out.detach(), *torch.autograd.grad(out, leaves, problem.grad)


def run(
    shim: Any, problem: Problem, dtype: torch.dtype, weight: torch.dtype | None = None, tf32: bool = False
) -> tuple[Tensor, ...]:
    inputs = [*(x.to(dtype) for x in problem.inputs[:4]), problem.inputs[4].to(weight or dtype)]
    out = shim.patch_linear(*inputs, problem.footprint, tf32)
    return out, *shim.patch_linear_backward(problem.grad.to(dtype), *inputs, problem.footprint, tf32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_matches_oracle(case: Case, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    assert_near(run(shim, problem, torch.float64), wanted(problem), 1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_matches_oracle(case: Case, order: str, shim: Any) -> None:
    problem = Problem.sample(case).rounded(torch.float32)
    assert_near(run(shim, problem, torch.float32), wanted(problem), 2e-6)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_tf32_is_used_where_it_is_allowed(case: Case, order: str, shim: Any) -> None:
    problem = Problem.sample(case).rounded(torch.float32)
    fast, accurate, want = run(shim, problem, torch.float32, tf32=True), run(shim, problem, torch.float32), wanted(problem)
    assert_near(fast, want, 3e-3)
    for got, exact, value in zip(fast, accurate, want, strict=True):
        assert value.numel() == 0 or 10 * error(exact, value) < error(got, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_half_weights(case: Case, dtype: torch.dtype, order: str, shim: Any) -> None:
    problem = Problem.sample(case).rounded(dtype)
    got = run(shim, problem, torch.float32, dtype)
    assert [x.dtype for x in got] == [torch.float32] * 5 + [dtype]
    assert_near(got, wanted(problem), 3e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_order_of_threads_and_blocks_changes_no_bit(case: Case, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.sample(case)
    forwards = run(shim, problem, torch.float32)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    for one, other in zip(run(shim, problem, torch.float32), forwards, strict=True):
        assert torch.equal(one, other)


def test_result_is_channels_last(shim: Any) -> None:
    out, *_ = run(shim, Problem.sample(CASES[1]), torch.float32)
    assert out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous()


def test_takes_views(shim: Any) -> None:
    """Maps in another order, one that begins anywhere, and a gradient in either memory format."""
    problem = Problem.sample(CASES[0])
    center, around, *parameters = (x.float() for x in problem.inputs)
    moved = torch.cat((around.new_zeros(1), around.flatten()))[1:].view(around.shape)
    turned = center.transpose(1, 2).contiguous().transpose(1, 2)
    grad = problem.grad.float()
    for view in (grad, grad.contiguous(memory_format=torch.channels_last)):
        views = shim.patch_linear_backward(view, turned, moved, *parameters, 7, False)
        plain = shim.patch_linear_backward(grad, center, around, *parameters, 7, False)
        for got, want in zip(views, plain, strict=True):
            assert torch.equal(got, want)


def test_nan_and_infinity_stay_with_the_pixels_that_see_them(shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    inputs = [x.float() for x in problem.inputs]
    clean = shim.patch_linear(*inputs, 3, False)
    inputs[1][0, 4, 4, 1] = float("nan")
    spoilt = shim.patch_linear(*inputs, 3, False)
    assert spoilt[0, :, 3:6, 3:6].isnan().all()
    spoilt[0, :, 3:6, 3:6] = clean[0, :, 3:6, 3:6]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("center", [0, 4])
def test_takes_an_empty_batch(center: int, shim: Any) -> None:
    out, *gradients = run(shim, Problem.sample(Case(0, 5, 5, 3, center, 4, 2)), torch.float32)
    columns = center + 36
    assert out.shape == (0, 2, 5, 5)
    assert [x.shape for x in gradients] == [(0, 5, 5, center), (0, 5, 5, 4), (columns,), (columns,), (2, columns)]
    assert all((x == 0).all() for x in gradients)


@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [
        (0, torch.zeros(2, 9, 10, 3), "center has 3 channels; expected around's 4 or none"),
        (0, torch.zeros(2, 9, 9, 4), "one size"),
        (0, torch.zeros(9, 10, 4), "4 dimensions"),
        (1, torch.zeros(2, 9, 10, 4, dtype=torch.float16), "float32 or float64"),
        (2, torch.zeros(39), "the 40 channels of a patch"),
        (3, torch.zeros(40, dtype=torch.float64), "same dtype"),
        (4, torch.zeros(2, 39), r"weight must be \[E, 40\]"),
        (4, torch.zeros(2, 40, dtype=torch.float64), "weight must have around's dtype"),
        (5, 4, "footprint"),
        (5, 19, "footprint"),
    ],
)
def test_refuses_what_does_not_fit(argument: int, value: Any, complaint: str, shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    arguments: list[Any] = [*(x.float() for x in problem.inputs), 3, False]
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=complaint):
        shim.patch_linear(*arguments)
    with pytest.raises(RuntimeError, match=complaint):
        shim.patch_linear_backward(problem.grad.float(), *arguments)


def test_refuses_a_gradient_of_another_shape(shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    inputs = [x.float() for x in problem.inputs]
    with pytest.raises(RuntimeError, match=r"grad must be \[2, 2, 9, 10\]"):
        shim.patch_linear_backward(torch.zeros(2, 3, 9, 10), *inputs, 3, False)


def stored_by_pixels(weight: Tensor) -> Tensor:
    """[N, G, K, P] as a view of [N, P, K, G]."""
    return weight.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)


@pytest.mark.parametrize("channels", [(64, 8), (24, 4), (4, 4), (12, 2), (6, 3)], ids=str)
@pytest.mark.parametrize("by_pixels", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("height", "width", "footprint"), [(7, 7, 7), (5, 9, 3), (4, 1, 1)])
def test_aggregation_takes_every_memory_format(
    height: int, width: int, footprint: int, channels_last: bool, by_pixels: bool, channels: tuple[int, int], shim: Any
) -> None:
    generator = torch.Generator().manual_seed(4)
    (M, G), K, P = channels, footprint**2, height * width
    beta, grad = (torch.randn(2, M, height, width, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(2, G, K, P, generator=generator, dtype=torch.float64)
    if channels_last:
        beta = beta.contiguous(memory_format=torch.channels_last)
    if by_pixels:
        weight = stored_by_pixels(weight)
    leaves = beta.detach().requires_grad_(), weight.detach().requires_grad_()
    want = reference.aggregation(leaves[0], leaves[1], footprint)
    gradients = torch.autograd.grad(want, leaves, grad)
    got = shim.aggregation(beta, weight, footprint)
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
    assert got.stride() == beta.stride()
    for like in (grad, grad.contiguous(memory_format=torch.channels_last)):
        ours = shim.aggregation_backward(like, beta, weight, footprint)
        for one, other, given in zip(ours, gradients, (beta, weight), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
            assert one.stride() == given.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_aggregation_gives_the_same_bits_in_every_memory_format(dtype: torch.dtype, shim: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    beta, grad = (torch.randn(2, 16, 6, 5, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(2, 8, 9, 30, generator=generator).to(dtype)
    plain = shim.aggregation(beta, weight, 3), *shim.aggregation_backward(grad, beta, weight, 3)
    last, by_pixels = beta.contiguous(memory_format=torch.channels_last), stored_by_pixels(weight)
    sliced = torch.cat((beta, beta), 1)[:, 16:]  # a view with gaps
    for one, other in ((last, weight), (beta, by_pixels), (last, by_pixels), (sliced, weight[:1].expand(2, -1, -1, -1))):
        if other.stride(0) == 0:
            plain = shim.aggregation(beta, other.contiguous(), 3), *shim.aggregation_backward(grad, beta, other.contiguous(), 3)
        got = shim.aggregation(one, other, 3), *shim.aggregation_backward(grad, one, other, 3)
        for ours, theirs in zip(got, plain, strict=True):
            assert torch.equal(ours, theirs)
