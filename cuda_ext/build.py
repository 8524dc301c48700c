"""Builds the kernels as shared libraries for torch's stable ABI, which does not depend on the Python version.

There are three libraries, `PARTS`, which are built and disabled independently. The name of their cache folder contains a hash
of the sources, the compiler flags and torch's version, so changed sources never use an old binary. A lock prevents concurrent
builds by several processes or nodes. The name of a library contains a hash of its compilers' versions and of the GPUs that it
is compiled for: another compiler builds a new one, and a machine without a compiler uses the newest one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from cuda_ext import schemas

SOURCE_DIR = Path(__file__).resolve().parent
PREBUILT = SOURCE_DIR / "prebuilt"
"""Libraries in a wheel of `make wheel`."""
# By part, the sources to compile once.
PARTS = {"cpu": "cpu/*.cpp", "resample": "resample.cpp", "cuda": "cuda/*.cu"}
CUDA_ARCHITECTURES = ("80", "90", "100", "120")
"""Compute capabilities times 10, of those that nvcc supports. Their code also runs on later minor versions, such as 8.9."""
# Symbols of torch 2.11, the oldest supported; a library built so loads in later releases too.
TORCH_TARGET = "0x020b000000000000"
CXX_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")
# Without -falign-loops, some loops take 15% longer after unrelated changes.
SIMD_FLAGS = ("-Wno-psabi", "-falign-loops=64")
# The sources in cpu/simd are compiled for each of these. Each call of an operator uses the best that the CPU supports.
INSTRUCTION_SETS = (
    {"baseline": "x86-64", "v3": "x86-64-v3", "v4": "x86-64-v4"} if platform.machine() == "x86_64" else {"baseline": ""}
)
# With --threads 0, nvcc compiles for all GPUs at once.
NVCC_FLAGS = (
    *("-std=c++20", "-O3", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "--expt-extended-lambda"),
    *("--threads", "0"),
)
# The oldest that compile C++20.
OLDEST_GCC, OLDEST_NVCC = 11, 12


class BuildError(RuntimeError):
    """A part of the extension cannot be built here; the text says why, as a clause without a final period."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers of a part. `nvcc` is None for one without CUDA."""

    cxx: str
    nvcc: str | None = None

    @staticmethod
    def find(*, cuda: bool = False) -> Toolchain:
        """Finds g++ or what CXX names and, with `cuda`, nvcc.

        Raises:
            BuildError: a compiler is missing or too old.
        """
        return Toolchain(find_cxx(), find_nvcc() if cuda else None)

    def name(self) -> str:
        """A digest of the compilers' versions, because an update keeps their paths, and of the GPUs."""
        state = [version_text(path) for path in (self.cxx, self.nvcc) if path is not None]
        state += gpu_flags(self.nvcc) if self.nvcc is not None else []
        return hashlib.sha256(repr(state).encode()).hexdigest()[:8]


@functools.cache
def version_text(compiler: str) -> str:
    """What a compiler prints as its version."""
    return _said_by([compiler, "--version"]).stdout


