"""BatchNorm and ReLU in one operator on the CPU: results, gradients, registration, reproducibility, extreme values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from san.ops import fused
from tests.ops.cases import Tensors, assert_near, differentiated
from tests.ops.threads import assert_same_bits_with_any_number_of_threads

# One pixel per row of the kernel or many, whole rows or not, and several tasks.
SHAPES = [(2, 5, 3, 4), (1, 64, 5, 5), (3, 100, 7, 7), (2, 1, 9, 8), (2, 2048, 3, 3), (4, 32, 64, 65)]
both_statistics = pytest.mark.parametrize("of_batch", [True, False], ids=["of the batch", "running"])
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def sample(shape: tuple[int, ...] = SHAPES[0], of_batch: bool = True, mean: float = 0.5) -> Inputs:
    """x [N, C, H, W], weight, bias, and running statistics unless the batch's are used."""
    generator = torch.Generator().manual_seed(0)
    C = shape[1]
    x_NCHW = (torch.randn(shape, generator=generator) + mean).contiguous(memory_format=torch.channels_last)
    weight, bias, running_mean = torch.randn(3, C, generator=generator)
    running_var = 0.5 + torch.rand(C, generator=generator)
    return x_NCHW, weight, bias, *((None, None) if of_batch else (running_mean + mean, running_var))


def reference(x_NCHW: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None) -> Tensor:
    return batch_norm(x_NCHW, mean, var, weight, bias, mean is None, eps=1e-5).relu()


def computed(*inputs: Tensor | None) -> Tensor:
    return fused.norm_relu(*inputs, 1e-5)[0]  # type: ignore[arg-type]


def results(function: Callable[..., Tensor], inputs: Inputs) -> Tensors:
    """The result and the gradients of x, weight and bias."""
    outputs, grads = differentiated(lambda leaves: (function(*leaves, *inputs[3:]),), inputs[:3])
    return *outputs, *grads


def doubled(inputs: Inputs) -> Inputs:
    return tuple(x if x is None else x.double() for x in inputs)  # type: ignore[return-value]


@pytest.mark.every_isa
@both_statistics
def test_matches_torch(of_batch: bool) -> None:
    for shape in SHAPES:
        inputs = sample(shape, of_batch)
        assert_near(results(computed, inputs), results(reference, doubled(inputs)), 2e-6, shape)


@pytest.mark.every_isa
@pytest.mark.parametrize("mean", [1e3, 1e4], ids=str)
@both_statistics
def test_large_means(mean: float, of_batch: bool) -> None:
    inputs = sample((4, 32, 64, 65), of_batch, mean)
    got, want = results(computed, inputs), results(reference, doubled(inputs))
    signs = (got[0] > 0) != (want[0] > 0)  # values next to 0 may be rounded to its other side
    assert_near(got[:1], want[:1], 2e-6)
    assert signs.float().mean() < 1e-5
    assert_near(got[1:], want[1:], 5e-3 if signs.any() else 2e-5)


@pytest.mark.every_isa
def test_returns_the_statistics() -> None:
    x_NCHW, weight, bias, _, _ = sample((2, 70, 9, 9), mean=1e4)
    _, mean, var = fused.norm_relu(x_NCHW, weight, bias, None, None, 1e-5)
    exact = x_NCHW.double()
    torch.testing.assert_close(mean, exact.mean((0, 2, 3)), rtol=1e-11, atol=0)
    torch.testing.assert_close(var, exact.var((0, 2, 3), correction=0), rtol=1e-6, atol=0)


def test_constant_channels_have_no_variance() -> None:
    x_NCHW = torch.full((2, 3, 5, 5), 123456.7).contiguous(memory_format=torch.channels_last)
    assert (fused.norm_relu(x_NCHW, torch.ones(3), torch.ones(3), None, None, 1e-5)[2] == 0).all()


@both_statistics
def test_opcheck(of_batch: bool) -> None:
    x_NCHW, *vectors = sample(of_batch=of_batch)
    for x_NHWC in (x_NCHW.permute(0, 2, 3, 1), x_NCHW.contiguous().permute(0, 2, 3, 1)):
        leaves = [x if x is None else x.detach().requires_grad_(i < 3) for i, x in enumerate((x_NHWC, *vectors))]
        torch.library.opcheck(torch.ops.san.norm_relu.default, (*leaves, 1e-5))
        y_NHWC, mean, var = torch.ops.san.norm_relu(x_NHWC, *vectors, 1e-5)
        arguments = (y_NHWC, x_NHWC, vectors[0], vectors[1], mean, var, 1e-5, of_batch)
        torch.library.opcheck(torch.ops.san.norm_relu_backward.default, arguments)


@both_statistics
def test_gradients_can_be_differentiated(of_batch: bool) -> None:
    def penalty(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:3] if x is not None]
        y_NCHW = function(*leaves, *inputs[3:])
        grads = torch.autograd.grad(y_NCHW.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    inputs = sample((2, 5, 6, 6), of_batch)
    with pytest.warns(UserWarning, match="create_graph"):
        got = penalty(computed, inputs)
    assert_near(got, penalty(reference, doubled(inputs)), 1e-4)


def test_same_bits_with_any_number_of_threads() -> None:
    for shape in SHAPES:
        assert_same_bits_with_any_number_of_threads(lambda: results(computed, sample(shape)), shape)  # noqa: B023


@pytest.mark.every_isa
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30], ids=str)
@both_statistics
def test_extreme_pixels_act_as_in_torch(value: float, of_batch: bool) -> None:
    for pixel in (0, 3):
        inputs = sample(of_batch=of_batch)
        inputs[0][0, 1, 0, pixel] = value
        got, want = results(computed, inputs), results(reference, doubled(inputs))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_noncontiguous_gradient() -> None:
    x_NCHW, weight, bias, *_ = sample()
    leaf = x_NCHW.requires_grad_()
    y_NCHW = computed(leaf, weight, bias, None, None)
    grad = torch.ones(()).expand(y_NCHW.shape)
    got, want = (torch.autograd.grad(y_NCHW, leaf, g, retain_graph=True)[0] for g in (grad, grad.contiguous()))
    assert torch.equal(got, want)


def test_rejects_vectors_of_the_wrong_size() -> None:
    x_NCHW, weight, bias, _, _ = sample()
    for wrong in ((x_NCHW.double(), weight, bias), (x_NCHW, weight[1:], bias), (x_NCHW, weight, bias[None])):
        with pytest.raises(RuntimeError, match="x must be a float32 map"):
            fused.norm_relu(*wrong, None, None, 1e-5)
