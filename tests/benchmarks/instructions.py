"""What the compiler made of the CUDA kernels, and the time that follows from it; needs nvcc and nvdisasm, but no GPU.

    python -m tests.benchmarks.instructions [FILE.cu ...]

Prints Markdown tables for sm_80 and sm_90: registers, shared memory, spills, blocks per SM and instructions of each loop of
every kernel, then for the kernels of `ROWS` the predicted time at the sizes of SAN10's stages. A new kernel is a new row.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cuda_ext import build

THREADS = 256  # of every block


class Gpu(NamedTuple):
    name: str
    issue: float  # warp instructions per second, all SMs together
    bandwidth: float  # bytes per second that a copy reaches
    shared: int  # bytes per SM


GPUS = {"80": Gpu("A100", 609e9, 1.5e12, 164 << 10), "90": Gpu("H100", 927e9, 3.0e12, 228 << 10)}


class Stage(NamedTuple):
    """A stage of SAN10 at batch 32: relation (R), hidden (E), weight (G) and value (M) channels, k x k footprint, n x n map."""

    R: int
    G: int
    k: int
    n: int
    N: int = 32

    E = property(lambda s: s.G)  # the hidden channels of patchwise attention are as many as its weight channels
    M = property(lambda s: 8 * s.G)
    K = property(lambda s: s.k**2)
    P = property(lambda s: s.N * s.n**2)  # pixels of the batch
    padded = property(lambda s: s.N * (s.n + 2 * (s.k // 2)) ** 2)
    pieces = property(lambda s: s.K + 1)
    wide = property(lambda s: 4 if s.G % 4 == 0 else 2)  # neighbouring channels of a thread
    tiles_E = property(lambda s: math.ceil(s.E / 8))
    tiles_R = property(lambda s: math.ceil(s.R / 8))
    at_once_E = property(lambda s: min(4, s.tiles_E))  # tiles that a warp of patch_linear takes
    at_once_R = property(lambda s: min(4, s.tiles_R))


KEYS = ("wide", "at_once_E", "at_once_R")
STAGES = [Stage(4, 2, 3, 112), Stage(16, 8, 7, 56), Stage(32, 16, 7, 28), Stage(64, 32, 7, 14), Stage(128, 64, 7, 7)]


class Work(NamedTuple):
    """How much a kernel does at one stage: `trips` are those of its nested loops, the innermost last."""

    warps: float
    trips: tuple[float, ...]
    items: int  # marked instructions in one trip of the innermost loop, which tell how often it was unrolled
    bytes: float


class Row(NamedTuple):
    source: str
    kernel: str  # as demangled, with attributes of the stage in braces
    marker: str  # an instruction that only the innermost loop's work has
    work: Callable[[Stage], Work]


def _forward(s: Stage) -> Work:
    warps, slices = math.ceil(s.P / 16) * s.tiles_E / s.at_once_E, 1
    while slices < 8 and warps * slices < 4096:
        slices *= 2
    return Work(warps * slices, (s.pieces / slices, s.tiles_R), 3 * s.at_once_E, 4 * s.P * (2 * s.R + s.E))


def _map_gradient(s: Stage) -> Work:
    warps = math.ceil(s.padded / 16) * s.tiles_R / s.at_once_R
    return Work(warps, (s.K, s.tiles_E), 3 * s.at_once_R, 4 * (s.P * (s.R + s.E) + s.padded * s.R))


def _parameters(s: Stage) -> Work:
    tasks = s.pieces * math.ceil(s.R / 16) * s.tiles_E / s.at_once_E
    part, rows = 4 * s.pieces * 64 * s.tiles_R * s.tiles_E, s.N * s.n
    slices = min(4096 // tasks + 1, max(1, (64 << 20) // part), rows)
    trips = math.ceil(rows / slices), math.ceil(s.n / 8)
    return Work(slices * tasks, trips, 6 * s.at_once_E, 4 * s.P * (2 * s.R + s.E) + 2 * slices * part)


def _weighted_sum(s: Stage) -> Work:
    return Work(s.P * s.M / s.wide / 64, (s.k, s.k), 2 * s.wide, 4 * s.P * (2 * s.M + s.G * s.K))


def _correlation(s: Stage) -> Work:
    return Work(s.P * s.G * s.k / s.wide / 32, (s.k,), 8 * s.wide, 4 * s.P * (2 * s.M + s.G * s.K))


def _unfolded(maps: int) -> Callable[[Stage], Work]:
    return lambda s: Work(s.P * s.R / 32, (s.k, s.k), 1, 4 * s.P * s.R * (s.K + maps))


ROWS = [
    Row("patch_linear.cu", "patch_linear_kernel<true, {at_once_E}, float>", "HMMA", _forward),
    Row("patch_linear.cu", "map_gradient_kernel<true, {at_once_R}, float>", "HMMA", _map_gradient),
    Row("patch_linear.cu", "parameter_gradient_kernel<true, {at_once_E}, float>", "HMMA", _parameters),
    Row("aggregation.cu", "aggregate_kernel<{wide}, 2, float>", "FFMA", _weighted_sum),
    Row("aggregation.cu", "gather_kernel<{wide}, 2, float>", "FFMA", _weighted_sum),
    Row("aggregation.cu", "correlate_kernel<{wide}, true, float>", "FFMA", _correlation),
    Row("relation.cu", "unfold_kernel<float>", "LDG", _unfolded(1)),
    Row("relation.cu", "subtraction_kernel<float>", "FADD", _unfolded(2)),
    Row("relation.cu", "gather_footprints_kernel<false, float>", "FADD", _unfolded(1)),
]


@dataclass
class Kernel:
    name: str
    spills: int
    registers: int
    shared: int
    opcodes: list[str] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)  # first instruction, and behind the last

    def blocks(self, gpu: Gpu) -> int:
        """How many fit an SM; dynamic shared memory, which is not known here, may allow fewer."""
        by_registers = 65536 // (math.ceil(max(self.registers, 1) / 8) * 8 * THREADS)
        return min(by_registers, 2048 // THREADS, gpu.shared // (self.shared + 1024))

    def warp_instructions(self, marker: str, work: Work) -> float:
        """What one warp executes, if of the loops inside each other it enters those with most marked instructions."""
        marked = [opcode == marker for opcode in self.opcodes]
        first, end, times, total, unrolled_beside = 0, len(marked), 1.0, 0.0, False
        for trip in work.trips:
            inside = [(a, b) for a, b in self.loops if first <= a and b <= end and (a, b) != (first, end)]
            rest = [i for i in range(first, end) if not any(a <= i < b for a, b in inside)]
            total, unrolled_beside = total + times * len(rest), any(marked[i] for i in rest)
            first, end = max(inside, key=lambda loop: (sum(marked[slice(*loop)]), loop[1] - loop[0]))
            times *= trip
        unrolled = sum(marked[first:end]) / work.items
        remainder = work.trips[-1] % unrolled if unrolled_beside else 0  # the compiler put those outside the loop
        return total + times * (1 - remainder / work.trips[-1]) * (end - first) / unrolled


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def parsed(log: str, sass: str) -> list[Kernel]:
    """The kernels of a source, from what ptxas and nvdisasm print."""
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
    found = re.findall(entry, log, re.S)
    names = output_of(["c++filt", *(f[0] for f in found)]).replace("(anonymous namespace)::", "")
    names = re.sub(r"san::cuda::|c10::|^void |\(.*", "", names, flags=re.M)
    kernels = {f[0]: Kernel(n, *(int(x or 0) for x in f[1:])) for f, n in zip(found, names.splitlines(), strict=True)}
    for symbol, text in re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", sass, re.S | re.M):
        kernel, labels = kernels[symbol], dict[str, int]()
        for label, opcode, rest in re.findall(r"^(\.L\w+):|^\s+/\*\w{4,}\*/\s+(?:@!?U?P\w+ )?(\w+)([^;]*);", text, re.M):
            if label:
                labels[label] = len(kernel.opcodes)
                continue
            kernel.opcodes.append(opcode)
            target = re.search(r"`\((\.L\w+)\)", rest) if opcode == "BRA" else None
            start = labels.get(target[1]) if target else None  # None where the label is still to come: no loop
            if start is not None and start + 1 < len(kernel.opcodes):  # each kernel ends in a branch to itself
                kernel.loops.append((start, len(kernel.opcodes)))
    return list(kernels.values())


def compiled(source: Path, architecture: str, toolchain: build.Toolchain, nvdisasm: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "kernels.cubin")
        command = [word for word in build.compile_command(source, output, toolchain) if not word.startswith("-gencode")]
        command[command.index("-c")] = "-cubin"
        log = output_of([*command, f"-arch=sm_{architecture}", "-Xptxas", "-v"])
        return parsed(log, output_of([nvdisasm, "-c", str(output)]))


def table(header: list[str], rows: list[list[str]]) -> None:
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |")


def print_kernels(source: str, kernels: list[Kernel], gpu: Gpu) -> None:
    print(f"\n### {source}, {gpu.name}\n")
    rows = []
    for k in sorted(kernels, key=lambda kernel: kernel.name):
        loops = " ".join(str(end - first) for first, end in sorted(k.loops))
        rows.append([k.name, *map(str, (k.registers, k.shared, k.spills, k.blocks(gpu), len(k.opcodes))), loops])
    table(["kernel", "registers", "static shared", "spills", "blocks per SM", "instructions", "of each loop"], rows)


def print_predictions(kernels: dict[str, list[Kernel]], gpu: Gpu) -> None:
    print(f"\n### SAN10, batch 32, {gpu.name}: warp instructions per 32 pairs; ms by issue / by bytes, the larger in bold\n")
    rows = []
    for row in (row for row in ROWS if row.source in kernels):
        cells = []
        for stage in STAGES:
            name, work = row.kernel.format_map({key: getattr(stage, key) for key in KEYS}), row.work(stage)
            kernel = next(k for k in kernels[row.source] if k.name == name)
            count = work.warps * kernel.warp_instructions(row.marker, work)
            issue, memory = f"{1e3 * count / gpu.issue:.3f}", f"{1e3 * work.bytes / gpu.bandwidth:.3f}"
            times = f"**{issue}** / {memory}" if float(issue) > float(memory) else f"{issue} / **{memory}**"
            cells.append(f"{32 * count / (stage.P * stage.K):.0f}; {times}")
        rows.append([row.kernel, *cells])
    table(["kernel", *(f"stage {i + 1}" for i in range(len(STAGES)))], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, default=build.sources("cuda"))
    sources = parser.parse_args().sources
    toolchain = build.Toolchain.find(cuda=True)
    folders = [str(Path(str(toolchain.nvcc)).resolve().parent), os.environ.get("PATH", "")]
    nvdisasm = shutil.which("nvdisasm", path=os.pathsep.join(folders))
    if nvdisasm is None:
        raise SystemExit("nvdisasm was not found; run `pip install nvidia-cuda-nvdisasm` and add its folder to PATH")
    print("# Prediction, not measured\n\nAt full issue or full memory bandwidth, whichever takes longer; expect twice that.")
    for architecture, gpu in GPUS.items():
        kernels = {source.name: compiled(source, architecture, toolchain, nvdisasm) for source in sources}
        print_predictions(kernels, gpu)
        for name, some in kernels.items():
            print_kernels(name, some, gpu)


if __name__ == "__main__":
    main()
