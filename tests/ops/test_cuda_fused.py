"""The CUDA sources of fused pairwise attention, run on the CPU through the shim, against plain torch in float64."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import san
from cuda_ext import build
from tests.ops.cuda_cases import assert_near, assert_same_bits, error, outcome, rounded_to
from tests.ops.fused_cases import every_mode
from tests.ops.pairwise_cases import CASES, Case, Problem, reference, run


@every_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_matches_reference(case: Case, training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    outputs, gradients = run(shim, problem, training, torch.float64)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert_near(outputs, wanted_outputs, 1e-10)
    assert_near(gradients, wanted_gradients, 1e-10)


@every_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_matches_reference(case: Case, training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample(case)
    outputs, gradients = run(shim, problem, training, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert_near(outputs, wanted_outputs, 1e-5)
    assert_near(gradients, wanted_gradients, 1e-4)


@every_mode
@pytest.mark.parametrize(("of_center", "of_around"), [(1000, 1000), (1000, -1000)], ids=["difference", "sum"])
def test_large_means_change_nothing(of_center: float, of_around: float, training: bool, shim: Any) -> None:
    problem = Problem.sample(CASES[0])
    center, around, beta = problem.maps
    maps = ((center + of_center).float().double(), (around + of_around).float().double(), beta)
    mean1, *statistics = (x.float().double() for x in problem.statistics)
    shifted = (mean1 + of_center - of_around).float().double()
    problem = replace(problem, maps=maps, statistics=(shifted, *statistics))
    outputs, gradients = run(shim, problem, training, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, training)
    # In training the batch's mean is kept in float32: where it is 2000, an error of 6e-5.
    assert_near(outputs[:1], wanted_outputs[:1], 1e-4 if training else 2e-6)
    assert_near(gradients, wanted_gradients, 5e-4 if training else 1e-4)


def test_statistics_do_not_hang_on_the_first_pixel(shim: Any) -> None:
    """It is unlike all others: squares of distances from it would cancel."""
    problem = Problem.sample(Case(1, 24, 24, 3, 6, 4, 2, 16))
    center, around = (torch.zeros_like(x) for x in problem.maps[:2])
    center[0, 0, 0], around[0, 1, 1] = 1000, 1000
    problem = replace(problem, maps=(center, around, problem.maps[2]))
    (_, _, _, var1, _, var2), _ = run(shim, problem, True, torch.float32)
    (_, _, _, wanted1, _, wanted2), _ = reference(problem, True)
    torch.testing.assert_close((var1, var2), (wanted1.float(), wanted2.float()), rtol=1e-5, atol=0)


@every_mode
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_tf32_is_used_where_it_is_allowed(case: Case, training: bool, shim: Any) -> None:
    problem = Problem.sample(case)
    wanted = reference(problem, training)
    (y, *_), gradients = run(shim, problem, training, torch.float32, tf32=True)
    (accurate_y, *_), accurate_gradients = run(shim, problem, training, torch.float32)
    assert 10 * error(accurate_y, wanted[0][0]) < error(y, wanted[0][0]) <= 2e-3
    assert_near(gradients[:3], wanted[1][:3], 0.03)
    assert_near(gradients[3:], wanted[1][3:], 0.15)  # sums over so few pixels feel each relu that rounding flips
    weight1 = 5
    assert 10 * error(accurate_gradients[weight1], wanted[1][weight1]) < error(gradients[weight1], wanted[1][weight1])


def test_tf32_changes_no_other_type(shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert_same_bits(run(shim, problem, True, dtype, tf32=True), run(shim, problem, True, dtype))


class Recorder(TorchDispatchMode):
    """Notes the last argument of fused operators: tf32."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "san":
            self.allowed[func._opname] = args[-1] if len(args) == len(func._schema.arguments) else False
        return func(*args, **(kwargs or {}))


