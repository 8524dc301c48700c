"""The CUDA sources without a GPU, compiled once for all tests: a library can be registered only once in a process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cuda_ext import schemas
from san.ops import library
from tests.ops.shim import compile_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The CUDA operators compiled by g++, as torch.ops.san_shim on CPU tensors."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder in one that they share
        folder = folder.parent
    built = folder / "shim.so"
    with open(folder / "shim.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_shim(built)
    assert library.load(), "the shim is compared with the CPU's kernels"
    schemas.define("san_shim")
    torch.ops.load_library(built)
    return torch.ops.san_shim


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In which the shim runs blocks and threads: what depends on it lacks a barrier."""
    if request.param == "backwards":
        monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    yield request.param