def _said_by(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a compiler, with messages in English. Source lines that they quote may not be UTF-8."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=os.environ | {"LC_ALL": "C"})


def find_cxx() -> str:
    """Path of g++, or of the GCC that CXX names.

    Raises:
        BuildError: it is missing, too old, or not GCC, whose vector shuffles the sources use.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"{name} was not found; install g++ {OLDEST_GCC} or newer, or set CXX")
    first_line, _, others = version_text(path).partition("\n")
    version = re.search(r"\d+\.\d+", re.sub(r"\(.*?\)", "", first_line))
    if "Free Software Foundation" not in others or version is None:
        raise BuildError(f"{path} is not g++ ({first_line}); install g++ {OLDEST_GCC} or newer, or set CXX")
    if int(version[0].split(".")[0]) < OLDEST_GCC:
        raise BuildError(f"g++ {version[0]} at {path} is too old; install g++ {OLDEST_GCC} or newer, or set CXX")
    return path


def find_nvcc() -> str:
    """Path of the first nvcc that is new enough, and whose major version is not newer than that of torch's CUDA.

    Looks in CUDA_HOME, on PATH, in conda's and pip's packages, and in the usual folder.

    Raises:
        BuildError: there is none.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CONDA_PREFIX"), sys.prefix]
    first, *others = [f"{home}/bin" if home else "" for home in homes]
    pip = sorted(map(str, Path(torch.__file__).parents[1].glob("nvidia/*/bin")))
    folders = [first, *os.environ.get("PATH", "").split(os.pathsep), *others, *pip, "/usr/local/cuda/bin"]
    newest = int((torch.version.cuda or "99").split(".")[0])  # a newer toolkit's programs would need a newer driver than torch
    unfit = None
    for path in filter(None, (shutil.which("nvcc", path=folder) for folder in folders)):
        major, minor = nvcc_version(path)
        if OLDEST_NVCC <= major <= newest:
            return path
        if major < OLDEST_NVCC:
            problem = f"is too old; install the CUDA toolkit {OLDEST_NVCC} or newer"
        else:
            problem = f"is newer than torch's CUDA {torch.version.cuda}; install the CUDA toolkit {newest}"
        unfit = unfit or f"nvcc {major}.{minor} at {path} {problem}"
    raise BuildError(unfit or f"nvcc was not found; install the CUDA toolkit {OLDEST_NVCC} or newer, or set CUDA_HOME")


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Major and minor version of nvcc, or the oldest supported one if it prints none."""
    version = re.search(r"release (\d+)\.(\d+)", version_text(nvcc))
    return (int(version[1]), int(version[2])) if version else (OLDEST_NVCC, 0)


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver supports, or None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


@functools.cache
def native_architectures(nvcc: str) -> tuple[str, ...]:
    """Those of `CUDA_ARCHITECTURES` that nvcc supports."""
    supported = _said_by([nvcc, "--list-gpu-code"]).stdout.split()
    return tuple(architecture for architecture in CUDA_ARCHITECTURES if f"sm_{architecture}" in supported)


def has_ptx(nvcc: str) -> bool:
    """Whether this nvcc's libraries contain PTX, which the driver compiles for GPUs without native code.

    A driver runs native code of later minor versions of CUDA, but does not compile their PTX.
    """
    driver = driver_version()
    return driver is None or nvcc_version(nvcc) <= driver


def gpu_flags(nvcc: str) -> list[str]:
    """Flags that select the GPUs to compile for."""
    native = native_architectures(nvcc)
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in native]
    # Every later GPU accepts the oldest PTX. The newest would leave out GPUs between two architectures, such as 11.0.
    return flags + [f"-gencode=arch=compute_{a},code=compute_{a}" for a in native[:1] if has_ptx(nvcc)]


def gpu_refusal(capability: tuple[int, int]) -> str | None:
    """Why the kernels that nvcc compiles here do not run on a GPU of at least the oldest architecture, or None."""
    try:
        nvcc = find_nvcc()
    except BuildError:
        return None  # without nvcc, a library in the cache may run
    major, minor = capability
    native = [divmod(int(architecture), 10) for architecture in native_architectures(nvcc)]
    if has_ptx(nvcc) or any(major == have and minor >= least for have, least in native):
        return None
    release, driver = (".".join(map(str, version or ())) for version in (nvcc_version(nvcc), driver_version()))
    return (
        f"nvcc {release} at {nvcc} has no native code for this GPU (compute capability {major}.{minor}), and the driver, "
        f"which supports CUDA {driver}, cannot compile its PTX; install the CUDA toolkit {driver} or update the driver"
    )


def cuda_refusal() -> str | None:
    """Why the CUDA kernels are not built, which takes minutes, or None: SAN_CUDA (`auto`, `0` or `1`), a CPU build of
    torch or, with `auto`, no GPU."""
    choice = os.environ.get("SAN_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        return f"SAN_CUDA must be auto, 0 or 1, not {choice!r}"
    if choice == "0":
        return "SAN_CUDA=0 disables them; unset it"
    if torch.version.cuda is None:
        return "this torch was built without CUDA; install a CUDA build of torch"
    if choice == "auto" and torch.cuda.device_count() == 0:
        return "torch sees no GPU; SAN_CUDA=1 builds them nevertheless"
    return None


def cuda_folders(nvcc: str, kind: str, file: str) -> list[Path]:
    """Folders of nvcc's toolkit that hold a file: `kind` is `lib` or `include`.

    NVIDIA's installer keeps libraries in lib64, conda in lib or targets, Debian in a folder of lib, pip in lib.
    """
    root = Path(nvcc).resolve().parent.parent
    patterns = (f"{kind}64", kind, f"targets/*/{kind}", f"{kind}/*-linux-gnu")
    return [folder for pattern in patterns for folder in sorted(root.glob(pattern)) if (folder / file).exists()]


def sources(part: str) -> list[Path]:
    """The files of a part that are compiled once."""
    return sorted(SOURCE_DIR.glob(PARTS[part]))


def simd_command(source: Path, output: Path, toolchain: Toolchain, instruction_set: str) -> list[str]:
    """The command that compiles a source of `cpu/simd` for one of `INSTRUCTION_SETS`."""
    architecture = INSTRUCTION_SETS[instruction_set]
    flags = [*([f"-march={architecture}"] if architecture else []), f"-DSAN_ISA={instruction_set}"]
    return [toolchain.cxx, *CXX_FLAGS, *SIMD_FLAGS, *flags, "-c", str(source), "-o", str(output)]


def include_flags() -> list[str]:
    """Compiler flags that find torch's stable-ABI headers."""
    include = Path(torch.__file__).parent / "include"
    return [f"-I{include}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]


def compile_command(source: Path, output: Path, toolchain: Toolchain, shim: bool = False) -> list[str]:
    """The command that compiles one source. With `shim`, a CUDA source is compiled by g++ to run on the CPU, for tests."""
    if source.suffix == ".cu" and not shim:
        assert toolchain.nvcc is not None, "CUDA sources belong to a part that has nvcc"
        headers = cuda_folders(toolchain.nvcc, "include", "cuda_runtime.h")[:1]
        # nvcc looks into its own include folder itself; naming /usr/include would break the C++ library's headers.
        named = [f"-I{folder}" for folder in headers if folder.parents[1].name == "targets"]
        # Without CXX, nvcc chooses: g++ may be newer than it supports, and NVCC_CCBIN or its package may name an older one.
        host = ["-ccbin", toolchain.cxx] if "CXX" in os.environ and "NVCC_CCBIN" not in os.environ else []
        return [
            toolchain.nvcc,
            *host,
            *NVCC_FLAGS,
            "-DUSE_CUDA",
            *gpu_flags(toolchain.nvcc),
            *include_flags(),
            *named,
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
        folders = cuda_folders(toolchain.nvcc, "lib", "libcudart_static.a")
        command += ["-ltorch_cuda", *(f"-L{folder}" for folder in folders), "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
    return command


def run(command: list[str]) -> None:
    """Runs a compiler; what it printed becomes the error."""
    done = _said_by(command)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def run_all(commands: list[list[str]]) -> None:
    """Runs commands in parallel, one per CPU."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(max_workers=cpus) as pool:
        list(pool.map(run, commands))


def build(part: str, output: Path, toolchain: Toolchain) -> None:
    """Compiles the sources of a part side by side and links them into `output`.

    Raises:
        BuildError: a compiler failed; all that it printed is beside `output`, in a file that ends with .log.
    """
    objects_dir = output.with_suffix(".objects")
    objects_dir.mkdir(parents=True, exist_ok=True)
    objects = [objects_dir / f"{source.name}.o" for source in sources(part)]
    commands = [compile_command(s, o, toolchain) for s, o in zip(sources(part), objects, strict=True)]
    if part == "cpu":
        for source, instruction_set in itertools.product(sorted(SOURCE_DIR.glob("cpu/simd/*.cpp")), INSTRUCTION_SETS):
            objects.append(objects_dir / f"simd_{source.name}_{instruction_set}.o")
            commands.append(simd_command(source, objects[-1], toolchain, instruction_set))
    partial, log = output.with_suffix(".partial"), output.with_suffix(".log")
    try:
        run_all(commands)
        run(link_command(objects, partial, toolchain))
    except BuildError as error:
        log.write_text(str(error), encoding="utf-8")
        raise failure(log) from None
    finally:
        shutil.rmtree(objects_dir)
    partial.rename(output)
    log.unlink(missing_ok=True)


def failure(log: Path) -> BuildError:
    """The error of a build that left this log: the first line that is one."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]  # behind the command
    first = next(
        (line for line in lines if re.search(r"\b(error|fatal|cannot|undefined)\b", line)), "the compiler printed no error"
    )
    return BuildError(f"compilation failed: {first.strip()}; `python -m cuda_ext.build` tries again; the full log is {log}")


def digest() -> str:
    """Names the builds of these sources: another name after a change of sources, these flags, torch or the kind of machine."""
    state = hashlib.sha256()
    for path in sorted(p for p in SOURCE_DIR.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu")):
        state.update(path.relative_to(SOURCE_DIR).as_posix().encode() + path.read_bytes())
    flags = CXX_FLAGS, SIMD_FLAGS, INSTRUCTION_SETS, NVCC_FLAGS, CUDA_ARCHITECTURES, TORCH_TARGET
    state.update(repr((flags, platform.machine(), torch.__version__, torch.version.cuda)).encode())
    return state.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled kernels are kept, each in a folder whose name changes with the sources.

    Raises:
        BuildError: the user has no home folder, and SAN_CACHE is not set.
    """
    try:
        return Path(os.environ.get("SAN_CACHE") or Path.home() / ".cache" / "san")
    except RuntimeError:
        raise BuildError("this user has no home folder; set SAN_CACHE to a writable folder") from None


def libraries(retry: bool = False) -> dict[str, Path | BuildError]:
    """By part, its library in the cache, built now if it is not there yet, or why there is none.

    A build that failed is only repeated with `retry`, because it can take minutes.
    """
    refusal = cuda_refusal()
    parts = [part for part in PARTS if part != "cuda" or refusal is None]
    built: dict[str, Path | BuildError] = {"cuda": BuildError(refusal)} if refusal is not None else {}
    built |= {part: library for part in parts if (library := PREBUILT / f"{part}.so").exists()}
    try:
        folder = cache_folder() / f"ext-{digest()}"
    except BuildError as error:
        return dict.fromkeys(parts, error) | built
    wanted: dict[str, tuple[Path, Toolchain]] = {}
    for part in (part for part in parts if part not in built):
        try:
            toolchain = Toolchain.find(cuda=part == "cuda")
            library = folder / f"{part}-{toolchain.name()}.so"
            if library.exists():
                built[part] = library
            else:
                wanted[part] = library, toolchain
        except BuildError as error:
            built[part] = error
        except OSError as error:
            built[part] = BuildError(f"cannot read {folder} ({error}); set SAN_CACHE to a writable folder")
    if wanted:
        built |= _build_once(folder, wanted, retry)
    for part in parts:
        if isinstance(built[part], BuildError):
            with contextlib.suppress(OSError, ValueError):  # the folder cannot be read, or has no other
                built[part] = max(folder.glob(f"{part}-*.so"), key=lambda path: path.stat().st_mtime)
    return built


def _build_once(folder: Path, wanted: dict[str, tuple[Path, Toolchain]], retry: bool) -> dict[str, Path | BuildError]:
    """Builds parts that no process has built or failed to build; with `retry`, failures before now do not count."""
    built: dict[str, Path | BuildError] = {}
    start = time.time()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for part, (library, toolchain) in wanted.items():
                log = library.with_suffix(".log")
                if library.exists():
                    built[part] = library
                elif log.exists() and (not retry or log.stat().st_mtime > start):
                    built[part] = failure(log)
                else:
                    built[part] = _build_aloud(part, library, toolchain)
    except OSError as error:
        reason = f"cannot write to {folder} ({error}); set SAN_CACHE to a writable folder"
        built |= {part: BuildError(reason) for part in wanted.keys() - built.keys()}
    return built


def _build_aloud(part: str, library: Path, toolchain: Toolchain) -> Path | BuildError:
    kind = {"cpu": "CPU", "resample": "image", "cuda": "CUDA"}[part]
    print(f"san: building the {kind} kernels in {library.parent} (only once) ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        build(part, library, toolchain)
    except BuildError as error:
        return error
    print(f"san: built in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return library


@functools.cache
def load() -> dict[str, str]:
    """Defines the operators and loads their kernels, once per process.

    Returns the reason for each missing part, without a final period.
    """
    schemas.define("san")
    missing = {}
    for part, library in libraries().items():
        if isinstance(library, BuildError):
            missing[part] = str(library)
            continue
        try:
            torch.ops.load_library(library)
        except OSError as error:
            missing[part] = f"cannot load the kernels: {error}; delete {library} to rebuild them"
    return missing


def toolchains() -> dict[str, str]:
    """The compilers and their versions, or why they cannot be used."""
    compilers = {}
    for name, find in (("g++", find_cxx), ("nvcc", find_nvcc)):
        try:
            path = find()
            named = [line for line in version_text(path).splitlines() if name in line or "release" in line]
            compilers[name] = f"{path} ({named[-1] if named else 'unknown version'})"
        except BuildError as error:
            compilers[name] = str(error)
    return compilers


def main() -> None:
    """Builds what is missing, also what failed before. Fails if a part cannot be built, the CUDA part only if SAN_CUDA is 1."""
    insists_on_cuda = os.environ.get("SAN_CUDA", "auto") not in ("auto", "0")
    failed = False
    for part, library in libraries(retry=True).items():
        if isinstance(library, Path):
            print(library)
        elif part != "cuda" or insists_on_cuda or cuda_refusal() is None:  # no message on machines where nobody expects CUDA
            print(f"san: the {part} kernels are missing: {library}", file=sys.stderr)
            failed = failed or part != "cuda" or insists_on_cuda
    sys.exit(failed)


if __name__ == "__main__":
    main()