def set_by_flag(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


def set_by_precision(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def set_for_products(allowed: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"


@pytest.fixture
def torch_precision() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("set_precision", [set_by_flag, set_by_precision, set_for_products])
def test_torchs_setting_reaches_the_operators(
    set_precision: Callable[[bool], None], allowed: bool, torch_precision: None
) -> None:
    set_precision(allowed)
    module = san.PairwiseAttention(64, 3)
    with Recorder() as recorder:
        module(torch.randn(1, 64, 5, 5)).sum().backward()
    assert recorder.allowed == dict.fromkeys(("pairwise", "pairwise_backward"), allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_mode
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_half_types_are_near(case: Case, training: bool, dtype: torch.dtype, shim: Any) -> None:
    problem = Problem.sample(case).rounded_to(dtype)
    outputs, gradients = run(shim, problem, training, dtype)
    wanted_outputs, wanted_gradients = reference(problem, training)
    assert [outputs[0].dtype, outputs[1].dtype, gradients[2].dtype, gradients[3].dtype] == [dtype, torch.float32] * 2
    assert_near(outputs, wanted_outputs, 0.01)
    assert_near(gradients, wanted_gradients, 0.15 if dtype == torch.float16 else 0.25)


@every_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_rounds_factors_once_and_nothing_else(case: Case, training: bool, order: str, shim: Any) -> None:
    problem = Problem.sample(case).rounded_to(torch.bfloat16)
    outputs, gradients = run(shim, problem, training, torch.bfloat16)
    wanted_outputs, wanted_gradients = reference(problem, training, rounded_to(torch.bfloat16))
    assert_near(outputs[:1], wanted_outputs[:1], 0.004)
    assert_near(outputs[1:], wanted_outputs[1:], 1e-4)
    assert_near(gradients, wanted_gradients, 0.01)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_order_of_threads_and_blocks_changes_no_bit(case: Case, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.sample(case)
    forwards = run(shim, problem, True, torch.float32)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    backwards = run(shim, problem, True, torch.float32)
    assert_same_bits(forwards, backwards)


def test_takes_views_and_maps_of_different_types(shim: Any) -> None:
    problem = Problem.sample(CASES[1]).rounded_to(torch.bfloat16)
    center, around, beta = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem.maps)
    maps = center.float(), around.float(), F.pad(beta, (1, 0)).bfloat16()[..., 1:]
    parameters, statistics = ([x.float() for x in some] for some in (problem.parameters, problem.statistics))
    outputs = shim.pairwise(*maps, *parameters, *statistics, *problem.rest(True))
    used = (*outputs[2:], outputs[1])
    gradients = shim.pairwise_backward(problem.grad.bfloat16(), *maps, *parameters[:-1], *used, *problem.rest(True))
    wanted_outputs, wanted_gradients = reference(problem, True, rounded_to(torch.bfloat16))
    assert [x.dtype for x in (outputs[0], *gradients[:3])] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert_near(outputs, wanted_outputs, 0.004)
    assert_near(gradients, wanted_gradients, 0.01)


@every_mode
def test_takes_an_empty_batch(training: bool, shim: Any) -> None:
    problem = Problem.sample(Case(0, 5, 5, 3, 6, 4, 2, 16))
    outputs, gradients = run(shim, problem, training, torch.float32)
    assert outputs[0].shape == (0, 5, 5, 16) and outputs[1].shape == (0, 5, 5, 2)
    for got, given in zip(outputs[2:], problem.statistics, strict=True):
        torch.testing.assert_close(got, given.float())
    for got, given in zip(gradients, (*problem.maps, *problem.parameters), strict=False):
        torch.testing.assert_close(got, torch.zeros_like(given.float()))


@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [
        (1, torch.zeros(2, 9, 6, 5), "same shape"),
        (2, torch.zeros(2, 9, 6, 15), "multiple of the 2"),
        (5, torch.zeros(4, 5), "weight1"),
        (6, torch.zeros(3), "second BatchNorm"),
        (14, 4, "footprint"),
        (14, 13, "footprint"),
    ],
)
def test_refuses_what_does_not_fit(argument: int, value: Any, complaint: str, shim: Any) -> None:
    problem = Problem.sample(CASES[1])
    arguments: list[Any] = [x.float() for x in (*problem.maps, *problem.parameters, *problem.statistics)]
    arguments += problem.rest(True)
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=complaint):
        shim.pairwise(*arguments)


# An eighth of what a block has on sm_86 and sm_89, A100 and H100, with an eighth of the channels of SAN's last stage.
LIMITS = {"99 KB": (99 << 10) // 8, "163 KB": (163 << 10) // 8, "227 KB": (227 << 10) // 8}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("share", [1, 2, 8])
@pytest.mark.parametrize("footprint", [3, 5, 7, 9, 11, 13])
def test_backward_takes_the_footprints_that_forward_takes(
    footprint: int, share: int, limit: int, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The softmax weights of a single pixel's pairs overflow shared memory from share 1 and footprint 7 on."""
    side = footprint // 2 + 1
    problem = Problem.sample(Case(1, side, side, footprint, 8, 16, 64 // share, 64))
    monkeypatch.setenv("SAN_SHIM_SHARED_MEMORY", str(limit))
    outputs, gradients = run(shim, problem, True, torch.float32)
    wanted_outputs, wanted_gradients = reference(problem, True)
    assert_near(outputs, wanted_outputs, 1e-5)
    assert_near(gradients, wanted_gradients, 1e-4)


def test_spilled_weights_change_nothing(order: str, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several images, and several tiles for each block."""
    problem = Problem.sample(Case(3, 6, 7, 7, 8, 16, 64, 64))
    results = []
    for limit in LIMITS.values():
        monkeypatch.setenv("SAN_SHIM_SHARED_MEMORY", str(2 * limit))  # for numbers twice as wide
        results.append(run(shim, problem, True, torch.float64))
    for outputs, gradients in results[1:]:
        assert_near(outputs, results[0][0], 1e-12)
        assert_near(gradients, results[0][1], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("share", [1, 2, 8])
@pytest.mark.parametrize("values", [16, 64, 128, 256, 512])
def test_sans_stages_fit_every_gpu(
    values: int, share: int, limit: int, dtype: torch.dtype, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pixels, as sizes alone decide."""
    weights = values // share
    problem = Problem.sample(Case(0, 7, 7, 13, values // 4 + 2, weights, weights, values))
    monkeypatch.setenv("SAN_SHIM_SHARED_MEMORY", str(8 * limit))
    run(shim, problem, True, dtype)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward_refuse_the_same_sizes(
    case: Case, dtype: torch.dtype, training: bool, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.sample(replace(case, batch=1))
    maps, grad = [x.to(dtype) for x in problem.maps], problem.grad.to(dtype)
    sums = torch.promote_types(dtype, torch.float32)
    parameters, statistics = ([x.to(sums) for x in some] for some in (problem.parameters, problem.statistics))
    logsumexp = torch.zeros(*problem.grad.shape[:3], case.weights, dtype=sums)
    refusals = []
    for limit in (1 << 10, 3 << 10, 8 << 10, 40 << 10, 227 << 10):
        monkeypatch.setenv("SAN_SHIM_SHARED_MEMORY", str(limit))
        rest = problem.rest(training)
        forward = outcome(shim.pairwise, *maps, *parameters, *statistics, *rest)
        assert outcome(shim.pairwise_backward, grad, *maps, *parameters[:-1], *statistics, logsumexp, *rest) == forward
        refusals.append(forward)
    assert refusals[0] is not None and f"a block of this GPU has {1 << 10}; use fewer channels" in refusals[0]
    assert refusals[-1] is None


def test_a_failed_launch_names_kernel_and_operator(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.sample(CASES[1])
    monkeypatch.setenv("SAN_SHIM_FAIL", "fold_kernel")
    wanted = r"san::pairwise_backward: kernel \(fold_kernel<T, out_t>\) failed: as the test asked; an earlier kernel may be"
    with pytest.raises(RuntimeError, match=wanted):
        run(shim, problem, True, torch.float32)


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
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert float(said[0]) == 63 * 64 / 2
    assert "nan" in said[1]
    environment = {**os.environ, "SAN_SHIM_REVERSE": "1"}
    said = subprocess.run([program], capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert float(said[0]) == 63 * 64 / 2
