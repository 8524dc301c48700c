"""The CUDA sources of fused operators and of aggregation, run on the CPU through the shim."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode  # torch has no public name for it

from san.ops import fused_reference, reference
from tests.ops.cases import (
    ATTENDING,
    ON_GPU,
    PRODUCTS,
    SIZES,
    STAGE_5,
    Sizes,
    Tensors,
    assert_near,
    backward_arguments,
    computed,
    cotangents,
    defined,
    differentiated,
    error,
    run_kernels,
    sample,
    with_half_weights,
    with_saved,
)
from tests.ops.operators import cotangent, gradients, stored_by_pixels

every_operator = pytest.mark.parametrize("operator", ON_GPU)
# GPUs run differences with a hidden layer, and at most eight values share a weight.
SUPPORTED = [replace(sizes, products=0, hidden=sizes.hidden or 7, shares=min(sizes.shares, 8)) for sizes in SIZES]
SMALL = [sizes for sizes in SUPPORTED if sizes.width < 60 and sizes.footprint < 9 and sizes.channels < STAGE_5.channels]
WEIGHTED = [operator for operator in PRODUCTS if operator != "attend_patches"]


def wanted(operator: str, tensors: Tensors, sizes: Sizes) -> Tensors:
    return sum(differentiated(lambda t: defined(operator, t, sizes), tensors), ())


def assert_matches_the_definition(operator: str, sizes: Sizes, shim: Any) -> None:
    tensors = sample(operator, sizes)
    got = run_kernels(operator, tuple(x.float() for x in tensors), sizes, shim)
    # With a footprint of one pixel, the gradients of the logits are differences of two equal numbers, computed differently.
    allowed = 1e-3 if operator in ATTENDING and sizes.footprint == 1 else 2e-5
    assert_near(got, wanted(operator, tensors, sizes), allowed, sizes)


@every_operator
def test_matches_the_definition(operator: str, shim: Any) -> None:
    for sizes in SMALL:
        assert_matches_the_definition(operator, sizes, shim)


@pytest.mark.slow
@every_operator
def test_matches_the_definition_with_the_channels_of_the_last_stage(operator: str, shim: Any) -> None:
    assert_matches_the_definition(operator, replace(STAGE_5, height=4, width=4), shim)


@pytest.mark.parametrize("operator", PRODUCTS)
def test_uses_tf32_if_allowed(operator: str, shim: Any) -> None:
    for sizes in SMALL[:4]:
        exact = sample(operator, sizes)
        tensors, want = tuple(x.float() for x in exact), wanted(operator, exact, sizes)
        got, accurate = run_kernels(operator, tensors, sizes, shim, tf32=True), run_kernels(operator, tensors, sizes, shim)
        assert 10 * error(accurate[0], want[0]) < error(got[0], want[0]) <= 3e-3, sizes
        assert_near(got, want, 0.15, sizes)  # with so few pixels, each ReLU that rounding flips changes the gradients


@pytest.mark.parametrize("operator", WEIGHTED)
def test_half_weights(operator: str, shim: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for sizes in SMALL[:3]:
            tensors, rounded = with_half_weights(operator, sample(operator, sizes), dtype)
            got, want = run_kernels(operator, tensors, sizes, shim), wanted(operator, rounded, sizes)
            assert [x.dtype for x in got[1:]] == [x.dtype for x in tensors]
            assert error(got[0], want[0]) <= max(5e-3, torch.finfo(dtype).eps), (dtype, sizes)
            assert_near(got[1:], want[1:], 0.2, (dtype, sizes))


@every_operator
def test_runs_alike_inside_an_autocast_block(operator: str, shim: Any) -> None:
    """Also backward, because autograd's threads take over the block around `backward()`."""
    tensors = sample(operator, SMALL[0], torch.float32)
    plain = run_kernels(operator, tensors, SMALL[0], shim)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, plain, run_kernels(operator, tensors, SMALL[0], shim)))


def test_half_values_allow_tf32_in_products(shim: Any) -> None:
    """Factors in bfloat16 would be less exact than in TF32, which is three times as fast as float32 on a GPU."""
    tensors, _ = with_half_weights("attend_pairs_of_batch", sample("attend_pairs_of_batch"), torch.bfloat16)
    accurate, fast = (run_kernels("attend_pairs_of_batch", tensors, Sizes(), shim, tf32) for tf32 in (False, True))
    assert all(map(torch.equal, accurate, fast))


