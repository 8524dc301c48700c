"""Fused operators on the CPU: results, gradients, registration, reproducibility, error messages, extreme values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    ON_CPU,
    SIZES,
    STATISTICS,
    Sizes,
    Tensors,
    assert_near,
    backward_arguments,
    computed,
    cotangents,
    defined,
    differentiated,
    rest,
    sample,
    with_half_weights,
    with_saved,
)
from tests.ops.threads import assert_same_bits_with_any_number_of_threads

# With few channels, the CPU kernels process 16 pixels at once: rows with one fewer, exactly as many, and more.
LONG_ROWS = [Sizes(1, 9, width, 3, 4, 4, 2) for width in (15, 16, 37)]
SOME_PRODUCTS = Sizes(2, 11, 13, 5, 9, 17, 5, products=4)
every_operator = pytest.mark.parametrize("operator", ON_CPU)


@pytest.mark.every_isa
@every_operator
def test_matches_the_definition(operator: str) -> None:
    for sizes in [*SIZES, *LONG_ROWS, SOME_PRODUCTS]:
        exact = sample(operator, sizes)
        want, want_grads = differentiated(lambda t: defined(operator, t, sizes), exact)  # noqa: B023
        for dtype, values, gradients in ((torch.float64, 1e-11, 1e-10), (torch.float32, 1e-5, 1e-4)):
            tensors = tuple(x.to(dtype) for x in exact)
            got, got_grads = differentiated(lambda t: computed(operator, t, sizes), tensors)  # noqa: B023
            assert_near(got, want, values, f"{sizes}, {dtype}")
            assert_near(got_grads, want_grads, gradients, f"gradients, {sizes}, {dtype}")


def channels_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1).contiguous().movedim(1, -1) if x.dim() > 1 else x


@every_operator
def test_opcheck(operator: str) -> None:
    tensors = tuple(map(channels_first, sample(operator, dtype=torch.float32)))
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(getattr(torch.ops.san, operator).default, (*leaves, *rest(operator, Sizes())))
    detached = tuple(x.detach() for x in tensors)
    outputs, grads = with_saved(operator, detached, Sizes()), cotangents(computed(operator, detached, Sizes()))
    arguments = backward_arguments(operator, detached, outputs, grads, Sizes())
    torch.library.opcheck(getattr(torch.ops.san, f"{operator}_backward").default, arguments)


@every_operator
def test_noncontiguous_gradient(operator: str) -> None:
    leaves = tuple(x.requires_grad_() for x in sample(operator))
    outputs = computed(operator, leaves, Sizes())
    factors = tuple(torch.ones((), dtype=y.dtype).expand(y.shape) for y in outputs)
    ours = torch.autograd.grad(outputs, leaves, factors, retain_graph=True)
    wanted = torch.autograd.grad(outputs, leaves, tuple(x.contiguous() for x in factors))
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


@pytest.mark.every_isa
def test_half_weights() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        ours, rounded = with_half_weights("patch_linear", sample("patch_linear"), dtype)
        got, grads = differentiated(lambda t: computed("patch_linear", t, Sizes()), ours)
        want, want_grads = differentiated(lambda t: defined("patch_linear", t, Sizes()), rounded)
        assert got[0].dtype == torch.float32
        assert [x.dtype for x in grads] == [x.dtype for x in ours]
        assert_near(got, want, torch.finfo(dtype).eps, dtype)
        assert_near(grads, want_grads, 10 * torch.finfo(dtype).eps, dtype)


class Undefined(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@every_operator
def test_undefined_gradient(operator: str) -> None:
    leaves = tuple(x.requires_grad_() for x in sample(operator))
    total = torch.stack([Undefined.apply(x).sum() for x in (*computed(operator, leaves, Sizes()), *leaves)]).sum()
    (total + leaves[0].sum()).backward()
    assert leaves[0].grad is not None and (leaves[0].grad == 1).all()


@every_operator
def test_empty_batch(operator: str) -> None:
    sizes = Sizes(batch=0)
    outputs, grads = differentiated(lambda t: computed(operator, t, sizes), sample(operator, sizes))
    assert [x.shape for x in grads] == [x.shape for x in sample(operator, sizes)]
    if operator not in STATISTICS and operator != "pair_covariance":
        assert outputs[0].shape[0] == 0 and all((x == 0).all() for x in grads)


@every_operator
def test_same_bits_with_any_number_of_threads(operator: str) -> None:
    for sizes in (Sizes(1, 91, 9), Sizes(5, 32, 12, 5, hidden=17), Sizes(70, 4, 4), Sizes(4, 7, 7, 3, 70, 20, 64)):
        tensors = sample(operator, sizes, torch.float32)
        assert_same_bits_with_any_number_of_threads(
            lambda: sum(differentiated(lambda t: computed(operator, t, sizes), tensors), ()),  # noqa: B023
            sizes,
        )


@pytest.mark.parametrize("operator", [name for name in ON_CPU if name not in STATISTICS])  # which have no SIMD code
def test_rejects_an_unknown_instruction_set(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_CPU", "nonsense")
    with pytest.raises(RuntimeError, match="SAN_CPU must be baseline, v3 or v4, not nonsense"):
        computed(operator, sample(operator), Sizes())


def changed(operator: str, at: int, change: Callable[[Tensor], Tensor]) -> tuple[str, Tensors]:
    tensors = list(sample(operator))
    tensors[at] = change(tensors[at])
    return operator, tuple(tensors)


def cropped(x: Tensor) -> Tensor:
    """Removes the first value of a vector, or the first column of a matrix or row of a map."""
    return x[1:] if x.dim() == 1 else x[:, 1:]


COVARIANCE, ATTENTION = ((name, sample(name)) for name in ("pair_covariance", "attend_pairs"))
HALF = "pair_statistics", sample("pair_statistics", dtype=torch.bfloat16)
REFUSALS: dict[str, tuple[tuple[str, Tensors], dict[str, int], str]] = {
    "even footprint": (ATTENTION, {"footprint": 2}, "2x2 footprint does not fit a 6x5 map"),
    "large footprint": (COVARIANCE, {"footprint": 11}, "11x11 footprint does not fit a 6x5"),
    "three dimensions": (changed("attend_pairs", 0, lambda x: x[0]), {}, "center must have 4 dimensions"),
    "two sizes": (changed("pair_statistics", 1, cropped), {}, "center and around must have the same shape"),
    "two types": (changed("attend_pairs", 2, Tensor.float), {}, "norm and the maps must have the same dtype"),
    "half maps": (HALF, {}, "center must be float32 or float64"),
    "norm of pairs": (changed("pair_covariance", 2, cropped), {}, r"norm must be \[3, 3\]"),
    "products": (COVARIANCE, {"products": 4}, "products must be between 0 and the 3 channels, not 4"),
    "weight1": (changed("attend_pairs", 3, cropped), {}, r"weight1 must be \[E, 3\]"),
    "shift2": (changed("attend_pairs", 4, cropped), {}, "shift2 must have 5 values"),
    "weight2": (changed("attend_pairs", 5, cropped), {}, r"weight2 must be \[G, 5\]"),
    "patches of two sizes": (changed("patch_linear", 0, cropped), {}, "must be maps of one size"),
    "norm of patches": (changed("patch_linear", 2, cropped), {}, r"norm must be \[3, 30\]"),
    "values": (changed("attend_pairs", 6, lambda x: x[..., 1:]), {}, "must be a positive multiple of the 2 weight channels"),
    "values of another size": (changed("attend_patches", 3, cropped), {}, r"must be maps \[2, 6, 5, M\]"),
    "half values": (changed("attend_patches", 3, Tensor.half), {}, "beta and the other maps must have the same dtype"),
    "half hidden channels": (changed("attend_patches", 0, Tensor.half), {}, "hidden must be float32 or float64"),
    "last layer": (changed("attend_patches", 1, lambda x: x[1:]), {}, r"weight must be \[G \* 9, 5\]"),
    "bias": (changed("attend_patches", 2, cropped), {}, "bias must have 18 values"),
    "scores": (changed("attend_dot", 2, lambda x: x[:, :, 1:]), {}, r"scores must be \[2, G, 6, 30\]"),
    "dot products": (changed("attend_dot", 0, lambda x: x[..., 1:]), {}, "phi and psi must have the same shape"),
    "columns": (changed("patch_linear", 3, cropped), {}, r"weight must be \[E, 30\]"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_kernels_reject(what: str) -> None:
    (operator, tensors), changes, message = REFUSALS[what]
    with pytest.raises(RuntimeError, match=message):
        computed(operator, tensors, Sizes(**changes))  # type: ignore[arg-type]


@every_operator
def test_backward_rejects_gradients_of_the_wrong_shape(operator: str) -> None:
    tensors = sample(operator)
    outputs = with_saved(operator, tensors, Sizes())
    grads = computed(operator, tensors, Sizes())
    arguments = backward_arguments(operator, tensors, outputs, (grads[0][1:], *grads[1:]), Sizes())
    with pytest.raises(RuntimeError, match="must"):
        getattr(torch.ops.san, f"{operator}_backward")(*arguments)


def test_rejects_a_footprint_of_0() -> None:
    """A missing check would crash this process."""
    for operator in ON_CPU:
        with pytest.raises(RuntimeError, match="0x0 footprint does not fit"):
            computed(operator, sample(operator), Sizes(footprint=0))


@pytest.mark.every_isa
@every_operator
def test_nonfinite_inputs_give_nonfinite_results(operator: str) -> None:
    for value, (at, tensor) in itertools.product((math.nan, math.inf, -math.inf), enumerate(sample(operator))):
        tensors = sample(operator, dtype=torch.float32)
        tensors[at].view(-1)[tensor.numel() // 2] = value
        for got, want in zip(computed(operator, tensors, Sizes()), defined(operator, tensors, Sizes()), strict=True):
            lost = got.isfinite() & ~want.isfinite()
            assert not lost.any(), f"{value} in argument {at}: {int(lost.sum())} results are finite"


@pytest.mark.every_isa
@pytest.mark.parametrize("operator", ["attend_dot", "attend_patches"])
def test_nan_reaches_only_gradients_that_depend_on_it(operator: str) -> None:
    """The last vector of a row extends into the next row."""
    for sizes, at in itertools.product((Sizes(1, 33, 9, 3, 2, 2, 2, shares=3), Sizes(1, 9, 14, 5, 8, 1, 3)), range(4)):
        tensors = sample(operator, sizes, torch.float32)
        tensors[at].view(-1)[tensors[at].numel() // 2] = math.nan
        _, grads = differentiated(lambda t: computed(operator, t, sizes), tensors)  # noqa: B023
        _, want = differentiated(lambda t: defined(operator, t, sizes), tensors)  # noqa: B023
        for found, wanted in zip(grads, want, strict=True):
            assert torch.equal(found.isnan(), wanted.isnan()), (sizes, at)


@pytest.mark.every_isa
@every_operator
def test_nan_reaches_the_gradients(operator: str) -> None:
    for at in range(2):
        tensors = sample(operator, dtype=torch.float32)
        tensors[at].view(-1)[0] = float("nan")
        _, grads = differentiated(lambda t: computed(operator, t, Sizes()), tensors)
        assert not torch.stack([g.norm() for g in grads]).norm().isfinite()


def _slope(x: Tensor) -> Tensor:
    """Neighbors differ little, like the coordinates of a map."""
    return torch.linspace(-1, 1, x.shape[1]).view(1, -1, 1, 1).expand(x.shape).contiguous()


def _edges(x: Tensor) -> Tensor:
    """The first pixels of every fourth row differ from all others, so squared distances from them would cancel."""
    x = torch.zeros_like(x)
    x[:, ::4, :2] = 1
    return x


LARGE_MEANS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "of both": lambda x, y: (x + 1000, y + 1000),
    "of opposite signs": lambda x, y: (x + 1000, y - 1000),
    "of center": lambda x, y: (x - 1000, y),
    "slopes": lambda x, y: (_slope(x), _slope(y)),
    "edges": lambda x, y: (_edges(x), _edges(y)),
}


@pytest.mark.every_isa
@pytest.mark.parametrize("which", LARGE_MEANS)
def test_statistics_of_large_means(which: str) -> None:
    sizes = Sizes(batch=4, height=112, width=112)
    tensors = LARGE_MEANS[which](*sample("pair_statistics", sizes, torch.float32))
    mean, var = computed("pair_statistics", tensors, sizes)
    exact_mean, exact_var = defined("pair_statistics", tuple(x.double() for x in tensors), sizes)
    assert ((var - exact_var) / exact_var).abs().max() < 1e-5
    assert ((mean - exact_mean).abs() <= 1e-5 * exact_var.sqrt() + 1e-7 * exact_mean.abs()).all()


@pytest.mark.parametrize(("operator", "mean"), [("patch_statistics", 1e8), ("pair_statistics", 0.0)])
def test_statistics_of_large_means_in_float64(operator: str, mean: float) -> None:
    center, around = (x + 1e8 for x in sample(operator))
    found_mean, found_var = computed(operator, (center, around), Sizes())
    exact_mean, exact_var = defined(operator, (center - 1e8, around - 1e8), Sizes())
    torch.testing.assert_close((found_mean - mean, found_var), (exact_mean, exact_var), rtol=1e-6, atol=1e-7)


@pytest.mark.every_isa
def test_covariance_of_large_values() -> None:
    sizes = Sizes(batch=4, height=48, width=48, channels=6)
    center, around, norm = sample("pair_covariance", sizes, torch.float32)
    tensors = center, around, norm + torch.tensor([[0], [0], [1000]])
    mean, covariance = computed("pair_covariance", tensors, sizes)
    exact_mean, exact_covariance = defined("pair_covariance", tuple(x.double() for x in tensors), sizes)
    assert_near((mean, covariance), (exact_mean, exact_covariance), 2e-5)


@pytest.mark.every_isa
@pytest.mark.parametrize("times", [1e3, 1e4, 1e20, 1e30], ids=str)
@pytest.mark.parametrize(("operator", "factor"), [("attend_pairs", 5), ("attend_dot", 0)])
def test_extreme_logits_do_not_overflow(operator: str, factor: int, times: float) -> None:
    arguments = [*sample(operator, dtype=torch.float32)]
    arguments[factor] *= times
    got, grads = differentiated(lambda t: computed(operator, t, Sizes()), tuple(arguments))
    want, want_grads = differentiated(lambda t: defined(operator, t, Sizes()), tuple(x.double() for x in arguments))
    assert_near(got, want, 1e-3)
    if times == 1e3:  # one position has nearly all the weight
        assert_near(grads, want_grads, 1e-2)
