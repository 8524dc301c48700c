"""BatchNorm and ReLU in one operator, with or without a residual between them.

Results, gradients, registration, reproducibility and extreme values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import batch_norm

from san.ops import fused
from tests.ops.cases import Tensors, assert_near, cotangents, differentiated
from tests.ops.threads import assert_same_bits_with_any_number_of_threads

# One pixel per row of the kernel or many, whole rows or not, and several tasks.
SHAPES = [(2, 5, 3, 4), (1, 64, 5, 5), (3, 100, 7, 7), (2, 1, 9, 8), (2, 2048, 3, 3), (4, 32, 64, 65)]
both_statistics = pytest.mark.parametrize("of_batch", [True, False], ids=["of the batch", "running"])
both_operators = pytest.mark.parametrize("adds", [False, True], ids=["norm_relu", "norm_add_relu"])
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def sample(shape: tuple[int, ...] = SHAPES[0], of_batch: bool = True, mean: float = 0.5, adds: bool = False) -> Inputs:
    """x [N, C, H, W], weight, bias, running statistics unless the batch's are used, and a residual if one is added."""
    generator = torch.Generator().manual_seed(0)
    C = shape[1]
    x_NCHW = (torch.randn(shape, generator=generator) + mean).contiguous(memory_format=torch.channels_last)
    weight, bias, running_mean = torch.randn(3, C, generator=generator)
    running_var = 0.5 + torch.rand(C, generator=generator)
    running = (None, None) if of_batch else (running_mean + mean, running_var)
    return x_NCHW, weight, bias, *running, torch.randn(shape, generator=generator).to(x_NCHW) if adds else None


def reference(
    x_NCHW: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, residual_NCHW: Tensor | None
) -> Tensor:
    y_NCHW = batch_norm(x_NCHW, mean, var, weight, bias, mean is None, eps=1e-5)
    return (y_NCHW if residual_NCHW is None else y_NCHW + residual_NCHW).relu()


def computed(
    x_NCHW: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, residual_NCHW: Tensor | None
) -> Tensor:
    return fused.norm_relu(x_NCHW, weight, bias, mean, var, 1e-5, residual_NCHW)[0]


def results(function: Callable[..., Tensor], inputs: Inputs) -> Tensors:
    """The result and the gradients of x, weight, bias and the residual, if there is one."""
    wanted = *inputs[:3], *(x for x in inputs[5:] if x is not None)
    outputs, grads = differentiated(
        lambda leaves: (function(*leaves[:3], *inputs[3:5], leaves[3] if leaves[3:] else None),), wanted
    )
    return *outputs, *grads


def doubled(inputs: Inputs) -> Inputs:
    return tuple(x if x is None else x.double() for x in inputs)  # type: ignore[return-value]


@pytest.mark.every_isa
@both_operators
@both_statistics
def test_matches_torch(of_batch: bool, adds: bool) -> None:
    for shape in SHAPES:
        inputs = sample(shape, of_batch, adds=adds)
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
    x_NCHW, weight, bias, *_ = sample((2, 70, 9, 9), mean=1e4)
    _, mean, var = fused.norm_relu(x_NCHW, weight, bias, None, None, 1e-5)
    exact = x_NCHW.double()
    torch.testing.assert_close(mean, exact.mean((0, 2, 3)), rtol=1e-11, atol=0)
    torch.testing.assert_close(var, exact.var((0, 2, 3), correction=0), rtol=1e-6, atol=0)


def test_constant_channels_have_no_variance() -> None:
    x_NCHW = torch.full((2, 3, 5, 5), 123456.7).contiguous(memory_format=torch.channels_last)
    assert (fused.norm_relu(x_NCHW, torch.ones(3), torch.ones(3), None, None, 1e-5)[2] == 0).all()


