"""2x2 max pooling, alone and in the operator of SAN's stem: results, gradients, registration, same bits, extreme values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from san.ops import fused, fused_reference
from tests.ops.cases import Tensors, assert_near, cotangents, differentiated
from tests.ops.threads import assert_same_bits_with_any_number_of_threads

# Images, channels, height, width: odd sizes, several tasks, few channels and many.
SHAPES = [(2, 5, 4, 6), (3, 32, 9, 7), (2, 64, 48, 50), (1, 100, 2, 2), (2, 8, 3, 2)]
INPUTS = range(1, 6)
"""Channels of images."""
Stem = tuple[Tensor, Tensor, Tensor]


def a_map(shape: tuple[int, ...] = SHAPES[1]) -> Tensor:
    """A channels-last map with many equal values."""
    x_NCHW = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def a_stem(inputs: int = 4, shape: tuple[int, ...] = SHAPES[1]) -> Stem:
    """Weight [C, c], bias [C] and images [N, c, H, W]."""
    generator = torch.Generator().manual_seed(1)
    N, C, H, W = shape
    x_NcHW = torch.randn(N, inputs, H, W, generator=generator).contiguous(memory_format=torch.channels_last)
    return torch.randn(C, inputs, generator=generator), torch.randn(C, generator=generator), x_NcHW


def pooled(x_NCHW: Tensor) -> Tensors:
    """The result and the gradient of torch's pooling."""
    (y,), grads = differentiated(lambda leaves: (max_pool2d(leaves[0], 2),), (x_NCHW,))
    return y, *grads


def defined(weight_Cc: Tensor, bias_C: Tensor, x_NcHW: Tensor) -> Tensor:
    return fused_reference.stem(weight_Cc, bias_C, x_NcHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def stem_results(stem: Stem, exact: bool = False) -> Tensors:
    """The result and the gradients of weight and bias, by the operator or by its definition in float64."""
    weight, bias, x_NcHW = (x.double() for x in stem) if exact else stem
    run: Callable[..., Tensor] = defined if exact else fused.stem
    outputs, grads = differentiated(lambda leaves: (run(*leaves, x_NcHW),), (weight, bias))
    return *outputs, *grads


def pooled_on_gpu(kernels: Any, x_NCHW: Tensor) -> Tensors:
    """As `pooled`, by the kernels of a GPU."""
    y_NHWC, index = kernels.max_pool(x_NCHW.permute(0, 2, 3, 1))
    (grad_NCHW,) = cotangents((y_NHWC.permute(0, 3, 1, 2),))
    grad_NHWC = grad_NCHW.to(x_NCHW.dtype).permute(0, 2, 3, 1)
    of_x = kernels.max_pool_backward(grad_NHWC, index, *x_NCHW.shape[2:])
    return y_NHWC.permute(0, 3, 1, 2), of_x.permute(0, 3, 1, 2)


def stem_on_gpu(kernels: Any, stem: Stem, half: bool = False) -> Tensors:
    """As `stem_results`, by the kernels of a GPU."""
    weight, bias, x_NcHW = stem
    x_NHWc = x_NcHW.permute(0, 2, 3, 1)
    y_NHWC, index = kernels.stem(weight, bias, x_NHWc, half)
    (grad_NCHW,) = cotangents((y_NHWC.permute(0, 3, 1, 2),))
    grads = kernels.stem_backward(grad_NCHW.to(y_NHWC.dtype).permute(0, 2, 3, 1), index, x_NHWc)
    return y_NHWC.permute(0, 3, 1, 2), *grads


@pytest.mark.every_isa
def test_max_pool_is_that_of_torch() -> None:
    for shape in SHAPES:
        x_NCHW = a_map(shape)
        (y,), grads = differentiated(lambda leaves: (fused.max_pool(leaves[0]),), (x_NCHW,))
        for got, want in zip((y, *grads), pooled(x_NCHW), strict=True):
            assert torch.equal(got, want), shape


@pytest.mark.every_isa
@pytest.mark.parametrize("inputs", INPUTS)
def test_stem_matches_its_definition(inputs: int) -> None:
    for shape in SHAPES:
        stem = a_stem(inputs, shape)
        assert_near(stem_results(stem), stem_results(stem, exact=True), 1e-6, shape)


@pytest.mark.every_isa
def test_every_place_of_a_nan_or_infinity_acts_as_in_torch() -> None:
    for value, place in ((v, p) for v in (math.nan, math.inf, -math.inf) for p in range(4)):
        x_NCHW = a_map((1, 3, 4, 4))
        x_NCHW[:, 1, place // 2, place % 2] = value
        (y,), grads = differentiated(lambda leaves: (fused.max_pool(leaves[0]),), (x_NCHW,))
        torch.testing.assert_close((y, *grads), pooled(x_NCHW), rtol=0, atol=0, equal_nan=True)
        weight, bias, x_NcHW = a_stem(3, (1, 8, 4, 4))
        x_NcHW[:, 1, place // 2, place % 2] = value
        for got, want in zip(*(stem_results((weight, bias, x_NcHW), exact) for exact in (False, True)), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_opcheck() -> None:
    for shape in SHAPES[:2]:
        x_NHWC = a_map(shape).permute(0, 2, 3, 1)
        torch.library.opcheck(torch.ops.san.max_pool.default, (x_NHWC.detach().requires_grad_(),))
        y_NHWC, index = torch.ops.san.max_pool(x_NHWC)
        torch.library.opcheck(torch.ops.san.max_pool_backward.default, (y_NHWC, index, *x_NHWC.shape[1:3]))
        weight, bias, x_NcHW = a_stem(3, shape)
        x_NHWc = x_NcHW.permute(0, 2, 3, 1)
        torch.library.opcheck(torch.ops.san.stem.default, (weight.requires_grad_(), bias.requires_grad_(), x_NHWc, False))
        y_NHWC, index = torch.ops.san.stem(weight.detach(), bias.detach(), x_NHWc, False)
        torch.library.opcheck(torch.ops.san.stem_backward.default, (y_NHWC, index, x_NHWc))


def test_gradients_can_be_differentiated() -> None:
    weight, bias, x_NcHW = a_stem(3, (2, 6, 8, 8))

    def penalty(run: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in (weight, bias)]
        y = run(*leaves, x_NcHW.to(dtype))
        grads = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), leaves)

    with pytest.warns(UserWarning, match="create_graph"):
        got = penalty(lambda *leaves: fused.max_pool(fused.stem(*leaves)), torch.float32)
    assert_near(got, penalty(lambda *leaves: max_pool2d(defined(*leaves), 2), torch.float64), 1e-5)


def test_gradients_of_images_are_refused() -> None:
    weight, bias, x_NcHW = a_stem()
    y_NCHW = fused.stem(weight, bias, x_NcHW.requires_grad_())
    with pytest.raises(RuntimeError, match="gradients of its first 2 inputs only"):
        y_NCHW.sum().backward()


def test_same_bits_with_any_number_of_threads() -> None:
    for shape in SHAPES:
        assert_same_bits_with_any_number_of_threads(lambda: stem_results(a_stem(4, shape)), shape)  # noqa: B023


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_other_types_and_sizes_are_refused(where: str, shim: Any) -> None:
    kernels = torch.ops.san if where == "cpu" else shim
    x_NHWC, index = torch.ones(1, 4, 4, 3), torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    weight, bias, grad = torch.ones(8, 3), torch.ones(8), torch.ones(1, 2, 2, 3)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: kernels.max_pool(x_NHWC.double()), "x must be a float32"),
        (lambda: kernels.max_pool(x_NHWC[0]), "x must be a float32"),
        (lambda: kernels.max_pool(x_NHWC[:, :1]), "1x4 pixels is too small"),
        (lambda: kernels.stem(weight, bias, x_NHWC[:, :, :1], False), "4x1 pixels is too small"),
        (lambda: kernels.stem_backward(grad, index, x_NHWC.expand(9, 4, 4, 3)), "one batch size"),
        (lambda: kernels.max_pool_backward(grad, index, 6, 4), r"grad must be \[N, 3, 2, C\]"),
        (lambda: kernels.max_pool_backward(grad, index[:, :1], 4, 4), "index must be uint8"),
        (lambda: kernels.max_pool_backward(grad, grad, 4, 4), "index must be uint8"),
        (lambda: kernels.stem(weight, bias, torch.ones(1, 4, 4, 6), False), "1 to 5 channels"),
        (lambda: kernels.stem(weight, bias[1:], x_NHWC, False), "weight must be"),
        (lambda: kernels.stem(weight.double(), bias, x_NHWC, False), "weight and x must have the same dtype"),
        (lambda: kernels.stem_backward(grad, index, x_NHWC.double()), "x must be float32 images"),
    ]
    for call, message in calls:
        with pytest.raises(RuntimeError, match=message):
            call()


