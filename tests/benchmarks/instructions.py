"""Registers and spills of the compiled CUDA kernels; needs nvcc, but no GPU.

    python -m tests.benchmarks.instructions [--launches]

Prints a Markdown table of each source for sm_80 and sm_90. --launches runs the CUDA sources on the CPU and counts the kernels
that each operator starts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cuda_ext import build, schemas
from tests.benchmarks.tables import table
from tests.ops import cases
from tests.ops.shim import compile_shim

ARCHITECTURES = ("80", "90")
"""Those of an A100 and an H100."""


def compiled(source: Path, architecture: str, toolchain: build.Toolchain) -> list[list[str]]:
    """Returns the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = build.compile_command(source, Path(folder, "cubin"), toolchain)
        command = [word for word in command if not word.startswith("-gencode")]
        command[command.index("-c")] = "-cubin"
        log = output_of([*command, f"-arch=sm_{architecture}", "-Xptxas", "-v"])
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = re.findall(entry, log, re.S)
    names = output_of(["c++filt", *(symbol for symbol, *_ in found)]).replace("(anonymous namespace)::", "")
    names = re.sub(r"san::cuda::|c10::|^void |\(.*", "", names, flags=re.M)
    rows = [[name, registers, spills] for name, (_, spills, registers) in zip(names.splitlines(), found, strict=True)]
    return sorted(rows)


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def launches() -> dict[str, int]:
    """Returns how many kernels each operator of pairwise attention starts, from a run of the CUDA sources on the CPU."""
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        library, log = Path(folder, "shim.so"), Path(folder, "launches")
        compile_shim(library)
        schemas.define("san_shim")
        torch.ops.load_library(library)
        os.environ["SAN_SHIM_LAUNCHES"] = str(log)
        for name, arguments in calls(cases.Sizes(1, 7, 7, 7, 18, 16, 8)):
            log.write_text("")
            getattr(torch.ops.san_shim, name)(*arguments)
            counts[name] = len(log.read_text().splitlines())
    return counts


def calls(sizes: cases.Sizes) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields forward and backward operators with arguments."""
    for operator in cases.OPERATORS:
        tensors = cases.sample(operator, sizes, torch.float32)
        yield operator, (*tensors, *cases.rest(operator, sizes))
        outputs = cases.computed(operator, tensors, sizes, torch.ops.san_shim)
        gradients = cases.cotangents(outputs)
        yield f"{operator}_backward", cases.backward_arguments(operator, tensors, outputs, gradients, sizes)
    beta, weight = torch.randn(1, 64, 7, 7), torch.randn(1, 8, 49, 49)
    yield "aggregation", (beta, weight, 7)
    yield "aggregation_backward", (beta, beta, weight, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", action="store_true", help="count the kernels that each operator starts")
    arguments = parser.parse_args()
    try:
        toolchain = build.Toolchain.find(cuda=True)
    except build.BuildError as error:
        parser.exit(1, f"{error}\n")
    for architecture in ARCHITECTURES:
        for source in build.sources("cuda"):
            print(
                table(
                    f"{source.name}, sm_{architecture}",
                    ["kernel", "registers", "spilled bytes"],
                    compiled(source, architecture, toolchain),
                ),
                flush=True,
            )
    if arguments.launches:
        print(table("Kernels started", ["operator", "kernels"], list(launches().items())))


if __name__ == "__main__":
    main()