def test_values_with_a_large_mean_in_half_types(shim: Any) -> None:
    """The result of the forward pass is rounded to the type of the values, which must not bias the gradients."""
    sizes = Sizes(2, 9, 9, 7, 18, 16, 8, shares=8)
    exact = sample("attend_pairs", sizes)
    *others, beta = with_half_weights("attend_pairs", (*exact[:-1], exact[-1] + 10), torch.bfloat16)[0]
    rounded = tuple(x.double() for x in (*others, beta))
    _, *got = run_kernels("attend_pairs", (*others, beta), sizes, shim)
    grad = cotangents((beta,))[0].double()
    leaves = [x.requires_grad_() for x in rounded]
    want = torch.autograd.grad(defined("attend_pairs", tuple(leaves), sizes)[0], leaves, grad)
    assert_near(got[4:], want[4:], 2e-2)  # shift2, weight2 and beta


def test_reads_no_memory_that_nobody_wrote(shim: Any) -> None:
    """In deterministic mode, torch fills new tensors with NaN, and so is freed memory, which may lie behind them."""
    torch.use_deterministic_algorithms(True)
    try:
        for operator, sizes, seed in itertools.product(ON_GPU, SMALL, range(2)):
            freed = [torch.empty(2**size) for size in range(6, 16) for _ in range(30)]
            del freed
            found = run_kernels(operator, sample(operator, sizes, torch.float32, seed), sizes, shim, tf32=seed % 2 == 0)
            assert all(x.isfinite().all() for x in found), (operator, sizes)
    finally:
        torch.use_deterministic_algorithms(False)


def test_softmax_of_pairwise_attention_is_that_of_the_cpu(shim: Any) -> None:
    """Its reference may be any number near the largest logit."""
    for sizes in SMALL:
        tensors = sample("attend_pairs", sizes, torch.float32)
        found = (with_saved("attend_pairs", tensors, sizes, namespace)[1] for namespace in (shim, torch.ops.san))
        ours, theirs = (x[:, 0] - x[:, 1].log() for x in found)
        assert_near([ours], [theirs], 2e-6, sizes)


def test_pairwise_attention_with_growing_logits(shim: Any) -> None:
    """Logits that grow along the footprint raise the reference of the softmax again and again."""
    sizes = Sizes(1, 9, 9, 7, 1, 1, 1, shares=8)
    ramp = torch.arange(81.0, dtype=torch.float64).view(1, 9, 9, 1)
    tensors = torch.zeros_like(ramp), -ramp, *sample("attend_pairs", sizes)[2:]
    tensors[2].copy_(torch.tensor([[0.0], [1], [0]])), tensors[3].fill_(1), tensors[4].fill_(0), tensors[5].fill_(1)
    for times in (1.0, -1.0, 100.0, 1e30):
        exact = *tensors[:5], tensors[5] * times, tensors[6]
        y, _ = with_saved("attend_pairs", tuple(x.float() for x in exact), sizes, shim)
        assert_near([y], defined("attend_pairs", exact, sizes), 1e-5, times)


def test_nan_only_affects_gradients_of_its_neighbours(shim: Any) -> None:
    """Beyond the border of the map, pixels of zeros take the place of the missing ones."""
    hidden, weight, bias, beta = sample("attend_patches", dtype=torch.float32)
    hidden[0, 0, 0] = float("nan")
    *_, to_beta = run_kernels("attend_patches", (hidden, weight, bias, beta), Sizes(), shim)
    affected = to_beta.isnan().any(3)
    assert affected[0].nonzero().tolist() == [[h, w] for h in (0, 1) for w in (0, 1)] and not affected[1].any()


def test_attention_of_bfloat16_values(shim: Any) -> None:
    *layer, beta = sample("attend_patches", SMALL[0])
    tensors = *(x.float() for x in layer), beta.bfloat16()
    got = run_kernels("attend_patches", tensors, SMALL[0], shim)
    want = wanted("attend_patches", (*layer, tensors[-1].double()), SMALL[0])
    assert got[0].dtype == got[-1].dtype == torch.bfloat16
    assert_near(got, want, 5e-3)


