"""`torch.func` transforms and forward-mode derivatives of operators and networks, which run on the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad, functional, gradcheck

import san
from san import ops
from san.ops.functional import fuses
from tests.nn.kinds import randomize_vectors
from tests.ops.operators import OPERATORS, Case, Operator

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
every_model = pytest.mark.parametrize("name", ["san10_pairwise", "san10_patchwise", "san10_scalar", "resnet26"])
CASE = Case(1, 4, 3, 2, 3)
Function = Callable[[Tensor], Tensor]


def scalar(function: Function) -> Function:
    return lambda x: function(x).square().sum()


ONES = torch.ones(2, dtype=torch.float64)
Transform = Callable[[Function, Tensor, Tensor], Tensor]
# Each transform, and the same without torch.func, gets a function, its input x, and a direction of the same shape.
TRANSFORMS: dict[str, tuple[Transform, Transform]] = {
    "grad": (lambda f, x, t: func.grad(scalar(f))(x), lambda f, x, t: functional.jacobian(scalar(f), x)),
    "vmap": (lambda f, x, t: func.vmap(f)(torch.stack((x, t))), lambda f, x, t: torch.stack((f(x), f(t)))),
    "gradients of single images": (
        lambda f, x, t: func.vmap(func.grad(scalar(f)))(torch.stack((x, t))),
        lambda f, x, t: torch.stack([functional.jacobian(scalar(f), each) for each in (x, t)]),
    ),
    "hessian-vector": (
        lambda f, x, t: func.jvp(func.grad(scalar(f)), (x,), (t,))[1],
        lambda f, x, t: functional.vhp(scalar(f), x, t)[1],
    ),
    "jacrev": (
        lambda f, x, t: func.jacrev(lambda s: f(x + s * t))(ONES.sum()),
        lambda f, x, t: functional.jvp(f, x + 2 * t, t)[1],
    ),
    "jacfwd": (
        lambda f, x, t: func.jacfwd(lambda s: f(x + s * t))(ONES.sum()),
        lambda f, x, t: functional.jvp(f, x + 2 * t, t)[1],
    ),
    "hessian": (
        lambda f, x, t: func.hessian(lambda s: scalar(f)(x * s[0] + t * s[1]))(ONES),
        lambda f, x, t: functional.hessian(lambda s: scalar(f)(x * s[0] + t * s[1]), ONES),
    ),
}


def tangent(function: Function, x: Tensor, direction: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent
    assert found is not None, "the result has no tangent"
    return found


@every_operator
def test_gradcheck_with_forward_mode_and_batched_gradients(operator: Operator) -> None:
    inputs = tuple(x.requires_grad_() for x in operator.sample(CASE))
    arguments = (*inputs, *operator.rest(CASE))
    options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(getattr(ops, operator.name), arguments, **options)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = san.create_model(name, 3, depths=(1,), widths=(32,)).double().eval()
    randomize_vectors(model)
    return model


def images(seed: int) -> Tensor:
    return torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# All transforms with one network, and with the others those that nest two.
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *(("san10_pairwise", transform) for transform in TRANSFORMS),
        *(("san10_patchwise", transform) for transform in ("gradients of single images", "hessian-vector")),
        *(("san10_scalar", transform) for transform in ("gradients of single images", "hessian-vector")),
        ("resnet26", "hessian-vector"),
    ],
)
def test_networks_match_plain_differentiation(name: str, transform: str) -> None:
    model = made(name)
    transformed, plain = TRANSFORMS[transform]
    ours, wanted = (compute(model, images(0), images(1)) for compute in (transformed, plain))
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@every_model
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_tangents_of_networks_match_finite_differences(name: str, frozen: bool) -> None:
    model, x, direction, step = made(name).requires_grad_(not frozen), images(0), images(1), 1e-6
    wanted = (model(x + step * direction) - model(x - step * direction)) / (2 * step)
    for found in (tangent(model, x, direction), func.jvp(model, (x,), (direction,))[1]):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


@every_model
def test_func_grad_equals_backward_for_parameters(name: str) -> None:
    """Tests evaluation only: `func.grad` rejects the batch counter of PyTorch's BatchNorm in training."""
    model = made(name)
    plain = copy.deepcopy(model)
    wanted = torch.autograd.grad(plain(images(0)).square().sum(), list(plain.parameters()))
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return func.functional_call(model, parameters, images(0)).square().sum()

    ours: dict[str, Any] = func.grad(loss)(parameters)
    for got, want in zip(ours.values(), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_fuses_again_after_a_transform() -> None:
    x = torch.zeros(1, 1, 3, 3)
    chosen: list[bool] = []

    def choose(x: Tensor) -> Tensor:
        chosen.append(fuses(x))
        return x.sum()

    choose(x)
    func.grad(choose)(x)
    choose(x)
    assert chosen == [True, False, True]
