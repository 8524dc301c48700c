"""Loads the kernels, and compiles the CUDA sources for the CPU once, because a process can register a library only once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ext import build, schemas
from san.ops import library
from tests.ops.shim import compile_shim

assert library.load(), "these tests need the compiled kernels"


@pytest.fixture(scope="session")
def shim() -> Any:
    """The CUDA operators compiled with g++, as torch.ops.san_shim on CPU tensors. Kept until the sources change."""
    built = Path(os.environ.get("SAN_CACHE", Path.home() / ".cache" / "san")) / f"shim-{build.digest()}" / "shim.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_shim(built)
    schemas.define("san_shim")
    torch.ops.load_library(built)
    return torch.ops.san_shim


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The order in which the shim runs blocks and threads. A result that depends on it shows a missing barrier."""
    if request.param == "backwards":
        monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    yield request.param
