"""The CUDA sources of fused patchwise attention, run on the CPU through the shim, against plain torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.cuda_cases import assert_near, assert_same_bits, error, outcome
from tests.ops.fused_cases import every_mode
from tests.ops.patchwise_cases import CASES, Case, Problem, reference, run


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 1e6])
def test_an_image_does_not_depend_on_others_in_evaluation(spoilt: float, shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    wanted, _ = run(shim, problem, False, torch.float32)
    center, around, beta = (x.clone() for x in problem.maps)
    center[0, 0, 0], around[0, 0, 0] = spoilt, spoilt
    got, _ = run(shim, replace(problem, maps=(center, around, beta)), False, torch.float32)
    assert torch.equal(got[0][1:], wanted[0][1:]) and not torch.equal(got[0][0], wanted[0][0])


@every_mode
def test_large_means_change_nothing(training: bool, shim: Any) -> None:
    problem = Problem.sample(CASES[0], 1000)
    center, around, beta = problem.maps
    mean1, *statistics = problem.statistics
    mean1[: CASES[0].center] -= 2000  # the center's are at -1000
    statistics = [x.float().double() for x in (mean1, *statistics)]
    problem = replace(problem, maps=(center.float().double(), around.float().double(), beta), statistics=tuple(statistics))
    outputs, gradients = run(shim, problem, training, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, training)
    # In training the batch's means are kept in float32, with an error of 3e-5.
    assert_near(outputs[:1], wanted_outputs[:1], 1e-4 if training else 2e-6)
    assert_near(gradients, wanted_gradients, 5e-4 if training else 1e-4)


def test_statistics_do_not_hang_on_the_first_pixel(shim: Any) -> None:
    """It is unlike all others: squares of distances from it would cancel."""
    problem = Problem.sample(Case(1, 24, 24, 3, 4, 4, 2, 2, 16))
    center, around = (torch.zeros_like(x) for x in problem.maps[:2])
    center[0, 0, 0], around[0, 1, 1] = 1000, 1000
    problem = replace(problem, maps=(center, around, problem.maps[2]))
    (_, _, _, _, _, var2), _ = run(shim, problem, True, torch.float32)
    (_, _, _, _, _, wanted), _ = reference(problem, True)
    torch.testing.assert_close(var2, wanted.float(), rtol=1e-5, atol=0)


def test_statistics_of_positions_that_do_not_see_a_bright_border(shim: Any) -> None:
    """The mean of what they see is far from the map's: squares of distances from that would cancel."""
    problem = Problem.sample(Case(2, 16, 16, 7, 4, 4, 2, 2, 16))
    center, around = (0.01 * x for x in problem.maps[:2])
    around[:, :3] += 10
    problem = replace(problem, maps=(center.float().double(), around.float().double(), problem.maps[2]))
    (_, _, _, var1, _, _), _ = run(shim, problem, True, torch.float32)
    (_, _, _, wanted, _, _), _ = reference(problem, True)
    torch.testing.assert_close(var1, wanted.float(), rtol=3e-6, atol=0)