@both_operators
@both_statistics
def test_opcheck(of_batch: bool, adds: bool) -> None:
    x_NCHW, *vectors, residual_NCHW = sample(of_batch=of_batch, adds=adds)
    for x_NHWC in (x_NCHW.permute(0, 2, 3, 1), x_NCHW.contiguous().permute(0, 2, 3, 1)):
        maps = (x_NHWC,) if residual_NCHW is None else (x_NHWC, residual_NCHW.permute(0, 2, 3, 1))
        name = "norm_add_relu" if adds else "norm_relu"
        forward, backward = (getattr(torch.ops.san, f"{name}{suffix}").default for suffix in ("", "_backward"))
        running = {id(x) for x in vectors[2:]}
        leaves = [x if x is None else x.detach().requires_grad_(id(x) not in running) for x in (*maps, *vectors)]
        torch.library.opcheck(forward, (*leaves, 1e-5))
        y_NHWC, mean, var = forward(*maps, *vectors, 1e-5)
        saved = (x_NHWC, y_NHWC) if adds else (x_NHWC,)
        arguments = (y_NHWC, *saved, vectors[0], vectors[1], mean, var, 1e-5, of_batch)
        torch.library.opcheck(backward, arguments)
        if not adds:
            torch.library.opcheck(backward, (*arguments, x_NHWC))


@both_operators
@both_statistics
def test_gradients_can_be_differentiated(of_batch: bool, adds: bool) -> None:
    def penalty(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (*inputs[:3], inputs[5]) if x is not None]
        y_NCHW = function(*leaves[:3], *inputs[3:5], leaves[3] if adds else None)
        grads = torch.autograd.grad(y_NCHW.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), leaves)

    inputs = sample((2, 5, 6, 6), of_batch, adds=adds)
    with pytest.warns(UserWarning, match="create_graph"):
        got = penalty(computed, inputs)
    assert_near(got, penalty(reference, doubled(inputs)), 1e-4)


@both_operators
def test_same_bits_with_any_number_of_threads(adds: bool) -> None:
    for shape in SHAPES:
        inputs = sample(shape, adds=adds)
        assert_same_bits_with_any_number_of_threads(lambda: results(computed, inputs), shape)  # noqa: B023


@pytest.mark.every_isa
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30], ids=str)
@both_operators
@both_statistics
def test_extreme_pixels_act_as_in_torch(value: float, of_batch: bool, adds: bool) -> None:
    for pixel in (0, 3):
        inputs = sample(of_batch=of_batch, adds=adds)
        inputs[0][0, 1, 0, pixel] = value
        got, want = results(computed, inputs), results(reference, doubled(inputs))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_noncontiguous_gradient() -> None:
    x_NCHW, weight, bias, *_ = sample()
    leaf = x_NCHW.requires_grad_()
    y_NCHW = computed(leaf, weight, bias, None, None, None)
    grad = torch.ones(()).expand(y_NCHW.shape)
    got, want = (torch.autograd.grad(y_NCHW, leaf, g, retain_graph=True)[0] for g in (grad, grad.contiguous()))
    assert torch.equal(got, want)


def test_rejects_vectors_of_the_wrong_size() -> None:
    x_NCHW, weight, bias, *_ = sample()
    for wrong in ((x_NCHW.double(), weight, bias), (x_NCHW, weight[1:], bias), (x_NCHW, weight, bias[None])):
        with pytest.raises(RuntimeError, match="x must be a float32 map"):
            fused.norm_relu(*wrong, None, None, 1e-5)
    with pytest.raises(RuntimeError, match="residual and x must have the same shape"):
        fused.norm_relu(x_NCHW, weight, bias, None, None, 1e-5, x_NCHW[:1])


def test_keeps_the_result_instead_of_the_residual() -> None:
    x_NCHW, weight, bias, _, _, residual_NCHW = sample(adds=True)
    assert residual_NCHW is not None
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        y_NCHW = computed(x_NCHW.requires_grad_(), weight, bias, None, None, residual_NCHW)
    places = {x.data_ptr() for x in kept}
    assert y_NCHW.data_ptr() in places
    assert residual_NCHW.data_ptr() not in places


