"""Building the extension: compilers, error messages, cached libraries, processes that build at the same time."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cuda_ext import build
from san.ops import library

Compiler = Callable[[Path, str], Path]
GCC = "g++ (GCC) {} 20210514 (Red Hat 8.5.0-4)\nCopyright (C) Free Software Foundation, Inc."
NVCC = "Cuda compilation tools, release {0}, V{0}.0"
NO_NVCC = "nvcc was not found; install the CUDA toolkit 12 or newer, or set CUDA_HOME"


def compiler(path: Path, version: str, script: str = "exit 1", gpus: str = "sm_75 sm_80 sm_86 sm_90") -> Path:
    """Writes a fake compiler that prints its version and GPUs and compiles nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = f'case "$1" in --version) echo "{version}"; exit;; --list-gpu-code) printf "%s\\n" {gpus}; exit;; esac'
    path.write_text(f"#!/bin/sh\n{answers}\n{script}\n")
    path.chmod(0o755)
    return path


WRITES_ITS_OUTPUT = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulates a CUDA build of torch and hides every nvcc except the fake ones of tests."""
    which = shutil.which

    def which_of_test(name: str, path: str | None = None) -> str | None:
        found = which(name, path=path)
        return found if name != "nvcc" or (found or "").startswith(str(tmp_path)) else None

    monkeypatch.setattr(shutil, "which", which_of_test)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("CUDA_HOME", "CONDA_PREFIX", "SAN_CUDA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, with a fake compiler that writes empty libraries."""
    monkeypatch.setenv("SAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "g++-12", GCC.format("12.2.0"), WRITES_ITS_OUTPUT)))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("choice", "cuda", "reason"),
    [
        ("yes", "13.0", "SAN_CUDA must be auto, 0 or 1, not 'yes'"),
        ("0", "13.0", "SAN_CUDA=0 disables them; unset it"),
        ("auto", None, "this torch was built without CUDA; install a CUDA build of torch"),
        ("1", None, "this torch was built without CUDA; install a CUDA build of torch"),
        ("1", "13.0", None),
    ],
)
def test_reason_for_missing_cuda_kernels(
    choice: str, cuda: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAN_CUDA", choice)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert build.cuda_refusal() == reason


def test_error_for_a_missing_compiler(no_nvcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(build.BuildError, match=f"^{NO_NVCC}$"):
        build.find_nvcc()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"^no-such-compiler was not found; install g\+\+ 11 or newer, or set CXX$"):
        build.find_cxx()


@pytest.mark.parametrize(
    ("version", "torch_version", "problem"),
    [
        ("11.8", "13.0", "is too old; install the CUDA toolkit 12 or newer"),
        ("12.0", "13.0", None),
        ("13.1", "13.0", None),
        ("13.0", "12.6", "is newer than torch's CUDA 12.6; install the CUDA toolkit 12"),
    ],
)
def test_version_of_nvcc(
    version: str, torch_version: str, problem: str | None, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_version)
    nvcc = compiler(tmp_path / version / "bin" / "nvcc", NVCC.format(version))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / version))
    if problem is None:
        assert build.find_nvcc() == str(nvcc)
        return
    with pytest.raises(build.BuildError) as caught:
        build.find_nvcc()
    assert str(caught.value) == f"nvcc {version} at {nvcc} {problem}"
    suitable = compiler(tmp_path / "suitable" / "nvcc", NVCC.format("12.6"))
    monkeypatch.setenv("PATH", str(suitable.parent))
    assert build.find_nvcc() == str(suitable)


OF_CUDA_12, OF_CUDA_13 = "sm_80 sm_86 sm_90", "sm_75 sm_80 sm_90 sm_100 sm_110 sm_120"


