"""The CUDA sources of fused operators and of aggregation, run on the CPU through the shim."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext import build
from san.ops import reference
from tests.ops.cases import (
    OPERATORS,
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
    error,
    run_kernels,
    sample,
    with_half_weights,
)
from tests.ops.operators import cotangent, gradients, stored_by_pixels

every_operator = pytest.mark.parametrize("operator", OPERATORS)
# GPUs run differences with a hidden layer.
SUPPORTED = [replace(sizes, products=0, hidden=sizes.hidden or 7) for sizes in SIZES]
SMALL = [sizes for sizes in SUPPORTED if sizes.width < 60 and sizes.footprint < 9]


def wanted(operator: str, tensors: Tensors, sizes: Sizes) -> Tensors:
    return sum(differentiated(lambda t: defined(operator, t, sizes), tensors), ())


@every_operator
@pytest.mark.parametrize(
    "sizes", [pytest.param(sizes, marks=pytest.mark.slow) if sizes.channels > 100 else sizes for sizes in SMALL], ids=str
)
def test_matches_the_definition(operator: str, sizes: Sizes, order: str, shim: Any) -> None:
    tensors = sample(operator, sizes)
    assert_near(run_kernels(operator, tuple(x.float() for x in tensors), sizes, shim), wanted(operator, tensors, sizes), 2e-5)


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator not in STATISTICS])
@pytest.mark.parametrize("sizes", SMALL[:5], ids=str)
def test_uses_tf32_if_allowed(operator: str, sizes: Sizes, shim: Any) -> None:
    exact = sample(operator, sizes)
    tensors, want = tuple(x.float() for x in exact), wanted(operator, exact, sizes)
    got, accurate = run_kernels(operator, tensors, sizes, shim, tf32=True), run_kernels(operator, tensors, sizes, shim)
    at = 1 if operator == "pair_covariance" else 0
    assert 10 * error(accurate[at], want[at]) < error(got[at], want[at]) <= 3e-3
    assert_near(got, want, 0.15)  # with so few pixels, each ReLU that rounding flips changes the gradients


@pytest.mark.parametrize("operator", ["pair_weights", "patch_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SMALL[:3], ids=str)
def test_half_weights(operator: str, dtype: torch.dtype, sizes: Sizes, shim: Any) -> None:
    tensors, rounded = with_half_weights(operator, sample(operator, sizes), dtype)
    got, want = run_kernels(operator, tensors, sizes, shim), wanted(operator, rounded, sizes)
    assert error(got[0], want[0]) <= max(5e-3, torch.finfo(dtype).eps)
    assert_near(got[1:], want[1:], 0.2)


@every_operator
def test_order_of_blocks_does_not_change_bits(operator: str, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(3, 7, 7, 7, 18, 16, 8)
    tensors = sample(operator, sizes, torch.float32)
    first = run_kernels(operator, tensors, sizes, shim)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    assert all(map(torch.equal, first, run_kernels(operator, tensors, sizes, shim)))


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
    arguments = backward_arguments(operator, turned, outputs, grads, Sizes())
    moved = *computed(operator, turned, Sizes(), shim), *getattr(shim, f"{operator}_backward")(*arguments)
    assert all(map(torch.equal, run_kernels(operator, tensors, Sizes(), shim), moved))


def test_covariance_with_an_outlier(shim: Any) -> None:
    """The first pixel differs from all others, so products of distances from it would cancel."""
    sizes = Sizes(1, 24, 24, 3, 6)
    center, around, norm = sample("pair_covariance", sizes)
    norm[1] = 1
    center[0, 0, 0], around[0, 1, 1] = 1000, -1000
    _, got = computed("pair_covariance", (center.float(), around.float(), norm.float()), sizes, shim)
    _, want = defined("pair_covariance", (center, around, norm), sizes)
    torch.testing.assert_close(got, want.float(), rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize("operator", ["pair_weights", "patch_linear"])
def test_nan_only_affects_footprints_that_contain_it(operator: str, shim: Any) -> None:
    center, around, *rest = sample(operator, dtype=torch.float32)
    around[0, 3, 2, 1] = float("nan")
    got = computed(operator, (center, around, *rest), Sizes(), shim)[0].flatten(-2 if operator == "patch_linear" else -1)
    affected = got.isnan().flatten(1, -2).any(1)
    assert affected[0].view(6, 5).nonzero().tolist() == [[h, w] for h in (2, 3, 4) for w in (1, 2, 3)]
    assert not affected[1].any()


def test_error_names_the_kernel_and_operator_of_a_failed_launch(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_SHIM_FAIL", "finish_kernel")
    message = r"san::pair_weights_backward: kernel finish_kernel failed: as the test asked; an earlier kernel may be"
    with pytest.raises(RuntimeError, match=message):
        run_kernels("pair_weights", sample("pair_weights", dtype=torch.float32), Sizes(), shim)


@pytest.mark.parametrize("channels", [(64, 8), (24, 4), (4, 4), (12, 2), (6, 3)], ids=str)
@pytest.mark.parametrize("by_pixels", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("height", "width", "footprint"), [(7, 7, 7), (5, 9, 3), (4, 1, 1)])
def test_aggregation_accepts_every_memory_format(
    height: int, width: int, footprint: int, channels_last: bool, by_pixels: bool, channels: tuple[int, int], shim: Any
) -> None:
    generator = torch.Generator().manual_seed(4)
    (M, G), K, P = channels, footprint**2, height * width
    beta = torch.randn(2, M, height, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, G, K, P, generator=generator, dtype=torch.float64)
    if channels_last:
        beta = beta.contiguous(memory_format=torch.channels_last)
    if by_pixels:
        weight = stored_by_pixels(weight)
    wanted = gradients(reference.aggregation, (beta, weight), footprint)
    out, grad = shim.aggregation(beta, weight, footprint), cotangent(wanted[0])
    for memory_format in (torch.contiguous_format, torch.channels_last):
        grads = shim.aggregation_backward(grad.contiguous(memory_format=memory_format), beta, weight, footprint)
        torch.testing.assert_close([out, *grads], wanted, rtol=1e-12, atol=1e-12)
        assert [x.stride() for x in (out, *grads)] == [x.stride() for x in (beta, beta, weight)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_memory_format_does_not_change_bits_of_aggregation(dtype: torch.dtype, shim: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    beta, grad = (torch.randn(2, 16, 6, 5, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(2, 8, 9, 30, generator=generator).to(dtype)

    def run(beta: Tensor, weight: Tensor) -> list[Tensor]:
        return [shim.aggregation(beta, weight, 3), *shim.aggregation_backward(grad, beta, weight, 3)]

    last, by_pixels = beta.contiguous(memory_format=torch.channels_last), stored_by_pixels(weight)
    sliced = torch.cat((beta, beta), 1)[:, 16:]  # a view with gaps
    for one, other in ((last, weight), (beta, by_pixels), (last, by_pixels), (sliced, weight[:1].expand(2, -1, -1, -1))):
        assert all(map(torch.equal, run(one, other), run(beta, other.contiguous())))


PROBE = """
#include <cstdio>
#include "cuda/launch.h"