def branch_of(x_NCHW: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x and norm_relu(x), for float64 as torch computes them."""
    if x_NCHW.dtype == torch.float64:
        return x_NCHW, reference(x_NCHW, weight, bias, None, None, None)
    return fused.norm_relu_branch(x_NCHW, weight, bias, None, None, 1e-5)[:2]


def gradients_of_branch(inputs: Tensors, uses: str) -> Tensors:
    """Those of x, weight and bias if the results of `norm_relu_branch` named in `uses` are used."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    x_NCHW, y_NCHW = branch_of(*leaves)
    used = [x for name, x in (("x", x_NCHW), ("y", y_NCHW)) if name in uses]
    return torch.autograd.grad(used, leaves, cotangents(tuple(used)), allow_unused=True, materialize_grads=True)


@pytest.mark.every_isa
@pytest.mark.parametrize("uses", ["xy", "x", "y"])
def test_gradients_of_a_residual_branch_are_added(uses: str) -> None:
    for shape in SHAPES:
        inputs = sample(shape)[:3]
        want = gradients_of_branch(tuple(x.double() for x in inputs), uses)
        assert_near(gradients_of_branch(inputs, uses), want, 2e-6, shape)


def test_a_residual_branch_does_not_copy_its_input() -> None:
    x_NCHW, weight, bias, *_ = sample()
    same_NCHW, *_ = fused.norm_relu_branch(x_NCHW.requires_grad_(), weight, bias, None, None, 1e-5)
    assert same_NCHW.data_ptr() == x_NCHW.data_ptr()
    assert same_NCHW.stride() == x_NCHW.stride()


@pytest.mark.parametrize("first", [0, 1], ids=["all", "parameters"])
def test_gradients_of_a_residual_branch_can_be_differentiated(first: int) -> None:
    def penalty(*inputs: Tensor) -> Tensors:
        x_NCHW, weight, bias = (x.detach().requires_grad_(at >= first) for at, x in enumerate(inputs))
        leaves = [x_NCHW, weight, bias][first:]
        x_NCHW, y_NCHW = branch_of(x_NCHW, weight, bias)
        grads = torch.autograd.grad((x_NCHW * y_NCHW).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), leaves)

    inputs = sample((2, 5, 6, 6))[:3]
    with pytest.warns(UserWarning, match="create_graph"):
        got = penalty(*inputs)
    assert_near(got, penalty(*(x.double() for x in inputs)), 1e-4)


def on_gpu(shim: Any, inputs: Inputs, added: bool = False) -> Tensors:
    """As `results`, by the CUDA sources; with `added`, the gradient of x contains x itself."""
    x_NCHW, weight, bias, *running, residual_NCHW = inputs
    x_NHWC, statistics = x_NCHW.permute(0, 2, 3, 1), (1e-5, running[0] is None)
    residual_NHWC = None if residual_NCHW is None else residual_NCHW.permute(0, 2, 3, 1)
    if residual_NHWC is None:
        y_NHWC, mean, var = shim.norm_relu(x_NHWC, weight, bias, *running, 1e-5)
    else:
        y_NHWC, mean, var = shim.norm_add_relu(x_NHWC, residual_NHWC, weight, bias, *running, 1e-5)
    (grad_NCHW,) = cotangents((y_NHWC.permute(0, 3, 1, 2),))
    grad_NHWC, vectors = grad_NCHW.to(x_NHWC.dtype).permute(0, 2, 3, 1), (weight, bias, mean, var, *statistics)
    if residual_NHWC is None:
        of_x, *others = shim.norm_relu_backward(grad_NHWC, x_NHWC, *vectors, x_NHWC if added else None)
    else:
        of_x, of_residual, *others = shim.norm_add_relu_backward(grad_NHWC, x_NHWC, y_NHWC, *vectors)
        others.append(of_residual.permute(0, 3, 1, 2))
    return y_NHWC.permute(0, 3, 1, 2), of_x.permute(0, 3, 1, 2), *others


@pytest.mark.parametrize("mean", [0.5, 1e4], ids=str)
@both_operators
@both_statistics
def test_gpu_matches_torch(of_batch: bool, adds: bool, mean: float, shim: Any) -> None:
    for shape in SHAPES:
        inputs = sample(shape, of_batch, mean, adds)
        assert_near(on_gpu(shim, inputs), results(reference, doubled(inputs)), 2e-6, shape)