@pytest.mark.parametrize(
    ("version", "gpus", "driver", "codes"),
    [
        ("12.0", OF_CUDA_12, (13, 0), ["sm_80", "sm_90", "compute_80"]),
        ("13.0", OF_CUDA_13, (13, 0), ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"]),
        ("13.0", OF_CUDA_13, None, ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"]),
        ("13.1", OF_CUDA_13, (13, 0), ["sm_80", "sm_90", "sm_100", "sm_120"]),
    ],
)
def test_compiles_for_gpus_of_nvcc_and_driver(
    version: str, gpus: str, driver: tuple[int, int] | None, codes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "driver_version", lambda: driver)
    toolchain = build.Toolchain("g++", str(compiler(tmp_path / "nvcc", NVCC.format(version), gpus=gpus)))
    command = build.compile_command(build.sources("cuda")[0], tmp_path / "out", toolchain)
    assert [word.split(",code=")[1] for word in command if word.startswith("-gencode")] == codes
    name = toolchain.name()
    monkeypatch.setattr(build, "driver_version", lambda: (11, 8))
    assert (toolchain.name() == name) == ("compute_80" not in codes), "another library for another driver"


def test_gpu_needs_native_code_if_the_driver_is_older_than_nvcc(
    no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "driver_version", lambda: (13, 0))
    nvcc = compiler(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format("13.1"), gpus=OF_CUDA_13)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    assert not any(missing_on([gpu], {}, monkeypatch) for gpu in ((8, 9), (9, 0), (10, 3), (12, 1)))
    assert missing_on([(9, 0), (11, 0)], {}, monkeypatch) == (
        f"nvcc 13.1 at {nvcc} has no native code for this GPU (compute capability 11.0), and the driver, which supports CUDA "
        "13.0, cannot compile its PTX; install the CUDA toolkit 13.0 or update the driver"
    )
    monkeypatch.setattr(build, "driver_version", lambda: (13, 1))
    assert missing_on([(11, 0)], {}, monkeypatch) is None
    monkeypatch.setattr(build, "driver_version", lambda: (13, 0))
    monkeypatch.delenv("CUDA_HOME")
    assert missing_on([(11, 0)], {}, monkeypatch) is None, "without nvcc, a library of the cache is tried"


@pytest.mark.parametrize(("number", "failed", "version"), [(12080, 0, (12, 8)), (13000, 0, (13, 0)), (0, 34, None)])
def test_version_of_the_driver(
    number: int, failed: int, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, driver = tmp_path / "cuda.cpp", tmp_path / "libcuda.so.1"
    source.write_text(f'extern "C" int cuDriverGetVersion(int* version) {{ *version = {number}; return {failed}; }}\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", driver, source], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(driver)) if name == driver.name else load(name))
    assert build.driver_version.__wrapped__() == version


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (GCC.format("8.5.0"), "g++ 8.5 at {} is too old; install g++ 11 or newer"),
        (GCC.format("11.1.0"), None),
        ("clang version 10.0.0-4ubuntu1", None),  # the minimum is for GCC only
    ],
)
def test_version_of_gcc(version: str, problem: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(compiler(tmp_path / "g++", version))
    monkeypatch.setenv("CXX", path)
    if problem is None:
        assert build.find_cxx() == path
        return
    with pytest.raises(build.BuildError) as caught:
        build.find_cxx()
    assert str(caught.value) == problem.format(path)


@pytest.mark.parametrize(
    ("nvcc", "libraries", "headers", "in_command"),
    [
        ("cuda-12.6/bin/nvcc", "cuda-12.6/lib64", "cuda-12.6/include", False),
        ("conda/bin/nvcc", "conda/lib", "conda/include", False),
        ("conda/bin/nvcc", "conda/targets/x86_64-linux/lib", "conda/targets/x86_64-linux/include", True),
        ("site-packages/nvidia/cu13/bin/nvcc", "site-packages/nvidia/cu13/lib", "site-packages/nvidia/cu13/include", False),
        ("usr/bin/nvcc", "usr/lib/x86_64-linux-gnu", "usr/include", False),
    ],
)
def test_finds_cuda_toolkits(
    nvcc: str, libraries: str, headers: str, in_command: bool, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = compiler(tmp_path / nvcc, NVCC.format("12.6"))
    for folder, file in ((libraries, "libcudart_static.a"), (headers, "cuda_runtime.h")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).touch()
    if "conda" in nvcc:
        monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    elif "nvidia" in nvcc:
        monkeypatch.setattr(torch, "__file__", str(tmp_path / "site-packages" / "torch" / "__init__.py"))
    else:
        monkeypatch.setenv("PATH", str(path.parent))
    assert build.find_nvcc() == str(path)
    toolchain = build.Toolchain("g++", str(path))
    assert f"-L{tmp_path / libraries}" in build.link_command([], tmp_path / "out", toolchain)
    command = build.compile_command(build.sources("cuda")[0], tmp_path / "out", toolchain)
    assert (f"-I{tmp_path / headers}" in command) == in_command


def test_digest_changes_with_every_source_and_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [build.digest()]
    copy = tmp_path / "elsewhere"
    shutil.copytree(build.SOURCE_DIR, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "SOURCE_DIR", copy)
    assert [build.digest()] == names
    for source in ("resample.cpp", "cpu/simd/vector.h", "cuda/relation.cu", "cuda/launch.h"):
        (copy / source).write_bytes((copy / source).read_bytes().replace(b"e", b"E", 1))
        names.append(build.digest())
    (copy / "cpu" / "relation.cpp").rename(copy / "cpu" / "other.cpp")
    names.append(build.digest())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.append(build.digest())
    assert len(set(names)) == len(names)


def test_name_of_a_library_contains_the_compiler_versions(tmp_path: Path) -> None:
    old, new = (str(compiler(tmp_path / version, f"g++ {version}")) for version in ("11.4.0", "12.3.0"))
    toolchains = [build.Toolchain(old), build.Toolchain(new), build.Toolchain("g++", old), build.Toolchain("g++", new)]
    assert len({toolchain.name() for toolchain in toolchains}) == 4


def test_each_source_belongs_to_one_part() -> None:
    listed = [path for part in build.PARTS for path in build.sources(part)]
    compiled_thrice = set(build.SOURCE_DIR.glob("cpu/simd/*.cpp"))
    assert len(listed) == len(set(listed))
    assert set(listed) | compiled_thrice == {p for p in build.SOURCE_DIR.rglob("*") if p.suffix in (".cpp", ".cu")}


def test_uses_the_newest_cached_library_without_a_compiler(
    cache: Path, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = compiler(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format("13.0"), WRITES_ITS_OUTPUT)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    first = build.libraries()
    assert set(first) == set(build.PARTS)
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "g++-13", GCC.format("13.1.0"), WRITES_ITS_OUTPUT)))
    newest = build.libraries()
    assert not set(first.values()) & set(newest.values()), "another compiler builds new libraries"
    for path in first.values():
        assert isinstance(path, Path)
        os.utime(path, (0, 0))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.libraries() == newest
    monkeypatch.setattr(build, "digest", lambda: "other-sources")
    assert all("no-such-compiler was not found" in str(reason) for reason in build.libraries().values())


def test_failed_build_disables_one_part_only(
    cache: Path, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = "echo '#include warning' >&2; echo 'relation.cu(7): error: no such type' >&2; exit 1"
    nvcc = compiler(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format("12.0"), fails)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    found = build.libraries()
    assert [part for part in build.PARTS if isinstance(found[part], Path)] == ["cpu", "resample"]
    log = next(cache.glob("*/cuda-*.log"))
    assert str(found["cuda"]) == f"compilation failed: relation.cu(7): error: no such type; the full log is {log}"
    assert "#include warning" in log.read_text() and not list(cache.glob("*/*.objects"))
    monkeypatch.setenv("SAN_CUDA", "0")
    assert str(build.libraries()["cuda"]) == "SAN_CUDA=0 disables them; unset it"
    monkeypatch.setenv("SAN_CUDA", "auto")
    compiler(nvcc, NVCC.format("12.0"), WRITES_ITS_OUTPUT)
    assert isinstance(build.libraries()["cuda"], Path) and not log.exists(), "the next start tries again"


def test_waiting_process_does_not_repeat_a_failed_build(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / f"ext-{build.digest()}"
    log = folder / f"cpu-{build.Toolchain.find().name()}.log"
    folder.mkdir(parents=True)
    log.write_text("g++ x.cpp\nx.cpp:1: fatal error: out of memory\n")
    os.utime(log, (time.time() + 60,) * 2)  # written while this process waits
    monkeypatch.setattr(build, "PARTS", {"cpu": build.PARTS["cpu"]})
    assert "out of memory" in str(build.libraries()["cpu"])


def test_error_for_a_cache_without_write_access(cache: Path) -> None:
    cache.touch()
    reason = str(build.libraries()["cpu"])
    assert reason.startswith(f"cannot write to {cache}/ext-") and reason.endswith("set SAN_CACHE to a writable folder")


@pytest.mark.parametrize(("choice", "code"), [("auto", 0), ("1", 1), ("0", 0)])
def test_command_fails_without_cuda_only_if_cuda_is_required(
    choice: str, code: int, cache: Path, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAN_CUDA", choice)
    with pytest.raises(SystemExit) as caught:
        build.main()
    assert int(caught.value.code or 0) == code
    assert ("san: the cuda kernels are missing" in capsys.readouterr().err) == (choice != "0")


def test_runs_commands_without_sched_getaffinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    build.run_all([["touch", str(tmp_path / name)] for name in ("a", "b")])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.slow
def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cuda_ext.build"]
    root = build.SOURCE_DIR.parent
    env = {"PATH": "/usr/bin:/bin", "SAN_CACHE": str(tmp_path), "SAN_CUDA": "0", "HOME": str(tmp_path)}
    running = [
        subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("building the CPU kernels" in err for _, err in outputs) == 1


def run_without_compiler(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    root, env = build.SOURCE_DIR.parent, env | {"CXX": "none"}
    return subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True)


def test_warns_and_uses_the_reference_without_a_compiler(tmp_path: Path) -> None:
    code = "import torch, san; print(san.ops.unfold(torch.zeros(1, 1, 3, 3), 3).shape)"
    done = run_without_compiler(code, dict.fromkeys(("PATH", "SAN_CACHE", "HOME"), str(tmp_path)))
    assert "torch.Size([1, 1, 9, 9])" in done.stdout
    assert "san falls back to its slower reference operators on the CPU: none was not found; install g++" in done.stderr


def test_uses_cached_kernels_without_a_compiler(tmp_path: Path) -> None:
    assert library.load()
    code = "import torch, san; print(san.ops.library.missing('cpu'), san.ops.unfold(torch.zeros(1, 1, 3, 3), 3).shape)"
    env = {name: value for name, value in os.environ.items() if name in ("HOME", "SAN_CACHE")}
    done = run_without_compiler(code, env | {"PATH": str(tmp_path)})
    assert done.stdout == "None torch.Size([1, 1, 9, 9])\n" and "reference operators" not in done.stderr, done.stderr


def missing_on(gpus: list[tuple[int, int]], parts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Returns `library.missing("cuda")` on a machine with these GPUs and missing parts."""
    monkeypatch.setattr(library, "load_kernels", lambda: parts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device])
    return library.missing("cuda")


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([(7, 5)], "this GPU has compute capability 7.5, but the kernels need 8.0 or higher"),
        ([(9, 0), (7, 0)], "GPU 1 has compute capability 7.0, but the kernels need 8.0 or higher"),
        ([(8, 0), (8, 9)], None),
        ([(12, 0)], None),
        ([], None),
    ],
)
def test_missing_rejects_old_gpus(gpus: list[tuple[int, int]], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_on(gpus, {}, monkeypatch) == reason
    library.runs_on.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [library.runs_on("cuda") for _ in range(2)] == [reason is None] * 2
    library.runs_on.cache_clear()
    expected = [] if reason is None else [f"san falls back to its slower reference operators on the GPU: {reason}"]
    assert [str(warning.message) for warning in caught] == expected


def test_missing_returns_the_reason_of_a_failed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_on([(9, 0)], {"cuda": NO_NVCC}, monkeypatch) == NO_NVCC
    assert library.missing("cpu") is None
