"""Compiles the CUDA sources with g++ to run them on the CPU."""

from __future__ import annotations

from pathlib import Path

from cuda_ext import build


def compile_shim(output: Path) -> None:
    toolchain = build.Toolchain.find()
    sources = build.sources("cuda")
    objects = [output.parent / f"{source.name}.o" for source in sources]
    commands = [build.compile_command(s, o, toolchain, shim=True) for s, o in zip(sources, objects, strict=True)]
    build.run_all([[*command, "-Werror", "-O1"] for command in commands])
    build.run(build.link_command(objects, output, toolchain))
