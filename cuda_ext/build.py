"""Builds the kernels into one shared library of the torch stable ABI, which knows no Python version.

The library lies in a cache folder named after a digest of the sources, the compiler flags and torch's version, so a changed
source can never meet an old binary, and several processes or nodes that need it at once build it once, under a lock.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).resolve().parent
CUDA_ARCHITECTURES = ("80", "90")
# Symbols of torch 2.11, the oldest supported; a library built so loads in later releases too.
TORCH_TARGET = "0x020b000000000000"
CXX_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")
# The sources in cpu/simd are compiled for each of these and the best is picked when the library is loaded.
INSTRUCTION_SETS = (
    {"baseline": "x86-64", "v3": "x86-64-v3", "v4": "x86-64-v4"} if platform.machine() == "x86_64" else {"baseline": ""}
)
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "--expt-extended-lambda")


class BuildError(RuntimeError):
    """The extension cannot be built here; the text says what is missing or what the compiler said."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers of a build. `nvcc` is None for a build without CUDA."""

    cxx: str
    nvcc: str | None

    @staticmethod
    def find(cuda: str | None = None) -> Toolchain:
        """Looks the compilers up. `cuda` (default: the environment's SAN_CUDA) is `auto`, `0` or `1`.

        `auto` builds CUDA kernels when torch was built with CUDA and nvcc is present; a GPU need not be. `1` insists.
        """
        choice = cuda if cuda is not None else os.environ.get("SAN_CUDA", "auto")
        if choice not in ("auto", "0", "1"):
            raise BuildError(f"SAN_CUDA must be auto, 0 or 1, not {choice!r}")
        cxx = shutil.which(os.environ.get("CXX", "g++"))
        if cxx is None:
            raise BuildError("no C++ compiler found: install g++ 11 or newer, or name one in CXX")
        nvcc = find_nvcc()
        if choice == "1" and (nvcc is None or torch.version.cuda is None):
            missing = "nvcc was not found (set CUDA_HOME)" if nvcc is None else "this torch was built without CUDA"
            raise BuildError(f"SAN_CUDA=1 asks for CUDA kernels, but {missing}")
        wanted = choice == "1" or (choice == "auto" and torch.version.cuda is not None)
        return Toolchain(cxx, nvcc if wanted else None)

    def versions(self) -> list[str]:
        """What the compilers say of themselves: after an update a path is the same, and the compiler is not."""
        compilers = [self.cxx] if self.nvcc is None else [self.cxx, self.nvcc]
        return [subprocess.run([path, "--version"], capture_output=True, text=True).stdout for path in compilers]


def find_nvcc() -> str | None:
    """Path of nvcc in CUDA_HOME, else on PATH, else in the usual folder; None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")


def sources(cuda: bool) -> list[Path]:
    """The files to compile once: the schemas and the CPU kernels, and the CUDA kernels if asked for."""
    found = [SOURCE_DIR / "library.cpp", *sorted(SOURCE_DIR.glob("cpu/*.cpp"))]
    return found + sorted(SOURCE_DIR.glob("cuda/*.cu")) if cuda else found


def simd_command(source: Path, output: Path, toolchain: Toolchain, instruction_set: str) -> list[str]:
    """The command that compiles a source of `cpu/simd` for one of `INSTRUCTION_SETS`."""
    architecture = INSTRUCTION_SETS[instruction_set]
    flags = [*([f"-march={architecture}"] if architecture else []), f"-DSAN_ISA={instruction_set}", "-Wno-psabi"]
    return [toolchain.cxx, *CXX_FLAGS, *flags, "-c", str(source), "-o", str(output)]


def include_flags() -> list[str]:
    """Compiler flags that find torch's stable-ABI headers."""
    include = Path(torch.__file__).parent / "include"
    return [f"-I{include}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]


def compile_command(source: Path, output: Path, toolchain: Toolchain, shim: bool = False) -> list[str]:
    """The command that compiles one source. With `shim`, a CUDA source is compiled by g++ to run on the CPU, for tests."""
    if source.suffix == ".cu" and not shim:
        assert toolchain.nvcc is not None, "CUDA sources are listed only when nvcc was found"
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCHITECTURES]
        newest = CUDA_ARCHITECTURES[-1]
        codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")  # later GPUs compile this at load time
        return [
            toolchain.nvcc,
            *NVCC_FLAGS,
            "-DUSE_CUDA",
            *codes,
            *include_flags(),
            "-c",
            str(source),
            "-o",
            str(output),
        ]
    language = ["-x", "c++", "-DSAN_SHIM", "-DSAN_LIBRARY=san_shim"] if shim else []
    return [toolchain.cxx, *CXX_FLAGS, *include_flags(), *language, "-c", str(source), "-o", str(output)]


