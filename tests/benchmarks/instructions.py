"""Instructions and registers of the compiled CUDA kernels, and predicted times; needs nvcc and nvdisasm, but no GPU.

    python -m tests.benchmarks.instructions [FILE.cu ...]

Prints Markdown tables for sm_80 and sm_90: registers, shared memory, spills, blocks per SM and instructions of each loop of
every kernel, then for the kernels of `ROWS` the predicted time at the sizes of SAN10's stages. A new kernel is a new row.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cuda_ext import build

KERNEL_COLUMNS = ["kernel", "registers", "static shared", "spills", "blocks per SM", "instructions", "of each loop"]


class Gpu(NamedTuple):
    name: str
    issue: float  # warp instructions per second, all SMs together
    bandwidth: float  # bytes per second that a copy reaches
    shared: int  # bytes per SM


GPUS = {"80": Gpu("A100", 609e9, 1.5e12, 164 << 10), "90": Gpu("H100", 927e9, 3.0e12, 228 << 10)}


class Work(NamedTuple):
    warps: float
    trips: tuple[float, ...]  # of the nested loops, the innermost last
    items: int  # marked instructions in one trip of the innermost loop, which tell how often it was unrolled
    bytes: float


class Stage:
    """A stage of SAN10: R relation, E hidden, G = E weight and M = 8 E value channels, k x k footprint, N maps of n x n."""

    def __init__(self, R: int, E: int, k: int, n: int, N: int = 32) -> None:
        self.R, self.E, self.k, self.n, self.N, self.P = R, E, k, n, N, N * n**2
        self.wide = 4 if E % 4 == 0 else 2  # neighbouring channels of a thread of `aggregation`
        self.at_once_E, self.at_once_R = (min(4, math.ceil(width / 8)) for width in (E, R))  # tiles of a `patch_linear` warp
        self.strips_E = math.ceil(E / 32)

    def forward(self) -> Work:
        warps, slices = math.ceil(self.P / 16) * self.strips_E, 1
        while slices < 8 and warps * slices < 4096:
            slices *= 2
        trips = ((self.k**2 + 1) / slices, math.ceil(self.R / 8))
        return Work(warps * slices, trips, 3 * self.at_once_E, 4 * self.P * (2 * self.R + self.E))

    def map_gradient(self) -> Work:
        padded = self.N * (self.n + 2 * (self.k // 2)) ** 2
        warps, moved = math.ceil(padded / 16) * math.ceil(self.R / 32), self.P * (self.R + self.E) + padded * self.R
        return Work(warps, (self.k**2, math.ceil(self.E / 8)), 3 * self.at_once_R, 4 * moved)

    def parameters(self) -> Work:
        tasks, rows = (self.k**2 + 1) * math.ceil(self.R / 16) * self.strips_E, self.N * self.n
        part = 4 * (self.k**2 + 1) * 64 * math.ceil(self.R / 8) * math.ceil(self.E / 8)
        slices = min(4096 // tasks + 1, max(1, (64 << 20) // part), rows)
        trips, moved = (math.ceil(rows / slices), math.ceil(self.n / 8)), 4 * self.P * (2 * self.R + self.E)
        return Work(slices * tasks, trips, 6 * self.at_once_E, moved + 2 * slices * part)

    def weighted_sum(self) -> Work:
        moved = self.P * self.E * (16 + self.k**2)
        return Work(self.P * self.E / self.wide / 8, (self.k, self.k), 2 * self.wide, 4 * moved)

    def correlation(self) -> Work:
        warps = self.P * self.E * self.k / self.wide / 32
        return self.weighted_sum()._replace(warps=warps, trips=(self.k,), items=8 * self.wide)

    def unfolded(self) -> Work:
        return Work(self.P * self.R / 32, (self.k, self.k), 1, 4 * self.P * self.R * (self.k**2 + 1))


STAGES = [Stage(4, 2, 3, 112), Stage(16, 8, 7, 56), Stage(32, 16, 7, 28), Stage(64, 32, 7, 14), Stage(128, 64, 7, 7)]


# Source, kernel as demangled for a stage s, an instruction that only the innermost loop's work has, its work.
Row = tuple[str, str, str, Callable[[Stage], Work]]
ROWS: list[Row] = [
    ("patch_linear.cu", "patch_linear_kernel<true, {s.at_once_E}, float>", "HMMA", Stage.forward),
    ("patch_linear.cu", "map_gradient_kernel<true, {s.at_once_R}, float>", "HMMA", Stage.map_gradient),
    ("patch_linear.cu", "parameter_gradient_kernel<true, {s.at_once_E}, float>", "HMMA", Stage.parameters),
    ("aggregation.cu", "aggregate_kernel<{s.wide}, 2, float>", "FFMA", Stage.weighted_sum),
    ("aggregation.cu", "gather_kernel<{s.wide}, 2, float>", "FFMA", Stage.weighted_sum),
    ("aggregation.cu", "correlate_kernel<{s.wide}, true, float>", "FFMA", Stage.correlation),
    ("relation.cu", "unfold_kernel<float>", "LDG", Stage.unfolded),
    ("relation.cu", "subtraction_kernel<float>", "FADD", Stage.unfolded),
    ("relation.cu", "gather_footprints_kernel<false, float>", "FADD", Stage.unfolded),
]


@dataclass
class Kernel:
    name: str
    spills: int
    registers: int
    shared: int
    opcodes: list[str] = field(default_factory=list, init=False)
    loops: list[tuple[int, int]] = field(default_factory=list, init=False)  # first instruction, and behind the last

    def cells(self, gpu: Gpu) -> list[object]:
        """A row of the table; dynamic shared memory, which is not known here, may allow fewer blocks per SM."""
        by_registers = 65536 // (math.ceil(self.registers / 8) * 8 * 256)  # all blocks have 256 threads
        blocks = min(by_registers, 2048 // 256, gpu.shared // (self.shared + 1024))
        loops = " ".join(str(end - first) for first, end in sorted(self.loops))
        return [self.name, self.registers, self.shared, self.spills, blocks, len(self.opcodes), loops]

    def warp_instructions(self, marker: str, work: Work) -> float:
        """What one warp executes, if of the loops inside each other it enters those with most marked instructions."""
        marked = [opcode == marker for opcode in self.opcodes]
        first, end, times, total, unrolled_beside = 0, len(marked), 1.0, 0.0, False
        for trip in work.trips:
            inside = [(a, b) for a, b in self.loops if first <= a and b <= end and (a, b) != (first, end)]
            rest = [i for i in range(first, end) if not any(a <= i < b for a, b in inside)]
            total, unrolled_beside = total + times * len(rest), any(marked[i] for i in rest)
            first, end = max(inside, key=lambda loop: (sum(marked[slice(*loop)]), loop[1] - loop[0]), default=(first, end))
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
    numbers = ([int(number or 0) for number in f[1:]] for f in found)
    kernels = {f[0]: Kernel(n, *v) for f, n, v in zip(found, names.splitlines(), numbers, strict=True)}
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
        output = Path(folder, "cubin")
        command = [word for word in build.compile_command(source, output, toolchain) if not word.startswith("-gencode")]
        command[command.index("-c")] = "-cubin"
        log = output_of([*command, f"-arch=sm_{architecture}", "-Xptxas", "-v"])
        return parsed(log, output_of([nvdisasm, "-c", str(output)]))


def print_table(title: str, header: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    print(f"\n### {title}\n")
    for row in (header, ["---"] * len(header), *rows):
        print("|", *(f"{cell} |" for cell in row))


def predicted(row: Row, kernels: list[Kernel], gpu: Gpu, stage: Stage) -> str:
    _, name, marker, work_at = row
    kernel, work = next(k for k in kernels if k.name == name.format(s=stage)), work_at(stage)
    count = work.warps * kernel.warp_instructions(marker, work)
    issue, memory = 1e3 * count / gpu.issue, 1e3 * work.bytes / gpu.bandwidth
    times = f"**{issue:.3f}** / {memory:.3f}" if issue > memory else f"{issue:.3f} / **{memory:.3f}**"
    return f"{count / (stage.P * stage.k**2):.1f}; {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, default=build.sources("cuda"))
    sources, toolchain = parser.parse_args().sources, build.Toolchain.find(cuda=True)
    nvdisasm = shutil.which("nvdisasm") or str(Path(str(toolchain.nvcc)).resolve().with_name("nvdisasm"))
    print("# Prediction, not measured\n\nAt full issue or full memory bandwidth, whichever takes longer; expect twice that.")
    for architecture, gpu in GPUS.items():
        found = {source.name: compiled(source, architecture, toolchain, nvdisasm) for source in sources}
        title = f"SAN10, batch 32, {gpu.name}: warp instructions per pair; ms by issue / by bytes, the larger in bold"
        rows = [[r[1], *(predicted(r, found[r[0]], gpu, s) for s in STAGES)] for r in ROWS if r[0] in found]
        print_table(title, ["kernel", *(f"stage {i + 1}" for i in range(len(STAGES)))], rows)
        for name, kernels in found.items():
            print_table(f"{name}, {gpu.name}", KERNEL_COLUMNS, [k.cells(gpu) for k in sorted(kernels, key=lambda k: k.name)])


if __name__ == "__main__":
    main()
