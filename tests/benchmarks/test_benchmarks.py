"""Benchmarks: FLOPs, lengths of functions, and errors for missing tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ext import build
from tests.benchmarks import size
from tests.benchmarks.instructions import find_nvdisasm
from tests.benchmarks.stages import KINDS, STAGES, Core


def multiply_accumulates(kind: str, stage: str, training: bool) -> float:
    """Returns the multiply-accumulates per pixel from docs/explanation/operators.md."""
    channels, _, k, _ = STAGES[stage]
    R, M, K = channels // 16, channels // 4, k * k
    G = M // 8
    E = R if kind == "pairwise" else G
    if kind == "pairwise":
        d = R + 2  # two channels for the position
        forward, backward = d * E + E * G + M, 3 * d * E + 2 * E * G + 2 * M
        covariance = d * (d + 1) / 2 + d * d
        return K * (forward + backward + covariance if training else forward)
    forward = E * R * (K + 1) + E * K * G + K * M
    return forward * (3 if training else 1)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
@pytest.mark.parametrize("kind", KINDS)
def test_flops_match_the_documentation(kind: str, stage: str, training: bool) -> None:
    core = Core(kind, stage, batch=2, largest_side=8)
    assert core.flops(training) == 2 * core.batch * core.side**2 * multiply_accumulates(kind, stage, training)


def test_multiply_accumulates_per_pair_of_stage_2() -> None:
    assert multiply_accumulates("pairwise", "stage 2", training=True) / 49 == 2223


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; programs elsewhere are hidden."""
    which = shutil.which

    def which_of_test(name: str, path: str | None = None) -> str | None:
        found = which(name, path=path)
        return found if (found or "").startswith(str(tmp_path)) else None

    monkeypatch.setattr(shutil, "which", which_of_test)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return tmp_path


def test_finds_nvdisasm_next_to_nvcc(tools: Path) -> None:
    nvcc = str(tools / "nvcc")
    message = "^nvdisasm was not found; run `pip install nvidia-cuda-nvdisasm` or install the CUDA toolkit$"
    with pytest.raises(build.BuildError, match=message):
        find_nvdisasm(nvcc)
    nvdisasm = tools / "nvdisasm"
    nvdisasm.write_text("#!/bin/sh\n")
    nvdisasm.chmod(0o755)
    assert find_nvdisasm(nvcc) == str(nvdisasm)


def test_instructions_without_a_compiler_print_one_line() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.instructions"]
    done = subprocess.run(command, env=os.environ | {"CXX": "no-such-compiler"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"no-such-compiler was not found; install g++ {build.OLDEST_GCC} or newer, or set CXX\n"


CPP = """
#include <vector>
namespace san {
struct Pair {
  int first;
  int sum() const { return first; }
};

template <class T>
void visit(const Pair& pair,  // { is no brace here
           T call) {
  for (int i = 0; i < 3; ++i) {
    call(i);
  }
}
}  // namespace san
"""


def test_lengths_of_cpp_functions_include_signatures_and_templates() -> None:
    assert size._cpp(CPP) == [1, 7]
