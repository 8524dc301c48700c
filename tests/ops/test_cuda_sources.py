"""The CUDA sources without a GPU: run on the CPU through the shim, compiled by nvcc for every architecture; with one: run."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ext import build
from tests.ops.operators import CASES, OPERATORS, Case, Operator, gradients

Compilation = subprocess.CompletedProcess[str]
CUDA_SOURCES = build.sources("cuda")


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_shim_matches_reference(operator: Operator, case: Case, order: str, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if order == "backwards":
        monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    inputs = operator.sample(case)
    out, *grads = gradients(operator.reference, inputs, *operator.rest(case))
    torch.testing.assert_close(operator.kernel(shim)(*inputs, *operator.rest(case)), out, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    backward, arguments = operator.backward(cotangent, inputs, case, shim)
    ours = backward(*arguments)
    for got, want in zip(ours if isinstance(ours, tuple) else (ours,), grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_shim_equals_cpu_kernel_in_other_types(operator: Operator, dtype: torch.dtype, shim: Any) -> None:
    case = Case(2, 8, 6, 7, 5)
    inputs = operator.sample(case, dtype)
    rest = operator.rest(case)
    torch.testing.assert_close(operator.kernel(shim)(*inputs, *rest), operator.kernel()(*inputs, *rest))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_shim_takes_an_empty_batch(operator: Operator, shim: Any) -> None:
    case = Case(0, 4, 5, 5, 3)
    assert operator.kernel(shim)(*operator.sample(case), *operator.rest(case)).shape[0] == 0


def has_nvcc() -> bool:
    with contextlib.suppress(build.BuildError):
        return bool(build.find_nvcc())
    return False


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Compilation]]]:
    """What nvcc says of each source; all are compiled side by side, those that take longest first."""
    folder = tmp_path_factory.mktemp("nvcc")
    toolchain = build.Toolchain.find(cuda=True)

    def compile(source: Path) -> Compilation:
        command = build.compile_command(source, folder / f"{source.name}.o", toolchain)
        return subprocess.run([*command, "-Werror", "all-warnings", "-Xptxas", "-v"], capture_output=True, text=True)

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        longest_first = sorted(CUDA_SOURCES, key=lambda source: -source.stat().st_size)
        yield {source.name: pool.submit(compile, source) for source in longest_first}


@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc to compile for sm_80 and sm_90")
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda s: s.name)
def test_nvcc_compiles_without_warnings_or_spills(source: Path, compiled: dict[str, Future[Compilation]]) -> None:
    done = compiled[source.name].result()
    assert done.returncode == 0, done.stderr[-3000:]
    spills = [line for line in done.stderr.splitlines() if "spill" in line and "0 bytes spill stores" not in line]
    assert not spills, spills
