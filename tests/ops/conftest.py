"""Loads the kernels, and compiles the CUDA sources for the CPU once, because a process can register a library only once."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ext import build, schemas
from san.ops import library
from tests.ops.shim import compile_shim, shim_name

assert library.missing("cpu") is None, "these tests need the compiled kernels"


@pytest.fixture(scope="session")
def shim_library() -> Path:
    """The CUDA sources compiled with g++. Kept until the sources change."""
    built = build.cache_folder() / shim_name() / "shim.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_shim(built)
    return built


@pytest.fixture(scope="session")
def shim(shim_library: Path) -> Any:
    """The CUDA operators as torch.ops.san_shim on CPU tensors."""
    schemas.define("san_shim")
    torch.ops.load_library(shim_library)
    return torch.ops.san_shim