def test_gpu_max_pool_is_that_of_torch(shim: Any) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x_NCHW = a_map(shape).to(dtype)
            for got, want in zip(pooled_on_gpu(shim, x_NCHW), pooled(x_NCHW.double()), strict=True):
                assert_near((got,), (want,), 1e-7 if dtype == torch.float32 else 4e-3, shape)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_gpu_stem_matches_its_definition(inputs: int, half: bool, shim: Any) -> None:
    for shape in SHAPES:
        stem = a_stem(inputs, shape)
        got = stem_on_gpu(shim, stem, half)
        assert got[0].dtype == (torch.bfloat16 if half else torch.float32)
        assert_near(got, stem_results(stem, exact=True), 5e-3 if half else 1e-6, shape)


def test_gpu_keeps_nan_as_torch_does(shim: Any) -> None:
    for place in range(4):
        x_NCHW = a_map((1, 4, 4, 4))
        x_NCHW[:, 1, place // 2, place % 2] = math.nan
        torch.testing.assert_close(pooled_on_gpu(shim, x_NCHW), pooled(x_NCHW), rtol=0, atol=0, equal_nan=True)


def test_order_of_gpu_blocks_does_not_change_bits(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stem, x_NCHW = a_stem(), a_map()
    first = (*stem_on_gpu(shim, stem), *pooled_on_gpu(shim, x_NCHW))
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    assert all(map(torch.equal, first, (*stem_on_gpu(shim, stem), *pooled_on_gpu(shim, x_NCHW))))


def test_gpu_accepts_empty_and_unaligned_maps(shim: Any) -> None:
    x_NCHW = a_map((2, 8, 4, 6))
    unaligned = torch.empty(x_NCHW.numel() + 1)[1:].view(2, 4, 6, 8).permute(0, 3, 1, 2).copy_(x_NCHW)
    assert all(map(torch.equal, pooled_on_gpu(shim, unaligned), pooled_on_gpu(shim, x_NCHW)))
    assert [x.numel() for x in pooled_on_gpu(shim, x_NCHW[:0])] == [0, 0]
    weight, bias, x_NcHW = a_stem()
    assert [x.abs().sum() for x in stem_on_gpu(shim, (weight, bias, x_NcHW[:0]))] == [0, 0, 0]
    empty = fused.stem(weight.requires_grad_(), bias, x_NcHW[:0])
    assert not torch.autograd.grad(empty.sum(), weight)[0].any()