def link_command(objects: list[Path], output: Path, toolchain: Toolchain) -> list[str]:
    """The command that links the objects; torch's own libraries are already loaded when ours is."""
    lib = Path(torch.__file__).parent / "lib"
    command = [toolchain.cxx, "-shared", "-o", str(output), *map(str, objects), f"-L{lib}", "-ltorch_cpu"]
    if toolchain.nvcc is not None:
        cuda_home = Path(toolchain.nvcc).resolve().parent.parent
        command += ["-ltorch_cuda", f"-L{cuda_home / 'lib64'}", "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
    return command


def run(command: list[str]) -> None:
    """Runs a compiler; its last lines become the error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[-30:])
        raise BuildError(f"building the extension failed: {' '.join(command)}\n{said}")


def run_all(commands: list[list[str]]) -> None:
    """Runs compilers side by side, as many as there are CPUs."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(max_workers=cpus) as pool:
        list(pool.map(run, commands))


def build(output: Path, toolchain: Toolchain) -> None:
    """Compiles all sources side by side and links them into `output`."""
    objects_dir = output.parent / "objects"
    objects_dir.mkdir(parents=True, exist_ok=True)
    inputs = sources(cuda=toolchain.nvcc is not None)
    objects = [objects_dir / f"{s.parent.name}_{s.name}.o" for s in inputs]
    commands = [compile_command(s, o, toolchain) for s, o in zip(inputs, objects, strict=True)]
    for source, instruction_set in itertools.product(sorted(SOURCE_DIR.glob("cpu/simd/*.cpp")), INSTRUCTION_SETS):
        objects.append(objects_dir / f"simd_{source.name}_{instruction_set}.o")
        commands.append(simd_command(source, objects[-1], toolchain, instruction_set))
    run_all(commands)
    partial = output.with_suffix(".partial")
    run(link_command(objects, partial, toolchain))
    partial.rename(output)
    shutil.rmtree(objects_dir)


def digest(toolchain: Toolchain) -> str:
    """Names a build: any change of sources, flags, compiler or torch gives another name."""
    state = hashlib.sha256()
    for path in sorted(p for p in SOURCE_DIR.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu")):
        state.update(path.relative_to(SOURCE_DIR).as_posix().encode() + path.read_bytes())
    flags = CXX_FLAGS, INSTRUCTION_SETS, NVCC_FLAGS, CUDA_ARCHITECTURES
    state.update(repr((flags, toolchain, toolchain.versions(), torch.__version__)).encode())
    return state.hexdigest()[:16]


def library() -> Path:
    """Path of the library in the cache, built now if it is not there yet.

    Raises:
        BuildError: no compiler, or it failed.
    """
    toolchain = Toolchain.find()
    cache = Path(os.environ.get("SAN_CACHE", Path.home() / ".cache" / "san"))
    folder = cache / f"ext-{digest(toolchain)}"
    built = folder / "libsan.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build_aloud(built, toolchain)
    return built


@functools.cache
def load() -> bool:
    """Loads the kernels, once per process; False, after one warning, where they cannot be built."""
    try:
        torch.ops.load_library(library())
    except (BuildError, OSError) as error:
        warnings.warn(f"san runs on its slower reference operators: {error}", stacklevel=2)
        return False
    return True


def _build_aloud(built: Path, toolchain: Toolchain) -> None:
    kinds = "CPU and CUDA" if toolchain.nvcc else "CPU"
    print(f"san: building the {kinds} kernels, once, into {built.parent} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    build(built, toolchain)
    print(f"san: built in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(library())
    except BuildError as error:
        sys.exit(f"san: {error}")