@every_operator
def test_order_of_blocks_does_not_change_bits(operator: str, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that depends on it shows a missing barrier."""
    sizes = Sizes(3, 7, 7, 7, 18, 16, 8)
    tensors = sample(operator, sizes, torch.float32)
    first = run_kernels(operator, tensors, sizes, shim)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    assert all(map(torch.equal, first, run_kernels(operator, tensors, sizes, shim)))


@every_operator
def test_torch_knows_the_memory_order_of_results(operator: str, shim: Any) -> None:
    """For torch.compile, which allocates and reads the tensors of a graph without running it."""
    tensors = sample(operator, dtype=torch.float32)
    outputs, grads = with_saved(operator, tensors, Sizes(), shim), cotangents(computed(operator, tensors, Sizes(), shim))
    arguments = backward_arguments(operator, tensors, outputs, grads, Sizes())
    real = *outputs, *getattr(shim, f"{operator}_backward")(*arguments)
    with FakeTensorMode():
        on_gpu = [torch.empty_strided(x.shape, x.stride(), device="cuda") for x in tensors]
        fakes = with_saved(operator, tuple(on_gpu), Sizes())
        moved = [torch.empty_strided(x.shape, x.stride(), device="cuda") if isinstance(x, Tensor) else x for x in arguments]
        fakes += getattr(torch.ops.san, f"{operator}_backward")(*moved)
    assert [x.stride() for x in fakes] == [x.stride() for x in real]


@every_operator
def test_accepts_an_empty_batch(operator: str, shim: Any) -> None:
    sizes = Sizes(batch=0)
    tensors = sample(operator, sizes, torch.float32)
    assert [x.shape for x in run_kernels(operator, tensors, sizes, shim)] == [x.shape for x in wanted(operator, tensors, sizes)]


@every_operator
def test_accepts_any_memory_order(operator: str, shim: Any) -> None:
    tensors = sample(operator, dtype=torch.float32)
    turned = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x for x in tensors)
    outputs = computed(operator, tensors, Sizes(), shim)
    grads = tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in cotangents(outputs))
    saved = with_saved(operator, tensors, Sizes(), shim)
    arguments = backward_arguments(operator, turned, saved, grads, Sizes())
    moved = *computed(operator, turned, Sizes(), shim), *getattr(shim, f"{operator}_backward")(*arguments)
    assert all(map(torch.equal, run_kernels(operator, tensors, Sizes(), shim), moved))


def test_covariance_with_an_outlier(shim: Any) -> None:
    """The first pixel differs from all others, so products of distances from it would cancel."""
    sizes = Sizes(1, 24, 24, 3, 6)
    center, around, norm, *layers = sample("attend_pairs_of_batch", sizes)
    norm[1] = 1
    center[0, 0, 0], around[0, 1, 1] = 1000, -1000
    tensors = tuple(x.float() for x in (center, around, norm, *layers))
    *_, got = with_saved("attend_pairs_of_batch", tensors, sizes, shim)
    _, want = defined("pair_covariance", (center, around, norm), sizes)
    torch.testing.assert_close(got, want.float(), rtol=3e-5, atol=1e-3)


@pytest.mark.parametrize("bias", [1, 100])
def test_second_norm_with_a_small_weight_and_a_large_bias(bias: float, shim: Any) -> None:
    """The gradients of its statistics are small differences of terms that must not grow with the bias."""
    *maps, weight1, norm_weight, norm_bias, weight2, beta = sample("attend_pairs_of_batch")
    tensors = *maps, weight1, norm_weight * 1e-6, norm_bias * bias, weight2, beta
    exact = tuple(x.float().double() for x in tensors)
    _, *got = run_kernels("attend_pairs_of_batch", tuple(x.float() for x in exact), Sizes(), shim)
    _, *want = wanted("attend_pairs_of_batch", exact, Sizes())
    for ours, theirs in zip(got[:3], want[:3], strict=True):  # of center, around and norm; they are small, too
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_statistics_that_are_not_finite_show_in_the_result(shim: Any) -> None:
    """As with other norms, and not only in the running statistics."""
    center, around, norm, *layers = sample("attend_pairs_of_batch", dtype=torch.float32)
    center[0, 3, 3], norm[1] = 1e20, 1
    y, mean, var, *_ = with_saved("attend_pairs_of_batch", (center, around, norm, *layers), Sizes(), shim)
    assert mean.isfinite().all() and not var.isfinite().any() and y.isnan().any()


@pytest.mark.parametrize("operator", ["attend_pairs", "patch_linear"])
def test_nan_only_affects_footprints_that_contain_it(operator: str, shim: Any) -> None:
    center, around, *rest = sample(operator, dtype=torch.float32)
    around[0, 3, 2, 1] = float("nan")
    affected = computed(operator, (center, around, *rest), Sizes(), shim)[0].isnan().any(1 if operator == "patch_linear" else 3)
    assert affected[0].nonzero().tolist() == [[h, w] for h in (2, 3, 4) for w in (1, 2, 3)]
    assert not affected[1].any()


def test_error_names_the_kernel_and_operator_of_a_failed_launch(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_SHIM_FAIL", "finish_kernel")
    with pytest.raises(RuntimeError, match="attend_pairs_backward: kernel finish_kernel failed"):
        run_kernels("attend_pairs", sample("attend_pairs", dtype=torch.float32), Sizes(), shim)


@pytest.mark.parametrize("channels_last", [False, True])
def test_aggregation_accepts_every_memory_format(channels_last: bool, shim: Any) -> None:
    maps, channels = [(7, 7, 7), (5, 9, 3), (4, 1, 1)], [(64, 8), (24, 4), (4, 4), (12, 2), (6, 3)]
    for (height, width, footprint), (M, G) in itertools.product(maps, channels):
        case = f"{M} channels, {G} weights, {height}x{width}, footprint {footprint}"
        beta = torch.randn(2, M, height, width, dtype=torch.float64)
        weight = torch.randn(2, G, footprint**2, height * width, dtype=torch.float64)
        if channels_last:
            beta, weight = beta.contiguous(memory_format=torch.channels_last), stored_by_pixels(weight)
        wanted = tuple(gradients(reference.aggregation, (beta, weight), footprint))
        out, grad = shim.aggregation(beta, weight, footprint), cotangent(wanted[0])
        for memory_format in (torch.contiguous_format, torch.channels_last):
            grads = shim.aggregation_backward(grad.contiguous(memory_format=memory_format), beta, weight, footprint)
            assert_near((out, *grads), wanted, 1e-12, case)
            assert [x.stride() for x in (out, *grads)] == [x.stride() for x in (beta, beta, weight)], case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norm_affine_matches_the_definition(dtype: torch.dtype, shim: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, var, weight, bias = (torch.randn(2000, generator=generator, dtype=torch.float64) for _ in range(4))
    var[10:] = var[10:].abs()  # a negative variance counts as 0
    ours = mean.to(dtype), var.to(dtype), weight.half(), bias.float()
    want, grads = differentiated(
        lambda t: (fused_reference.norm_affine(t[0], t[1], t[2], t[3], 1e-5),), tuple(x.double() for x in ours)
    )
    got = shim.norm_affine(*ours, 1e-5)
    got_grads = shim.norm_affine_backward(cotangents((got,))[0], ours[1], ours[2], 1e-5)
    assert got.dtype == dtype and all(x.dtype == dtype for x in got_grads)
    torch.testing.assert_close((got.double(), *(x.double() for x in got_grads)), (*want, *grads), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_running_statistics_are_those_of_torch(dtype: torch.dtype, shim: Any) -> None:
    """On the GPU and on the CPU, whose kernel the shim does not have."""
    x_NCHW = torch.randn(3, 300, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 7
    mean, var = x_NCHW.mean((0, 2, 3)), x_NCHW.var((0, 2, 3), correction=0)
    for operators in (shim, torch.ops.san):
        norm, other = (torch.nn.BatchNorm2d(300, momentum=0.3, dtype=dtype) for _ in range(2))
        tracked = norm.running_mean, norm.running_var, norm.num_batches_tracked
        for _ in range(2):
            other(x_NCHW.to(dtype))
            operators.track_statistics(*tracked, mean, var, x_NCHW.numel() // 300, 0.3)
        torch.testing.assert_close(norm.state_dict(), other.state_dict())
    torch.library.opcheck(torch.ops.san.track_statistics.default, (*tracked, mean, var, 60, 0.3))


UNSUPPORTED = {
    "float64": (Sizes(), torch.float64, "need float32 maps"),
    "products": (Sizes(products=1), torch.float32, "need differences only"),
    "no hidden layer": (Sizes(hidden=0), torch.float32, "need differences only .* and a hidden layer"),
}


@pytest.mark.parametrize("operator", ["attend_pairs_of_batch", "attend_patches"])
def test_refuses_float64_values(operator: str, shim: Any) -> None:
    *others, beta = sample(operator, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="beta must be float32 or a half type"):
        computed(operator, (*others, beta.double()), Sizes(), shim)


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_refuses_what_gpus_do_not_support(what: str, shim: Any) -> None:
    sizes, dtype, message = UNSUPPORTED[what]
    with pytest.raises(RuntimeError, match=message):
        computed("attend_pairs", sample("attend_pairs", sizes, dtype), sizes, shim)


@pytest.mark.parametrize("operator", [operator for operator in ON_GPU if operator != "attend_dot"])  # which has no differences
def test_large_means_cost_no_precision(operator: str, shim: Any) -> None:
    center, around, *others = sample(operator)
    center, around = (x.float().double() for x in (center + 1e4, around + 1e4))
    if operator.startswith("patch") and others:
        others[0][0] += 1e4
    tensors = center, around, *others
    exact = tuple(x.float().double() for x in tensors)
    allowed = 1e-3 if operator == "patch_statistics" else 2e-5  # its backward pass reads a mean that was rounded to float32
    got = run_kernels(operator, tuple(x.float() for x in exact), Sizes(), shim)
    assert_near(got, wanted(operator, exact, Sizes()), allowed)


@pytest.mark.parametrize("value", [1e4, 1e30, float("inf"), float("nan")], ids=str)
def test_huge_pixel_only_affects_footprints_that_contain_it(value: float, shim: Any) -> None:
    """The value that is subtracted from an image's maps does not depend on single pixels, nor on other images."""
    center, around, *others = sample("attend_pairs", dtype=torch.float32)
    changed = around + 100
    changed[0, 3, 2] = value
    plain, other = (computed("attend_pairs", (center + 100, x, *others), Sizes(), shim)[0] for x in (around + 100, changed))
    difference = (plain - other).abs().nan_to_num(float("inf")).amax(3)
    difference[0, 2:5, 1:4] = 0
    assert difference.max() < 1e-5 and torch.equal(plain[1], other[1])


def test_tf32_rounds_to_nearest(shim: Any) -> None:
    """Truncation would make all products too small by 2^-11 on average."""
    generator = torch.Generator().manual_seed(0)
    center, around = torch.rand(1, 32, 32, 8, generator=generator), torch.zeros(1, 32, 32, 8)
    norm = torch.stack((torch.zeros(8), torch.ones(8), torch.zeros(8)))
    weight = torch.eye(8)
    got = shim.patch_linear(center, around, torch.cat((norm, norm), 1), torch.cat((weight, weight), 1), 1, True)
    bias = (got.permute(0, 2, 3, 1) - center).mean() / center.mean()
    assert abs(bias) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["attend_pairs", "attend_pairs_of_batch"])
