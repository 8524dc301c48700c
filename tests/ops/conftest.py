"""The CUDA sources without a GPU, compiled once for all tests of them: a library can be registered only once in a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cuda_ext import build
from san.ops import library


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The CUDA operators compiled by g++, as torch.ops.san_shim on CPU tensors."""
    folder = tmp_path_factory.mktemp("shim")
    toolchain = build.Toolchain.find("0")
    sources = [build.SOURCE_DIR / "library.cpp", *sorted(build.SOURCE_DIR.glob("cuda/*.cu"))]
    objects = [folder / f"{source.name}.o" for source in sources]
    commands = [build.compile_command(s, o, toolchain, shim=True) for s, o in zip(sources, objects, strict=True)]
    build.run_all([[*command, "-Werror", "-O1"] for command in commands])
    build.run(build.link_command(objects, folder / "shim.so", toolchain))
    assert library.load(), "the shim is compared with the CPU's kernels"
    torch.ops.load_library(folder / "shim.so")
    return torch.ops.san_shim


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In which the shim runs blocks and threads: what depends on it lacks a barrier."""
    if request.param == "backwards":
        monkeypatch.setenv("SAN_SHIM_REVERSE", "1")
    yield request.param
