"""Compiles the CUDA sources with g++ to run them on the CPU."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cuda_ext import build

PLAN = Path(__file__).with_name("plan.cu")


def shim_name() -> str:
    """Returns a name that changes with the sources."""
    return f"shim-{build.digest()}-{hashlib.sha256(PLAN.read_bytes()).hexdigest()[:8]}"


def compile_shim(output: Path) -> None:
    toolchain = build.Toolchain.find()
    sources = [*build.sources("cuda"), PLAN]
    objects = [output.parent / f"{source.name}.o" for source in sources]
    commands = [build.compile_command(s, o, toolchain, shim=True) for s, o in zip(sources, objects, strict=True)]
    build.run_all([[*command, f"-I{build.SOURCE_DIR}", "-Werror", "-O1"] for command in commands])
    partial = output.with_suffix(".partial")
    build.run(build.link_command(objects, partial, toolchain))
    partial.rename(output)