def test_long_sums_do_not_drift(operator: str, shim: Any) -> None:
    """Tensor cores round sums towards zero, so a sum of many products would become too small."""
    sizes = Sizes(1, 150, 150, 5, 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    center, around = torch.rand(2, *(1, 150, 150, 1), generator=generator)
    norm = torch.tensor([[0.0], [1.0], [2.0]])
    maps, beta = (center, around, norm), -around  # so that the terms of the sum do not cancel
    if operator == "attend_pairs_of_batch":
        tensors = *maps, torch.ones(1, 1), torch.ones(1), torch.ones(1), torch.ones(1, 1), beta
        *_, got = with_saved(operator, tensors, sizes, shim)
        _, want = defined("pair_covariance", tuple(x.double() for x in maps), sizes)
    else:
        tensors = *maps, torch.ones(1, 1), torch.ones(1), torch.ones(1, 1), beta
        _, *grads = run_kernels(operator, tensors, sizes, shim, grads=(torch.ones_like(beta),))
        leaves = [x.double().requires_grad_() for x in tensors]
        got, want = grads[3], torch.autograd.grad(defined(operator, tuple(leaves), sizes)[0].sum(), leaves)[3]
    assert error(got, want) < 5e-5  # 3e-4 in one long sum


@pytest.mark.parametrize("operator", ["unfold", "subtraction"])
def test_refuses_channels_with_more_values_than_32_bits_count(operator: str, shim: Any) -> None:
    x, grad = torch.zeros(1).expand(1, 1, 300, 300), torch.zeros(1).expand(1, 1, 257**2, 300**2)
    with pytest.raises(RuntimeError, match="257x257 footprint"):
        getattr(shim, operator)(*(x,) * (1 if operator == "unfold" else 2), 257)
    with pytest.raises(RuntimeError, match=r"fewer than 2\^32"):
        getattr(shim, f"{operator}_backward")(grad, 300, 300, 257)


def test_blocks_cover_more_than_2_to_the_27_pixels(shim_library: Path) -> None:
    planned_pixels = ctypes.CDLL(str(shim_library)).san_planned_pixels
    planned_pixels.restype = ctypes.c_longlong
    assert planned_pixels() >= 2**29