@every_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_matches_reference(case: Case, training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    outputs, gradients = run(shim, problem, training, torch.float64)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert_near(outputs, wanted_outputs, 1e-12)
    assert_near(gradients, wanted_gradients, 1e-10)


@every_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_matches_reference(case: Case, training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    outputs, gradients = run(shim, problem, training, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert_near(outputs, wanted_outputs, 2e-6)
    assert_near(gradients, wanted_gradients, 1e-4)  # sums over so few pixels cancel


@every_mode
def test_takes_maps_far_from_zero(training: bool, shim: Any) -> None:
    """Squares of means do not swallow the variance: only the mean's own rounding, 2e-5 of a deviation, is to be seen."""
    problem = Problem.sample(CASES[1], distance=300.0).rounded_to(torch.float32)
    outputs, gradients = run(shim, problem, training, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert_near(outputs, wanted_outputs, 1e-4)
    assert_near(gradients, wanted_gradients, 1e-3)


@every_mode
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_tf32_is_used_where_it_is_allowed(case: Case, training: bool, shim: Any) -> None:
    problem = Problem.sample(case)
    outputs, gradients = run(shim, problem, training, torch.float32, tf32=True)
    accurate, _ = run(shim, problem, training, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, training)
    for got, exact, want in list(zip(outputs, accurate, wanted_outputs, strict=True))[:2]:
        assert 10 * error(exact, want) < error(got, want) <= 3e-3
    assert_near(gradients, wanted_gradients, 0.1)  # sums over so few pixels feel each relu that rounding flips


def test_tf32_changes_no_other_type(shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert_same_bits(run(shim, problem, True, dtype), run(shim, problem, True, dtype, tf32=True))


@every_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_half_types_are_near(case: Case, dtype: torch.dtype, training: bool, shim: Any) -> None:
    problem = Problem.sample(case).rounded_to(dtype)
    outputs, gradients = run(shim, problem, training, dtype)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert [outputs[0].dtype, outputs[1].dtype, gradients[2].dtype, gradients[3].dtype] == [dtype, torch.float32] * 2
    assert_near(outputs, wanted_outputs, 5e-3)
    assert_near(gradients, wanted_gradients, 0.15)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_order_of_threads_and_blocks_changes_no_bit(case: Case, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.sample(case)
    forwards = run(shim, problem, True, torch.float32)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    assert_same_bits(run(shim, problem, True, torch.float32), forwards)


def test_takes_views_and_maps_of_different_types(shim: Any) -> None:
    problem = Problem.sample(CASES[1]).rounded_to(torch.bfloat16)
    center, around, beta = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem.maps)
    maps = center.float(), around.float(), F.pad(beta, (1, 0)).bfloat16()[..., 1:]
    parameters, statistics = ([x.float() for x in some] for some in (problem.parameters, problem.statistics))
    outputs = shim.patchwise(*maps, *parameters, *statistics, *problem.rest(True))
    used = (*outputs[2:], outputs[1])
    gradients = shim.patchwise_backward(problem.grad.bfloat16(), *maps, *parameters, *used, *problem.rest(True))
    wanted_outputs, wanted_gradients = reference(problem, True)
    assert [x.dtype for x in (outputs[0], *gradients[:3])] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert_near(outputs, wanted_outputs, 5e-3)
    assert_near(gradients, wanted_gradients, 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_takes_a_view_that_begins_anywhere(dtype: torch.dtype, shim: Any) -> None:
    problem = Problem.sample(CASES[1]).rounded_to(dtype)

    def shifted(x: Tensor) -> Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    moved = replace(problem, maps=tuple(map(shifted, problem.maps)), grad=shifted(problem.grad))
    assert_same_bits(run(shim, moved, True, dtype), run(shim, problem, True, dtype))


@every_mode
@pytest.mark.parametrize("center", [0, 4])
def test_takes_an_empty_batch(center: int, training: bool, shim: Any) -> None:
    problem = Problem.sample(Case(0, 5, 5, 3, center, 4, 2, 2, 16))
    outputs, gradients = run(shim, problem, training, torch.float32)
    assert outputs[0].shape == (0, 5, 5, 16) and outputs[1].shape == (0, 5, 5, 2)
    for got, given in zip(outputs[2:], problem.statistics, strict=True):
        torch.testing.assert_close(got, given.float())
    for got, given in zip(gradients, (*problem.maps, *problem.parameters), strict=True):
        torch.testing.assert_close(got, torch.zeros_like(given.float()))


@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [
        (0, torch.zeros(2, 9, 10, 3), "4 channels or none"),
        (1, torch.zeros(2, 9, 9, 4), "one size"),
        (2, torch.zeros(2, 9, 10, 15), "multiple of the weight channels"),
        (3, torch.zeros(39), "first BatchNorm must have 40"),
        (5, torch.zeros(2, 39), "weight1 must be"),
        (6, torch.zeros(3), "second BatchNorm must have 2"),
        (8, torch.zeros(18), "must be matrices"),
        (9, torch.zeros(17), "bias3"),
        (14, 4, "footprint"),
        (14, 19, "footprint"),
    ],
)
def test_refuses_what_does_not_fit(argument: int, value: Any, complaint: str, shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    arguments: list[Any] = [x.float() for x in (*problem.maps, *problem.parameters, *problem.statistics)]
    arguments += problem.rest(True)
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=complaint):
        shim.patchwise(*arguments)


def test_refuses_a_footprint_that_shared_memory_cannot_hold(shim: Any) -> None:
    problem = Problem.sample(Case(1, 25, 25, 45, 0, 1, 1, 1, 1))
    with pytest.raises(RuntimeError, match=r"a 45x45 footprint needs too much shared memory: \d+ bytes; a block of this GPU"):
        run(shim, problem, False, torch.float32)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5], CASES[7]], ids=str)
def test_forward_and_backward_refuse_the_same_sizes(
    case: Case, dtype: torch.dtype, training: bool, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.sample(replace(case, batch=1))
    maps, grad = [x.to(dtype) for x in problem.maps], problem.grad.to(dtype)
    sums = torch.promote_types(dtype, torch.float32)
    parameters, statistics = ([x.to(sums) for x in some] for some in (problem.parameters, problem.statistics))
    hidden = torch.zeros(*problem.grad.shape[:3], case.hidden, dtype=sums)
    refusals = []
    for limit in (16 << 10, 32 << 10, 40 << 10, 60 << 10, 227 << 10):
        monkeypatch.setenv("SAN_SHIM_SHARED_MEMORY", str(limit))
        rest = problem.rest(training)
        forward = outcome(shim.patchwise, *maps, *parameters, *statistics, *rest)
        assert outcome(shim.patchwise_backward, grad, *maps, *parameters, *statistics, hidden, *rest) == forward
        refusals.append(forward)
    assert refusals[0] is not None and refusals[-1] is None


@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [(0, torch.zeros(2, 9, 10, 15), "grad_y and beta"), (15, torch.zeros(2, 9, 10, 3), "hidden must be")],
)
def test_backward_refuses_what_does_not_fit(argument: int, value: Tensor, complaint: str, shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    hidden = torch.zeros(2, 9, 10, 2)
    given = problem.grad, *problem.maps, *problem.parameters, *problem.statistics, hidden
    arguments: list[Any] = [x.float() for x in given]
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=complaint):
        shim.patchwise_backward(*arguments, *problem.rest(True))
