"""Building the extension: compilers, error messages, cached libraries, processes that build at the same time."""

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

GCC = "g++ (GCC) {} 20210514 (Red Hat 8.5.0-4)\nCopyright (C) Free Software Foundation, Inc."
NVCC = "Cuda compilation tools, release {0}, V{0}.0"


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
    """Simulates a CUDA build of torch and a GPU, and hides every nvcc except the fake ones of tests."""
    which = shutil.which

    def which_of_test(name: str, path: str | None = None) -> str | None:
        found = which(name, path=path)
        return found if name != "nvcc" or (found or "").startswith(str(tmp_path)) else None

    monkeypatch.setattr(shutil, "which", which_of_test)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("CUDA_HOME", "CONDA_PREFIX", "SAN_CUDA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, with a fake compiler that writes empty libraries."""
    monkeypatch.setenv("SAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "g++-12", GCC.format("12.2.0"), WRITES_ITS_OUTPUT)))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("choice", "cuda", "gpus", "word"),
    [
        ("1", "13.0", 0, "None"),
        ("auto", "13.0", 1, "None"),
        ("auto", "13.0", 0, "no GPU"),
        ("yes", "13.0", 1, "yes"),
        ("0", "13.0", 1, "SAN_CUDA=0"),
        ("auto", None, 0, "without CUDA"),
        ("1", None, 0, "without CUDA"),
    ],
)
def test_reason_for_missing_cuda_kernels(
    choice: str, cuda: str | None, gpus: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAN_CUDA", choice)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert word in str(build.cuda_refusal())


@pytest.mark.parametrize(
    ("version", "word"),
    [(GCC.format("8.5.0"), "8.5"), (GCC.format("11.1.0"), None), ("clang version 18.1.3", "not g.. .clang version 18")],
)
def test_rejects_an_old_or_missing_gcc_and_other_compilers(
    version: str, word: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(compiler(tmp_path / "g++", version))
    monkeypatch.setenv("CXX", path)
    if word is None:
        assert build.find_cxx() == path
        return
    for cxx, words in ((path, word), ("no-such-compiler", "no-such-compiler")):
        monkeypatch.setenv("CXX", cxx)
        with pytest.raises(build.BuildError, match=words):
            build.find_cxx()


@pytest.mark.parametrize(
    ("version", "torch_version", "fits"), [("11.8", "13.0", False), ("12.0", "13.0", True), ("13.0", "12.6", False)]
)
def test_uses_an_nvcc_that_fits_torch(
    version: str, torch_version: str, fits: bool, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(build.BuildError, match="nvcc was not found"):
        build.find_nvcc()
    monkeypatch.setattr(torch.version, "cuda", torch_version)
    first = compiler(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format(version))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if not fits:
        with pytest.raises(build.BuildError, match=version):
            build.find_nvcc()
    other = compiler(tmp_path / "other" / "nvcc", NVCC.format("12.6"))
    monkeypatch.setenv("PATH", str(other.parent))
    assert build.find_nvcc() == str(first if fits else other)


@pytest.mark.parametrize(
    ("driver", "codes"),
    [((13, 1), ["sm_80", "sm_90", "sm_100", "compute_80"]), ((13, 0), ["sm_80", "sm_90", "sm_100"])],
    ids=["new driver", "driver older than nvcc"],
)
def test_compiles_for_gpus_of_nvcc_and_driver(
    driver: tuple[int, int], codes: list[str], no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver cannot compile PTX of a newer nvcc."""
    monkeypatch.setattr(build, "driver_version", lambda: driver)
    nvcc = compiler(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format("13.1"), gpus="sm_75 sm_80 sm_90 sm_100 sm_110")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    command = build.compile_command(build.sources("cuda")[0], tmp_path / "out", build.Toolchain("g++", str(nvcc)))
    assert [word.split(",code=")[1] for word in command if word.startswith("-gencode")] == codes
    assert (missing_on([(9, 0), (11, 0)], monkeypatch) is None) == ("compute_80" in codes)


@pytest.mark.parametrize(
    ("variables", "named"), [(["CXX"], True), ([], False), (["CXX", "NVCC_CCBIN"], False)], ids=["CXX", "none", "nvcc's own"]
)
def test_nvcc_uses_the_chosen_cxx(
    variables: list[str], named: bool, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CXX", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "g++-12")
    toolchain = build.Toolchain("/usr/bin/g++-12", str(compiler(tmp_path / "cuda/bin/nvcc", NVCC.format("13.0"))))
    command = build.compile_command(build.sources("cuda")[0], tmp_path / "out", toolchain)
    assert (command[1:3] == ["-ccbin", "/usr/bin/g++-12"]) == named == ("-ccbin" in command)


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
    assert all("no-such-compiler" in str(reason) for reason in build.libraries().values())


def test_failed_build_disables_one_part_only(
    cache: Path, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = "printf '#include warning \\351\\n' >&2; echo 'relation.cu(7): error: no such type' >&2; exit 1"
    nvcc = compiler(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format("12.0"), fails)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    found = build.libraries()
    assert [part for part in build.PARTS if isinstance(found[part], Path)] == ["cpu", "resample"]
    log = next(cache.glob("*/cuda-*.log"))
    assert "relation.cu(7): error: no such type" in str(found["cuda"]) and str(log) in str(found["cuda"])
    assert "#include warning" in log.read_text() and not list(cache.glob("*/*.objects"))
    monkeypatch.setenv("SAN_CUDA", "0")
    assert "SAN_CUDA=0" in str(build.libraries()["cuda"])
    monkeypatch.setenv("SAN_CUDA", "auto")
    compiler(nvcc, NVCC.format("12.0"), WRITES_ITS_OUTPUT)
    assert str(build.libraries()["cuda"]) == str(found["cuda"]), "a failed build is not repeated by every process"
    with pytest.raises(SystemExit) as ended:
        build.main()
    assert ended.value.code == 0 and isinstance(build.libraries()["cuda"], Path) and not log.exists()


def test_error_for_a_cache_without_write_access(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the folder is a file, or not even its status can be read, as for a name that is too long."""
    cache.touch()
    for folder in (str(cache), "x" * 300):
        monkeypatch.setenv("SAN_CACHE", folder)
        reason = str(build.libraries()["cpu"])
        assert folder in reason and "SAN_CACHE" in reason


def test_error_without_a_home_folder(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Libraries of a wheel need none."""

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("SAN_CACHE")
    assert "set SAN_CACHE" in str(build.libraries()["cpu"])
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    (tmp_path / "cpu.so").touch()
    assert build.libraries()["cpu"] == tmp_path / "cpu.so"


@pytest.mark.parametrize(("choice", "code"), [("auto", 0), ("1", 1), ("0", 0)])
def test_command_fails_without_cuda_only_if_cuda_is_required(
    choice: str, code: int, cache: Path, no_nvcc: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAN_CUDA", choice)
    with pytest.raises(SystemExit) as caught:
        build.main()
    assert int(caught.value.code or 0) == code
    assert ("cuda" in capsys.readouterr().err) == (choice != "0")


SHOWS_ITSELF_AT_THE_LOCK = """
import fcntl, os, pathlib
from cuda_ext import build
flock = fcntl.flock
def shown(*arguments):
    pathlib.Path(os.environ["SAN_CACHE"], f"{os.getpid()}.here").touch()
    flock(*arguments)
fcntl.flock = shown
build.main()
"""


@pytest.mark.slow
def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    """Nothing is compiled until every process is at the lock or, without one, compiles."""
    command = [sys.executable, "-c", SHOWS_ITSELF_AT_THE_LOCK]
    root = build.SOURCE_DIR.parent
    wait = 'touch "$SAN_CACHE/$PPID.here"; until [ $(ls "$SAN_CACHE" | grep -c here) = 3 ]; do sleep 0.02; done'
    cxx = compiler(tmp_path / "g++-12", GCC.format("12.2.0"), f"{wait}; {WRITES_ITS_OUTPUT}")
    env = {"PATH": "/usr/bin:/bin", "SAN_CACHE": str(tmp_path), "SAN_CUDA": "0", "HOME": str(tmp_path), "CXX": str(cxx)}
    running = [
        subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("building the CPU kernels" in err for _, err in outputs) == 1


def test_warns_and_uses_the_reference_without_a_compiler(tmp_path: Path) -> None:
    code = "import torch, san; print(san.ops.unfold(torch.zeros(1, 1, 3, 3), 3).shape)"
    env = {"PATH": str(tmp_path), "SAN_CACHE": str(tmp_path), "HOME": str(tmp_path), "CXX": "none"}
    done = subprocess.run([sys.executable, "-c", code], cwd=build.SOURCE_DIR.parent, env=env, capture_output=True, text=True)
    assert "torch.Size([1, 1, 9, 9])" in done.stdout
    assert "reference operators on the CPU" in done.stderr and "g++" in done.stderr


def missing_on(gpus: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Returns `library.missing("cuda")` on a machine with these GPUs."""
    monkeypatch.setattr(library, "load_kernels", lambda: {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device])
    return library.missing("cuda")


@pytest.mark.parametrize(
    ("gpus", "word"), [([(9, 0), (7, 0)], "GPU 1 has compute capability 7.0"), ([(8, 0), (8, 9)], None), ([], None)]
)
def test_warns_once_and_uses_the_reference_on_old_gpus(
    gpus: list[tuple[int, int]], word: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = missing_on(gpus, monkeypatch)
    assert reason is None if word is None else word in str(reason)
    library.runs_on.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [library.runs_on("cuda") for _ in range(2)] == [reason is None] * 2
    library.runs_on.cache_clear()
    assert len(caught) == (reason is not None)
