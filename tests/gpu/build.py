"""The first case: builds the kernels and describes the machine."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cuda_ext import build, schemas
from san.ops import library
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.ops.shim import compile_shim

SHIM = "shim.so"


def build_kernels(settings: Settings) -> Iterator[Row]:
    """Builds the library unless it is in the cache."""
    yield {"machine": machine(settings)}
    began = time.perf_counter()
    found = {part: getattr(built, "name", str(built)) for part, built in build.libraries().items()}
    yield {"libraries": found, "build_seconds": round(time.perf_counter() - began, 1)}
    missing = library.missing(settings.device)
    yield {"check": f"the {settings.device} kernels run here", "passed": missing is None, "missing": missing}


def build_shim(settings: Settings) -> Iterator[Row]:
    """Compiles the CUDA sources with g++ to run them on the CPU."""
    if settings.on_gpu:
        raise SkipCase("only for a run on the CPU")
    compile_shim(Path(settings.work, SHIM))
    yield {"check": "the CUDA sources compile for the shim", "passed": True}


@functools.cache
def kernels(settings: Settings) -> Any:
    """Returns the operators for the checks: the built library on a GPU, the shim of the CUDA sources on a CPU."""
    assert library.missing("cpu") is None, "the kernels could not be loaded"
    shim = Path(settings.work, SHIM)
    if settings.on_gpu or not shim.exists():
        return torch.ops.san
    schemas.define("san_shim")
    torch.ops.load_library(shim)
    return torch.ops.san_shim


def machine(settings: Settings) -> Row:
    """Returns hardware, versions and date."""
    facts: Row = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": settings.device,
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _output_of("git", "rev-parse", "--short", "HEAD"),
    }
    if settings.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_GiB": round(properties.total_memory / 2**30, 1),
            "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
            "cuda": torch.version.cuda,
            "nvcc": _nvcc(),
        }
    return facts


def _nvcc() -> str:
    with contextlib.suppress(build.BuildError):
        return build.version_text(build.find_nvcc()).strip().split("\n")[-1]
    return "none"


def _cpu_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def _output_of(*command: str) -> str:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, cwd=build.SOURCE_DIR).stdout.strip()
    return ""


CASES = [
    Case("build", "kernels", build_kernels, priority=0, limit=600),
    Case("correctness", "the shim", build_shim, priority=1, limit=300),
]