namespace san::cuda {

__global__ void sum_kernel(float* result, bool waits) {
  float* sums = reinterpret_cast<float*>(shared_memory_base());
  float value = static_cast<float>(threadIdx.x);
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(~0u, value, bits);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  if (waits) __syncthreads();
  if (threadIdx.x == 0) *result = sums[0] + sums[1];
}

}  // namespace san::cuda

int main() {
  for (const bool waits : {true, false}) {
    float result = 0;
    SAN_LAUNCH_SHARED(san::cuda::sum_kernel, 1, 64, 2 * sizeof(float), 0, &result, waits);
    std::printf("%g ", result);
  }
}
"""


def test_shim_shows_a_missing_barrier(tmp_path: Path) -> None:
    source, program = tmp_path / "probe.cu", tmp_path / "probe"
    source.write_text(PROBE)
    compile_command = build.compile_command(source, tmp_path / "probe.o", build.Toolchain.find(), shim=True)
    build.run([*compile_command, f"-I{build.SOURCE_DIR}"])
    torch_lib = Path(torch.__file__).parent / "lib"
    link = [compile_command[0], str(tmp_path / "probe.o"), f"-L{torch_lib}", "-ltorch_cpu", f"-Wl,-rpath,{torch_lib}"]
    build.run([*link, "-o", str(program)])
    for reverse in ({}, {"SAN_SHIM_REVERSE": "1"}):
        done = subprocess.run([program], capture_output=True, text=True, check=True, env=os.environ | reverse)
        with_barrier, without = done.stdout.split()
        assert float(with_barrier) == 63 * 64 / 2
        assert reverse or "nan" in without
