"""The CUDA sources of BatchNorm and ReLU in one, run on the CPU through the shim, against plain torch and the CPU's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cuda_cases import EPS, assert_near
from tests.ops.fused_cases import every_mode
from tests.ops.norm_cases import HALF, SHAPES, Problem, error_of, reference, run


@every_mode
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64_matches_reference(shape: tuple[int, ...], training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample(shape)
    got = run(shim, problem, training)
    assert_near(got, reference(problem, training), error_of(torch.float64))
    assert_near(got, run(torch.ops.san, problem, training), error_of(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@every_mode
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_types_match_reference(shape: tuple[int, ...], training: bool, dtype: torch.dtype, shim: Any) -> None:
    problem = Problem.sample(shape, dtype)
    got, sums = run(shim, problem, training), torch.float32
    assert [x.dtype for x in got] == [dtype, sums, sums, dtype, sums, sums]
    assert_near(got, reference(problem, training), error_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("channels", [8, 5], ids=str)
def test_in_place_equals_the_other(channels: int, dtype: torch.dtype, order: str, shim: Any) -> None:
    problem = Problem.sample((2, 7, 5, channels), dtype)
    y, *_ = shim.norm_relu(problem.x, *problem.parameters, False, EPS)
    x = problem.x.clone()
    shim.norm_relu_(x, *problem.parameters, EPS)
    assert torch.equal(x, y)


@every_mode
def test_takes_views_that_vectors_cannot_read(training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample((2, 6, 5, 8), torch.float32)
    want = run(shim, problem, training)
    shifted = torch.empty(problem.x.numel() + 1)[1:].view_as(problem.x).copy_(problem.x)
    turned = problem.x.transpose(1, 2).contiguous().transpose(1, 2)
    parameters = tuple(torch.stack([p, p], 1)[:, 1] for p in problem.parameters)
    for x in (shifted, turned):
        assert_near(run(shim, Problem(x, parameters, problem.grad), training), want, 1e-6)
        assert_near(
            run(shim, Problem(problem.x, parameters, x), training),
            run(shim, Problem(problem.x, parameters, problem.x), training),
            1e-6,
        )
    if not training:
        shim.norm_relu_(shifted, *parameters, EPS)
        torch.testing.assert_close(shifted, want[0])


@every_mode
def test_takes_an_empty_batch_as_the_cpu_does(training: bool, shim: Any) -> None:
    problem = Problem.sample((0, 3, 4, 5), torch.float32)
    for got, want in zip(run(shim, problem, training), run(torch.ops.san, problem, training), strict=True):
        assert torch.equal(got, want)
    shim.norm_relu_(problem.x, *problem.parameters, EPS)


@every_mode
@pytest.mark.parametrize("channels", [8, 3], ids=str)
def test_nan_stays_as_on_the_cpu(channels: int, training: bool, shim: Any) -> None:
    for place in (0, 17):
        problem = Problem.sample((2, 3, 5, channels), torch.float32)
        problem.x.view(-1, channels)[place, 1] = torch.nan
        got = run(shim, problem, training)
        for ours, theirs in zip(got, run(torch.ops.san, problem, training), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
        assert got[0][..., 1].isnan().all() == training


def test_large_means_keep_their_variance(shim: Any) -> None:
    problem = Problem.sample((4, 16, 16, 8), torch.float32)
    problem.x.add_(1000)
    _, mean, var = shim.norm_relu(problem.x, *problem.parameters, True, EPS)
    wanted_var, wanted_mean = torch.var_mean(problem.x.double(), (0, 1, 2), correction=0)
    torch.testing.assert_close((mean, var), (wanted_mean.float(), wanted_var.float()), rtol=1e-5, atol=0)


def test_variance_does_not_hang_on_the_first_pixel(shim: Any) -> None:
    """It is unlike all others: squares of distances from it would cancel."""
    problem = Problem.sample((1, 64, 64, 8), torch.float32)
    problem.x[0, 0, 0] = 1000
    _, _, var = shim.norm_relu(problem.x, *problem.parameters, True, EPS)
    torch.testing.assert_close(var, problem.x.double().var((0, 1, 2), correction=0).float(), rtol=1e-6, atol=0)


def test_order_of_threads_and_blocks_changes_no_bit(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.sample(SHAPES[4], torch.float32)
    forwards = run(shim, problem, True)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    for one, other in zip(forwards, run(shim, problem, True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [
        (0, torch.zeros(3, 5), "4 dimensions"),
        (1, torch.zeros(4), r"must be \[5\]"),
        (2, torch.zeros(5, 1), r"must be \[5\]"),
        (3, torch.zeros(5, dtype=torch.float64), "float32 for others"),
        (4, torch.zeros(5, dtype=torch.bfloat16), "float32 for others"),
    ],
)
def test_refuses_what_does_not_fit(argument: int, value: Tensor, complaint: str, shim: Any) -> None:
    problem = Problem.sample((2, 3, 4, 5), torch.float32)
    arguments = [problem.x, *problem.parameters]
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=complaint):
        shim.norm_relu(*arguments, True, EPS)
    with pytest.raises(RuntimeError, match=complaint):
        shim.norm_relu_(*arguments, EPS)
    with pytest.raises(RuntimeError, match=complaint):
        shim.norm_relu_backward(problem.grad, *arguments, True, EPS)


def test_refuses_gradients_and_views_that_do_not_fit(shim: Any) -> None:
    problem = Problem.sample((2, 3, 4, 5), torch.float32)
    for grad, complaint in ((problem.grad[:1], "same shape"), (problem.grad.double(), "same dtype")):
        with pytest.raises(RuntimeError, match=complaint):
            shim.norm_relu_backward(grad, problem.x, *problem.parameters, True, EPS)
    with pytest.raises(RuntimeError, match="contiguous"):
        shim.norm_relu_(problem.x.transpose(1, 2), *problem.parameters, EPS)
