"""How torch's setting for TF32 reaches the fused operators, and that the shim shows a missing barrier."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import san
from cuda_ext import build


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
