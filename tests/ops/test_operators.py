"""Operators of unfused attention: results, gradients, registration, error messages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from san import ops
from san.ops import library
from tests.ops.operators import CASES, LAYOUTS, OPERATORS, Case, Operator, gradients
from tests.ops.threads import assert_same_bits_with_any_number_of_threads

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


@pytest.mark.every_isa
@every_operator
@given(
    batch=st.integers(0, 3),
    groups=st.integers(1, 3),
    reach=st.integers(0, 4),
    extra=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    layout=st.sampled_from(["contiguous", *LAYOUTS]),
    seed=st.integers(0, 9),
)
def test_matches_reference_for_any_shape(
    operator: Operator, batch: int, groups: int, reach: int, extra: tuple[int, int], layout: str, seed: int
) -> None:
    case = Case(batch, 4 * groups, reach + extra[0], reach + extra[1], 2 * reach + 1)
    inputs = operator.sample(case, seed=seed)
    arranged = tuple(LAYOUTS[layout](x) for x in inputs) if layout in LAYOUTS else inputs
    ours = gradients(operator.kernel(), arranged, *operator.rest(case))
    torch.testing.assert_close(ours, operator.defined(inputs, case), rtol=1e-12, atol=1e-12)


@every_operator
def test_gradgradcheck(operator: Operator) -> None:
    case = Case(1, 4, 3, 2, 3)
    arguments = (*(x.requires_grad_() for x in operator.sample(case)), *operator.rest(case))
    assert torch.autograd.gradgradcheck(operator.kernel(), arguments)


@every_operator
def test_opcheck(operator: Operator) -> None:
    case = Case(2, 4, 5, 4, 3)
    inputs = operator.sample(case, torch.bfloat16)
    backward, arguments = operator.backward(torch.randn_like(operator.reference(*inputs, *operator.rest(case))), inputs, case)
    torch.library.opcheck(backward.default, arguments)
    leaves = (x.requires_grad_() for x in inputs)
    torch.library.opcheck(operator.kernel().default, (*leaves, *operator.rest(case)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_aggregation_has_the_layout_of_the_kernel(layout: str) -> None:
    """torch.compile plans memory with the fake kernel."""
    beta, weight = (operator := OPERATORS[-1]).sample(Case(2, 8, 5, 4, 3), torch.float32)
    beta = LAYOUTS[layout](beta)
    torch.library.opcheck(operator.kernel().default, (beta, weight, 3))  # type: ignore[attr-defined]
    torch.library.opcheck(torch.ops.san.aggregation_backward.default, (torch.randn(beta.shape), beta, weight, 3))


@pytest.mark.every_isa
@every_operator
def test_error_in_half_types_is_at_most_twice_the_one_of_torch(operator: Operator) -> None:
    for case, dtype in itertools.product(CASES, (torch.float16, torch.bfloat16)):
        inputs = operator.sample(case, dtype)
        exact = operator.defined(tuple(x.double() for x in inputs), case)
        ours = gradients(operator.kernel(), inputs, *operator.rest(case))
        plain = operator.defined(inputs, case)
        for got, torch_got, want in zip(ours, plain, exact, strict=True):
            error, allowed = ((x.double() - want).abs().max().item() for x in (got, torch_got))
            rounding = want.abs().max().item() * torch.finfo(dtype).eps / 2
            assert error <= max(2 * allowed, rounding), f"{case}, {dtype}"


@every_operator
def test_noncontiguous_gradient(operator: Operator) -> None:
    case = Case(1, 4, 5, 5, 3)
    leaves = [x.requires_grad_() for x in operator.sample(case)]
    expanded = torch.ones((), dtype=torch.float64)
    ours = torch.autograd.grad(operator.kernel()(*leaves, *operator.rest(case)).sum(), leaves, expanded)
    wanted = torch.autograd.grad(operator.reference(*leaves, *operator.rest(case)).sum(), leaves, expanded)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@every_operator
def test_same_bits_with_any_number_of_threads(operator: Operator) -> None:
    case = Case(4, 16, 9, 9, 5)
    inputs = operator.sample(case, torch.float32)
    assert_same_bits_with_any_number_of_threads(lambda: gradients(operator.kernel(), inputs, *operator.rest(case)))


MAP = torch.zeros(2, 8, 5, 5)
WEIGHT = torch.zeros(2, 2, 9, 25)
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "three dimensions": (lambda: ops.unfold(MAP[0], 3), r"x .*\[N, C, H, W\], not \[8, 5, 5\]"),
    "integers": (lambda: ops.unfold(MAP.int(), 3), "x .*torch.int32"),
    "even footprint": (lambda: ops.unfold(MAP, 4), "odd.*4"),
    "large footprint": (lambda: ops.unfold(MAP, 11), "11x11 footprint.*6x6, not 5x5"),
    "two shapes": (lambda: ops.subtraction(MAP, MAP[:1], 3), r"\[2, 8, 5, 5\] and \[1, 8, 5, 5\]"),
    "two dtypes": (lambda: ops.subtraction(MAP, MAP.double(), 3), "torch.float32 on cpu"),
    "two devices": (lambda: ops.subtraction(MAP, MAP.to("meta"), 3), "on meta"),
    "groups that do not divide": (lambda: ops.dot(MAP, MAP, 3, groups=3), r"phi \(8\).*groups \(3\)"),
    "no groups": (lambda: ops.dot(MAP, MAP, 3, groups=0), r"groups \(0\)"),
    "no channels": (lambda: ops.hadamard(MAP[:, :0], MAP[:, :0], 3), r"\(0\)"),
    "hadamard of a scalar": (lambda: ops.hadamard(MAP[0, 0, 0], MAP[0, 0, 0], 3), "phi .*4 dimensions"),
    "summation of booleans": (lambda: ops.summation(MAP, MAP.bool(), 3), "psi .*torch.bool"),
    "weight of another footprint": (lambda: ops.aggregation(MAP, WEIGHT, 5), r"K=25.* not \[2, 2, 9, 25\]"),
    "channels not shared evenly": (
        lambda: ops.aggregation(MAP, WEIGHT[:, :1].repeat(1, 3, 1, 1), 3),
        r"beta \(8\).*\(3\)",
    ),
    "unknown backend": (lambda: ops.backend("fast"), "'reference', not 'fast'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", REFUSALS)
def test_rejects(what: str) -> None:
    call, message = REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("unfold", (MAP, 11), "11x11 footprint does not fit a 5x5 map"),
        ("dot", (MAP, MAP, 3, 0), "8 channels must be a positive multiple of the 0 groups"),
        ("dot", (MAP, MAP, 3, 3), "8 channels must be a positive multiple of the 3 groups"),
    ],
)
def test_kernels_reject(operator: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.san, operator)(*arguments)


def test_all_public_operators_have_a_reference() -> None:
    """Fused operators are not public."""
    assert set(ops.__all__) == {"Backend", "backend", "hadamard", "summation"} | {operator.name for operator in OPERATORS}


def test_backend_applies_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []
    monkeypatch.setattr(library, "runs_on", lambda device: kernels.append(threading.current_thread()) or True)
    other = threading.Thread(target=ops.unfold, args=(MAP, 3))
    with ops.backend("reference"):
        ops.unfold(MAP, 3)
        other.start()
        other.join()
    assert set(kernels) == {other}
