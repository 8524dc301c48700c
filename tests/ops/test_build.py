"""Building the extension: choices by environment, errors in one sentence, one build for many processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from cuda_ext import build
from san.ops import library


def test_rejects_an_unknown_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_CUDA", "yes")
    with pytest.raises(build.BuildError, match="SAN_CUDA must be auto, 0 or 1, not 'yes'"):
        build.Toolchain.find()


def test_rejects_cuda_without_a_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="SAN_CUDA=1 asks for CUDA kernels, but nvcc was not found"):
        build.Toolchain.find("1")


def test_rejects_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found: install g\\+\\+"):
        build.Toolchain.find("0")


def test_a_changed_source_has_another_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolchain = build.Toolchain.find("0")
    names = [build.digest(toolchain)]
    copy = tmp_path / "elsewhere"
    shutil.copytree(build.SOURCE_DIR, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "SOURCE_DIR", copy)
    assert [build.digest(toolchain)] == names
    for source in ("library.cpp", "cpu/simd/vector.h", "cuda/norm.cu", "cuda/sums.cuh"):
        (copy / source).write_bytes((copy / source).read_bytes().replace(b"e", b"E", 1))
        names.append(build.digest(toolchain))
    (copy / "cpu" / "norm.cpp").rename(copy / "cpu" / "other.cpp")
    names.append(build.digest(toolchain))
    assert len(set(names)) == len(names)


def test_another_version_of_a_compiler_has_another_name(tmp_path: Path) -> None:
    compiler, names = tmp_path / "g++", set()
    for version in ("11.4.0", "12.3.0"):
        compiler.write_text(f"#!/bin/sh\necho g++ {version}\n")
        compiler.chmod(0o755)
        names |= {build.digest(build.Toolchain(str(compiler), None)), build.digest(build.Toolchain("g++", str(compiler)))}
    assert len(names) == 4


def test_builds_where_the_system_does_not_tell_which_cpus_are_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    build.run_all([["touch", str(tmp_path / name)] for name in ("a", "b")])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cuda_ext.build"]
    root = build.SOURCE_DIR.parent
    env = {"PATH": "/usr/bin:/bin", "SAN_CACHE": str(tmp_path), "SAN_CUDA": "0", "HOME": str(tmp_path)}
    running = [
        subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate() for process in running]
    assert all(process.returncode == 0 for process in running), said
    assert len({out for out, _ in said}) == 1
    assert sum("building the CPU kernels" in err for _, err in said) == 1


def test_without_a_compiler_the_reference_runs_and_says_so(tmp_path: Path) -> None:
    code = "import torch, san; print(san.ops.unfold(torch.zeros(1, 1, 3, 3), 3).shape)"
    env = {"PATH": str(tmp_path), "SAN_CACHE": str(tmp_path), "HOME": str(tmp_path), "CXX": "none"}
    done = subprocess.run([sys.executable, "-c", code], cwd=build.SOURCE_DIR.parent, env=env, capture_output=True, text=True)
    assert "torch.Size([1, 1, 9, 9])" in done.stdout
    assert "san runs on its slower reference operators: no C++ compiler found" in done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA, whose kernels are built without it")
def test_a_gpu_without_cuda_kernels_gets_the_reference_and_is_told() -> None:
    assert library.load()
    library.runs_on.cache_clear()
    with pytest.warns(UserWarning, match="reference operators on the GPU: the kernels were built without CUDA"):
        assert not library.runs_on("cuda")
    assert library.runs_on("cpu")


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA, beside which a GPU can be feigned")
@pytest.mark.parametrize(
    ("gpus", "runs"), [([(7, 5)], False), ([(9, 0), (7, 0)], False), ([(8, 0), (8, 9)], True), ([(12, 0)], True), ([], True)]
)
def test_gpus_that_are_too_old_get_the_reference_and_are_told(
    gpus: list[tuple[int, int]], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device])
    with torch.library._scoped_library("san", "IMPL") as kernels, warnings.catch_warnings(record=True) as told:
        kernels.impl("unfold", lambda x, kernel_size: x, "CUDA")
        library.runs_on.cache_clear()
        assert [library.runs_on("cuda") for _ in range(2)] == [runs, runs]
        library.runs_on.cache_clear()
    words = "need compute capability 8.0 or more (A100, RTX 30 and later), and this machine has a GPU with 7."
    assert len(told) == (not runs) and all(words in str(warning.message) for warning in told)