def test_gpu_adds_the_gradient_of_a_residual_branch(shim: Any) -> None:
    for shape in SHAPES:
        inputs = sample(shape)
        y_NCHW, of_x_NCHW, *others = results(reference, doubled(inputs))
        assert_near(on_gpu(shim, inputs, added=True), (y_NCHW, of_x_NCHW + inputs[0], *others), 2e-6, shape)


@both_operators
@both_statistics
def test_gpu_takes_bfloat16_maps(of_batch: bool, adds: bool, shim: Any) -> None:
    for shape in SHAPES:
        x_NCHW, *others, residual_NCHW = sample(shape, of_batch, adds=adds)
        rounded = None if residual_NCHW is None else residual_NCHW.bfloat16()
        inputs: Inputs = (x_NCHW.bfloat16(), *others, rounded)  # type: ignore[assignment]
        got, want = on_gpu(shim, inputs), results(lambda *x: reference(*x).bfloat16(), doubled(inputs))
        assert [x.dtype for x in got] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * adds
        assert_near(got, want, 5e-3, shape)
        assert_near(got[2:4], want[2:4], 1e-5, shape)


def test_gpu_statistics_with_an_outlier_in_the_first_pixel(shim: Any) -> None:
    x_NCHW, weight, bias, *_ = sample((2, 8, 9, 9))
    x_NCHW[0, :, 0, 0] = 1e5
    _, mean, var = shim.norm_relu(x_NCHW.permute(0, 2, 3, 1), weight, bias, None, None, 1e-5)
    exact = x_NCHW.double()
    torch.testing.assert_close(mean, exact.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(var, exact.var((0, 2, 3), correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e15], ids=str)
@both_operators
@both_statistics
def test_gpu_treats_extreme_pixels_as_torch_does(value: float, of_batch: bool, adds: bool, shim: Any) -> None:
    for pixel in (0, 3):
        inputs = sample(of_batch=of_batch, adds=adds)
        inputs[0][0, 1, 0, pixel] = value
        for a, b in zip(on_gpu(shim, inputs), results(reference, doubled(inputs)), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, equal_nan=True)


@both_operators
def test_order_of_gpu_blocks_does_not_change_bits(adds: bool, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = sample((3, 100, 7, 7), adds=adds)
    first = on_gpu(shim, inputs)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    assert all(map(torch.equal, first, on_gpu(shim, inputs)))


def test_gpu_accepts_empty_and_unaligned_maps(shim: Any) -> None:
    x_NCHW, weight, bias, *_ = sample((2, 8, 3, 4))
    unaligned = torch.empty(x_NCHW.numel() + 1)[1:].view(2, 3, 4, 8).permute(0, 3, 1, 2).copy_(x_NCHW)
    got, want = (on_gpu(shim, (x_NCHW, weight, bias, None, None, x)) for x in (unaligned, x_NCHW))
    assert_near(got, tuple(x.double() for x in want), 1e-6)
    got, want = (on_gpu(shim, (x, weight, bias, None, None, None)) for x in (unaligned, x_NCHW))
    assert_near(got, tuple(x.double() for x in want), 1e-6)
    empty_NCHW = x_NCHW[:0]
    assert [len(x) for x in on_gpu(shim, (empty_NCHW, weight, bias, None, None, None))] == [0, 0, 8, 8]
    assert [len(x) for x in on_gpu(shim, (empty_NCHW, weight, bias, None, None, empty_NCHW))] == [0, 0, 8, 8, 0]


def test_gpu_rejects_other_types_and_sizes(shim: Any) -> None:
    x_NHWC, weight, bias = torch.ones(2, 3, 4, 8), torch.ones(8), torch.ones(8)
    for wrong in ((x_NHWC.double(), weight, bias), (x_NHWC.half(), weight, bias), (x_NHWC, weight[1:], bias)):
        with pytest.raises(RuntimeError, match="x must be a float32 or bfloat16 map"):
            shim.norm_relu(*wrong, None, None, 1e-5)
