"""The CUDA sources of unfused operators on the CPU, through the shim; and warnings of nvcc about all CUDA sources."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ext import build
from tests.ops.cases import assert_near
from tests.ops.machine_code import NVCC_FLAGS, main_loops
from tests.ops.operators import CASES, LAYOUTS, OPERATORS, Case, Operator

CUDA_SOURCES = build.sources("cuda")
STAGE_4_BYTES, OTHER_BYTES = 64, 32
"""On the stack, at most, of the kernels for the channels of stage 4 and, on GPUs other than H100s and H200s, of others."""
INSTRUCTIONS = {
    "attend_dot.cu": {
        "attend_dot_kernel<8, 1>": 50,
        "attend_dot_center_kernel<8, 1>": 58,
        "attend_dot_around_kernel<8, 1>": 87,
        "attend_dot_kernel<16, 4>": 82,
        "attend_dot_center_kernel<16, 4>": 98,
        "attend_dot_around_kernel<16, 4>": 133,
    },
    "attend_patches.cu": {
        "attend_kernel<Operand<false>, 1>": 54,
        "attend_around_kernel<Operand<false>, 1>": 86,
        "attend_center_kernel<Operand<false>, 1>": 69,
    },
    "attend_pairs.cu": {
        "attend_pairs_kernel<Operand<false>, Stage2, 1>": 233,
        "logit_gradient_kernel<Operand<false>, Stage2, 1>": 219,
        "value_gradient_kernel<Operand<false>, Stage2, 1>": 207,
        "pair_gradient_kernel<Operand<false>, Stage2, false>": 216,
        "pair_gradient_kernel<Operand<false>, Stage2, true>": 229,
        "layer_gradient_kernel<Operand<false>, Stage2>": 160,
    },
    "pair_covariance.cu": {"gram_kernel<Operand<false>, Stage2>": 106},
}
"""Of the main loops of kernels for SAN's stage 2, as nvcc 13.0 compiles them for H100s. Their time is roughly proportional."""
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


@every_operator
def test_matches_reference(operator: Operator, shim: Any) -> None:
    for case in CASES:
        inputs = operator.sample(case)
        assert_near(operator.computed(inputs, case, shim), operator.defined(inputs, case), 1e-12, case)


@every_operator
def test_order_of_threads_does_not_change_bits(operator: Operator, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 8, 7, 7, 7)
    inputs = operator.sample(case, torch.float32)
    first = operator.computed(inputs, case, shim)
    monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    assert all(map(torch.equal, first, operator.computed(inputs, case, shim)))


@every_operator
def test_matches_cpu_kernels_in_other_types(operator: Operator, shim: Any) -> None:
    case = Case(2, 8, 6, 7, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        inputs, rest = operator.sample(case, dtype), operator.rest(case)
        torch.testing.assert_close(operator.kernel(shim)(*inputs, *rest), operator.kernel()(*inputs, *rest))


@every_operator
def test_accepts_an_empty_batch(operator: Operator, shim: Any) -> None:
    case = Case(0, 4, 5, 5, 3)
    assert operator.kernel(shim)(*operator.sample(case), *operator.rest(case)).shape[0] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_aggregation_has_the_layout_of_the_cpu_kernel(layout: str, shim: Any) -> None:
    case = Case(2, 8, 5, 4, 3)
    beta, weight = OPERATORS[-1].sample(case, torch.float32)
    beta = LAYOUTS[layout](beta)
    ours, theirs = shim.aggregation(beta, weight, 3), torch.ops.san.aggregation(beta, weight, 3)
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(beta.shape)
    of_beta, wanted = (space.aggregation_backward(grad, beta, weight, 3)[0] for space in (shim, torch.ops.san))
    assert of_beta.stride() == wanted.stride()
    torch.testing.assert_close(of_beta, wanted)


def has_nvcc() -> bool:
    with contextlib.suppress(build.BuildError):
        return bool(build.find_nvcc())
    return False


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, Future[Path]]]:
    """For each source, what nvcc printed, in a file beside the object file: for H100s or, with KERNEL_CASES=all, for every GPU.
    The longest comes first. Kept until the sources or the compilers change."""
    toolchain = build.Toolchain.find(cuda=True)
    environment = dict(os.environ)  # pytest changes the original while a thread starts a process

    def compile(source: Path, folder: Path) -> Path:
        log = folder / f"{source.name}.log"
        if not log.exists():
            command = build.compile_command(source, log.with_suffix(".o"), toolchain)
            command.remove("-O3")  # of the code for the CPU, which does not run
            command += ["-Werror", "all-warnings", "-Xptxas", "-v"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            log.with_suffix(".partial").write_text(done.stderr)
            log.with_suffix(".partial").rename(log)
        return log

    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool,
    ):
        if os.environ.get("KERNEL_CASES") != "all":
            patch.setattr(build, "gpu_flags", lambda nvcc: NVCC_FLAGS)
        folder = build.cache_folder() / f"nvcc-{build.digest()}-{toolchain.name()}"
        folder.mkdir(parents=True, exist_ok=True)
        longest_first = sorted(CUDA_SOURCES, key=lambda source: -source.stat().st_size)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield {source.name: pool.submit(compile, source, folder) for source in longest_first}
            pool.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda s: s.name)
def test_nvcc_compiles_without_warnings_or_spills(source: Path, compiled: dict[str, Future[Path]]) -> None:
    printed = compiled[source.name].result().read_text()
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
    found = {(name, int(stack), int(spilled)) for name, stack, spilled in re.findall(entry, printed, re.DOTALL)}
    assert found, "nvcc prints what each kernel needs"
    # An array is not in registers if an index is not a constant, or if there are too few of them. The kernels of stage 4 spill
    # a few values and are still 1.8 times as fast as those for all sizes (docs/results/performance.md).
    others = OTHER_BYTES if os.environ.get("KERNEL_CASES") == "all" else 0
    spilling = [kernel for kernel in found if max(kernel[1:]) > (STAGE_4_BYTES if "Stage4" in kernel[0] else others)]
    assert not spilling, spilling


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
@pytest.mark.skipif(os.environ.get("KERNEL_CASES") == "all", reason="the code of several GPUs is compressed")
@pytest.mark.parametrize("source", INSTRUCTIONS)
def test_main_loops_have_not_become_longer(source: str, compiled: dict[str, Future[Path]]) -> None:
    loops = main_loops(compiled[source].result().with_suffix(".o"))
    found = {name: loops[name].instructions for name in INSTRUCTIONS[source]}
    assert all(found[name] <= 1.05 * most for name, most in INSTRUCTIONS[source].items()), found
