"""Instructions and registers of the compiled CUDA kernels, and predicted times; needs nvcc and nvdisasm, but no GPU.

    python -m tests.benchmarks.instructions [--all] [--launches] [FILE.cu ...]

Prints Markdown tables for sm_80 and sm_90: registers, blocks per SM, instructions and predicted times of the kernels in `ROWS`
at the sizes of SAN10's stages, and the sums for pairwise and patchwise training. --all adds registers and the instructions of
each loop of every kernel. --launches runs the CUDA sources on the CPU and counts the kernels that each operator starts.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cuda_ext import build, schemas
from tests.benchmarks.tables import table
from tests.ops import cases
from tests.ops.shim import compile_shim

KERNEL_COLUMNS = ["kernel", "registers", "static shared", "spills", "blocks per SM", "instructions", "of each loop"]


class Gpu(NamedTuple):
    name: str
    issue: float  # warp instructions per second on all SMs
    bandwidth: float  # bytes per second of a copy
    shared: int  # bytes per SM


GPUS = {"80": Gpu("A100", 609e9, 1.5e12, 164 << 10), "90": Gpu("H100", 927e9, 3.0e12, 228 << 10)}


class Work(NamedTuple):
    warps: float
    trips: tuple[float, ...]  # trip counts of the nested loops, from the outermost to the innermost
    items: int  # marked instructions in one trip of the innermost loop; their number shows how often it was unrolled
    bytes: float


class Loop(NamedTuple):
    """A loop with marked instructions."""

    trips: float
    inside: tuple[Loop, ...] = ()  # ordered by address
    items: int = 0  # marked instructions in one trip; 0 for a loop that is not unrolled


class LoopWork(NamedTuple):
    """The work of a kernel with several loops at the same level."""

    warps: float
    loops: tuple[Loop, ...]
    bytes: float


class Stage:
    """A stage of SAN10: R relation channels, E hidden channels, G = E weight channels and M = 8 E value channels.

    The footprint is k x k, and there are N maps of n x n pixels.
    """

    def __init__(self, R: int, E: int, k: int, n: int, N: int = 32) -> None:
        self.R, self.E, self.k, self.n, self.N, self.P = R, E, k, n, N, N * n**2
        self.wide = 4 if E % 4 == 0 else 2  # neighboring channels of each `aggregation` thread
        self.at_once_E, self.at_once_R = (min(4, math.ceil(width / 8)) for width in (E, R))  # tiles of a `patch_linear` warp
        self.strips_E = math.ceil(E / 32)

    def forward(self, products: int = 3) -> Work:
        warps, slices = math.ceil(self.P / 16) * self.strips_E, 1
        while slices < 8 and warps * slices < 4096:
            slices *= 2
        trips = ((self.k**2 + 1) / slices, math.ceil(self.R / 8))
        return Work(warps * slices, trips, products * self.at_once_E, 4 * self.P * (2 * self.R + self.E))

    def map_gradient(self, products: int = 3) -> Work:
        padded = self.N * (self.n + 2 * (self.k // 2)) ** 2
        warps, moved = math.ceil(padded / 16) * math.ceil(self.R / 32), self.P * (self.R + self.E) + padded * self.R
        return Work(warps, (self.k**2, math.ceil(self.E / 8)), products * self.at_once_R, 4 * moved)

    def parameters(self, products: int = 3) -> Work:
        tasks, rows = (self.k**2 + 1) * math.ceil(self.R / 16) * self.strips_E, self.N * self.n
        part = 4 * (self.k**2 + 1) * 64 * math.ceil(self.R / 8) * math.ceil(self.E / 8)
        slices = min(528 * 8 // tasks + 1, max(1, (64 << 20) // part), rows)
        trips, moved = (math.ceil(rows / slices), math.ceil(self.n / 8)), 4 * self.P * (2 * self.R + self.E)
        return Work(slices * tasks, trips, 2 * products * self.at_once_E, moved + 2 * slices * part)

    def patch_rows(self) -> LoopWork:
        sums = self.N * self.n * (self.k + 1) * self.R
        return LoopWork(sums / 32, (Loop(1, (Loop(self.n, items=1),)),), 4 * 2 * self.P * self.R + 16 * sums)

    def patch_gradients(self) -> LoopWork:
        inside = self.n**2 * 2 * self.R
        parts = min(math.ceil((1 << 17) / inside), self.N)
        images = Loop(9, (Loop(self.k / 9, (Loop(self.k, items=3),)),))  # the pixel itself and a few mirror images
        return LoopWork(parts * inside / 32, (Loop(1, (images,)),), 4 * 4 * self.P * self.R)

    def weighted_sum(self) -> Work:
        moved = self.P * self.E * (16 + self.k**2)
        return Work(self.P * self.E / self.wide / 8, (self.k, self.k), 2 * self.wide, 4 * moved)

    def correlation(self) -> Work:
        warps = self.P * self.E * self.k / self.wide / 32
        return self.weighted_sum()._replace(warps=warps, trips=(self.k,), items=8 * self.wide)

    def unfolded(self) -> Work:
        return Work(self.P * self.R / 32, (self.k, self.k), 1, 4 * self.P * self.R * (self.k**2 + 1))


class Compiled(NamedTuple):
    """A stage of cuda_ext/cuda/pairs.cuh: how many tiles of 8 channels its kernels hold at once."""

    name: str
    relation: int
    hidden: int
    weights: int


COMPILED = (Compiled("Stage1", 1, 1, 1), Compiled("Stage2", 3, 2, 1), Compiled("Stage3", 5, 4, 2), Compiled("AnySize", 9, 4, 4))


class PairStage:
    """The pairwise kernels for one stage of SAN10."""

    def __init__(self, stage: Stage) -> None:
        self.P, self.K, self.k, self.E, self.d = stage.P, stage.k**2, stage.k, stage.E, stage.R + 2
        self.padded = stage.N * (stage.n + stage.k - 1) ** 2
        tiles = math.ceil(self.d / 8)
        self.at_once = next((x for x in COMPILED if tiles <= x.relation and self.E <= 8 * x.hidden), COMPILED[-1])
        self.whole = self.at_once is not COMPILED[-1]
        self.tiles = self.at_once.relation if self.whole else tiles
        self.maps = 32 * self.tiles * (self.P + self.padded)
        self.weights = 4 * self.P * self.K * self.E
        self.chunks = math.ceil(self.tiles / self.at_once.relation)

    @property
    def name(self) -> str:
        return self.at_once.name

    def split(self, groups: float) -> int:
        split = 1
        while split < 8 and groups * split < 4096 and 2 * split <= self.K:
            split *= 2
        return split

    def inner(self, *loops: Loop) -> tuple[Loop, ...]:
        return () if self.whole else loops

    def row_sums(self) -> LoopWork:
        return LoopWork(self.P * self.d / 32, (Loop(1, (Loop(self.k, items=1),)),), 12 * self.P * self.d)

    def row_sums_of_both(self) -> LoopWork:
        """Few pixels have mirror images, so only one of three loops over readers runs; the compiler splits the outer loop."""
        inside = Loop(self.k, items=1), Loop(self.k, items=1), Loop(0), Loop(0)
        return LoopWork(self.P * self.d / 32, (Loop(1, inside), Loop(0)), 24 * self.P * self.d)

    def pair_sums(self) -> LoopWork:
        return LoopWork(8192 * self.d / 32, (Loop(self.P / 8192, (Loop(self.k, items=1),)),), 16 * self.P * self.d)

    def statistics_gradient(self) -> LoopWork:
        inside = Loop(self.k, items=1), Loop(self.k, items=1), Loop(0), Loop(0)
        return LoopWork(self.P * self.d / 32, (Loop(1, inside),), 32 * self.P * self.d)

    def summed(self, strips: int, chunks: int, moved: float, *inner: Loop) -> LoopWork:
        """The work of a product that sums over all pairs, 8 pixels at a time."""
        groups, jobs = math.ceil(self.P / 8), strips * chunks
        split = self.split(groups * jobs)
        blocks = max(1, min(math.ceil(groups * split / 8), max(528 // jobs, groups * self.K // 2048)))
        return LoopWork(blocks * jobs * 8, (Loop(groups * split / 8 / blocks, (Loop(self.K / split, inner),)),), moved)

    def covariance(self) -> LoopWork:
        row_tiles = math.ceil(self.at_once.relation / 2) if self.whole else 1
        return self.summed(math.ceil(self.tiles / 2 / row_tiles), self.chunks, self.maps)

    def weight_gradient(self) -> LoopWork:
        chunks = max(self.chunks, math.ceil(self.E / 16 / math.ceil(self.at_once.weights / 2)))
        inner = self.inner(Loop(self.tiles), Loop(math.ceil(self.E / 8)))
        return self.summed(math.ceil(self.E / 16), chunks, self.maps + self.weights, *inner)

    def gradient(self, pixels: int, moved: float, *inner: Loop) -> LoopWork:
        groups = math.ceil(pixels / 16) * self.chunks
        split = self.split(groups)
        return LoopWork(groups * split, (Loop(self.K / split, inner),), self.maps + moved + 4 * pixels * self.d)

    def covariance_gradient(self, pixels: int) -> LoopWork:
        return self.gradient(pixels, 0, *self.inner(Loop(self.tiles)))

    def map_gradient(self, pixels: int) -> LoopWork:
        hidden = Loop(math.ceil(self.E / 8 / self.at_once.hidden), (Loop(self.tiles), Loop(math.ceil(self.E / 8))))
        return self.gradient(pixels, self.weights, *self.inner(hidden))

    def forward(self) -> LoopWork:
        chunks = math.ceil(self.E / 8 / self.at_once.weights)
        groups = math.ceil(self.P / 16) * chunks
        split = self.split(groups)
        hidden = Loop(math.ceil(self.E / 8 / self.at_once.hidden), (Loop(self.tiles),))
        return LoopWork(groups * split, 2 * (Loop(self.K / split, self.inner(hidden)),), self.maps + self.weights)

    def logit_gradient(self) -> LoopWork:
        loops = (Loop(1, (Loop(self.K, items=2), Loop(self.K, items=2))),)
        return LoopWork(self.P * self.E / 32, loops, 3 * self.weights)

    def small_kernels(self) -> float:
        """Returns the bytes that the kernels move to prepare maps (four times) and to finish gradients (twice)."""
        return 4 * 2 * self.maps + 2 * 4 * self.d * (self.padded + 5 * self.P)


BLOCKS = (2, 1, 2, 4, 1)  # in each stage of SAN10
STAGES = [Stage(4, 2, 3, 112), Stage(16, 8, 7, 56), Stage(32, 16, 7, 28), Stage(64, 32, 7, 14), Stage(128, 64, 7, 7)]


class Row(NamedTuple):
    source: str
    name: str  # the demangled name, with placeholders for a stage s and the template arguments p of its kernels over pairs
    label: str
    marker: str  # an instruction that occurs only in the work of the innermost loop
    work: Callable[[Stage], Work | LoopWork]
    cores: tuple[str, ...]  # the kinds of attention that start this kernel in training


def pairs(work: Callable[[PairStage], LoopWork]) -> Callable[[Stage], LoopWork]:
    return lambda stage: work(PairStage(stage))


TF32, ACCURATE = "Operand<false>", "Operand<true>"
PAIRWISE, PATCHWISE, BOTH = ("pairwise",), ("patchwise",), ("pairwise", "patchwise")
GRADIENT = f"pair_gradient_kernel<{TF32}, {{p.name}}, {{around}}, {{source}}<{TF32}, {{p.name}}> >"
STATISTICS, COVARIANCE, WEIGHTS, AGGREGATION, RELATION = (
    f"{name}.cu" for name in ("statistics", "pair_covariance", "pair_weights", "aggregation", "relation")
)


def gradient(source: str, around: str) -> str:
    return GRADIENT.replace("{source}", source).replace("{around}", around)


# fmt: off
PAIR_ROWS = [
    Row(source, name, label, marker, pairs(work), PAIRWISE)
    for source, name, label, marker, work in (
        (STATISTICS, "row_sums_kernel<false>", "pair_statistics, sums of rows", "DADD", PairStage.row_sums),
        (STATISTICS, "pair_sums_kernel", "pair_statistics, sums of pairs", "DADD", PairStage.pair_sums),
        (STATISTICS, "row_sums_kernel<true>", "pair_statistics, backward, sums of rows", "DADD", PairStage.row_sums_of_both),
        (STATISTICS, "pair_gradients_kernel", "pair_statistics, backward, gradients", "DADD", PairStage.statistics_gradient),
        (COVARIANCE, f"gram_kernel<{TF32}, {{p.name}}>", "pair_covariance", "HMMA", PairStage.covariance),
        (COVARIANCE, gradient("CovarianceSource", "false"), "pair_covariance, gradient of center", "HMMA",
         lambda p: p.covariance_gradient(p.P)),
        (COVARIANCE, gradient("CovarianceSource", "true"), "pair_covariance, gradient of around", "HMMA",
         lambda p: p.covariance_gradient(p.padded)),
        (WEIGHTS, f"pair_weights_kernel<{TF32}, {{p.name}}, float>", "pair_weights", "HMMA", PairStage.forward),
        (WEIGHTS, f"logit_gradient_kernel<{TF32}, float>", "pair_weights, gradient of softmax", "LDG",
         PairStage.logit_gradient),
        (WEIGHTS, gradient("LayersSource", "false"), "pair_weights, gradient of center", "HMMA", lambda p: p.map_gradient(p.P)),
        (WEIGHTS, gradient("LayersSource", "true"), "pair_weights, gradient of around", "HMMA",
         lambda p: p.map_gradient(p.padded)),
        (WEIGHTS, f"layer_gradient_kernel<{TF32}, {{p.name}}>", "pair_weights, gradient of layers", "HMMA",
         PairStage.weight_gradient),
    )
]
PATCH_ROWS = [
    Row(STATISTICS, "patch_rows_kernel", "patch_statistics, sums of rows", "DADD", Stage.patch_rows, PATCHWISE),
    Row(STATISTICS, "patch_gradients_kernel", "patch_statistics, backward", "DADD", Stage.patch_gradients, PATCHWISE),
]
PATCH_ROWS += [
    Row("patch_linear.cu", f"{kernel}_kernel<{operand}, {{s.at_once_{width}}}>",
        f"{label}{'' if cores else ', accurate float32'}", "HMMA", partial(work, products=products), cores)
    for operand, products, cores in ((TF32, 1, PATCHWISE), (ACCURATE, 3, ()))
    for kernel, width, label, work in (
        ("patch_linear", "E", "patch_linear", Stage.forward),
        ("map_gradient", "R", "patch_linear, gradient of around", Stage.map_gradient),
        ("parameter_gradient", "E", "patch_linear, gradient of parameters", Stage.parameters),
    )
]
SUM = "weighted_sum_kernel<{}, {{s.wide}}, 2, float>"
OTHER_ROWS = [
    Row(AGGREGATION, SUM.format("false"), "aggregation", "FFMA", Stage.weighted_sum, BOTH),
    Row(AGGREGATION, SUM.format("true"), "aggregation, gradient of values", "FFMA", Stage.weighted_sum, BOTH),
    Row(AGGREGATION, "correlate_kernel<{s.wide}, true, float>", "aggregation, gradient of weights", "FFMA", Stage.correlation,
        BOTH),
    Row(RELATION, "footprints_kernel<false, float>", "unfold", "LDG", Stage.unfolded, ()),
    Row(RELATION, "footprints_kernel<true, float>", "subtraction", "FADD", Stage.unfolded, ()),
    Row(RELATION, "gather_footprints_kernel<false, float>", "unfold, backward", "FADD", Stage.unfolded, ()),
]
# fmt: on
ROWS = [*PAIR_ROWS, *PATCH_ROWS, *OTHER_ROWS]


@dataclass
class Kernel:
    name: str
    spills: int
    registers: int
    shared: int
    opcodes: list[str] = field(default_factory=list, init=False)
    loops: list[tuple[int, int]] = field(default_factory=list, init=False)  # first instruction, and the one after the last

    def cells(self, gpu: Gpu) -> list[object]:
        """Returns a row of the table. Dynamic shared memory is unknown here and may reduce the blocks per SM."""
        by_registers = 65536 // (math.ceil(self.registers / 8) * 8 * 256)  # all blocks have 256 threads
        blocks = min(by_registers, 2048 // 256, gpu.shared // (self.shared + 1024))
        loops = " ".join(str(end - first) for first, end in sorted(self.loops))
        return [self.name, self.registers, self.shared, self.spills, blocks, len(self.opcodes), loops]

    def executed(self, marker: str, loops: Sequence[Loop], first: int, end: int) -> float:
        """Returns how many instructions a warp executes from `first` to `end`; loops without marked instructions count once."""
        marked = [(a, b) for a, b in self.loops if first <= a and b <= end and marker in self.opcodes[a:b]]
        inside = [(a, b) for a, b in marked if (a, b) != (first, end) and not any(c < a < d < b for c, d in marked)]
        outermost = sorted(x for x in inside if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in inside))
        if len(outermost) < len(loops):
            raise ValueError(f"{self.name} has {len(outermost)} loops with {marker}; expected {len(loops)}")
        largest = sorted(outermost, key=lambda loop: loop[0] - loop[1])[
            : len(loops)
        ]  # the others are remainders of unrolled loops
        outermost = [loop for loop in outermost if loop in largest]
        total = float(end - first - sum(b - a for a, b in outermost))
        for (a, b), loop in zip(outermost, loops, strict=True):
            unrolled = self.opcodes[a:b].count(marker) / loop.items if loop.items else 1
            total += loop.trips / unrolled * self.executed(marker, loop.inside, a, b)
        return total

    def warp_instructions(self, marker: str, work: Work) -> float:
        """Returns how many instructions a warp executes if, at each level, it enters the loop with the most marked ones."""
        marked = [opcode == marker for opcode in self.opcodes]
        first, end, times, total, unrolled_beside = 0, len(marked), 1.0, 0.0, False
        for trip in work.trips:
            inside = [(a, b) for a, b in self.loops if first <= a and b <= end and (a, b) != (first, end)]
            rest = [i for i in range(first, end) if not any(a <= i < b for a, b in inside)]
            total, unrolled_beside = total + times * len(rest), any(marked[i] for i in rest)
            first, end = max(inside, key=lambda loop: (sum(marked[slice(*loop)]), loop[1] - loop[0]), default=(first, end))
            times *= trip
        unrolled = sum(marked[first:end]) / work.items
        remainder = work.trips[-1] % unrolled if unrolled_beside else 0  # the compiler moved these trips out of the loop
        return total + times * (1 - remainder / work.trips[-1]) * (end - first) / unrolled


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def parsed(log: str, sass: str) -> list[Kernel]:
    """Returns the kernels of a source from the output of ptxas and nvdisasm."""
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
            start = labels.get(target[1]) if target else None  # None for a jump forward, which is no loop
            if start is not None and start + 1 < len(kernel.opcodes):  # each kernel ends with a branch to itself
                kernel.loops.append((start, len(kernel.opcodes)))
    return list(kernels.values())


def compiled(source: Path, architecture: str, toolchain: build.Toolchain, nvdisasm: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "cubin")
        command = [word for word in build.compile_command(source, output, toolchain) if not word.startswith("-gencode")]
        command[command.index("-c")] = "-cubin"
        log = output_of([*command, f"-arch=sm_{architecture}", "-Xptxas", "-v"])
        return parsed(log, output_of([nvdisasm, "-c", str(output)]))


def find_nvdisasm(nvcc: str) -> str:
    """Returns the path of nvdisasm: on PATH, in CUDA_HOME, next to nvcc, in pip's packages, or in /usr/local/cuda.

    Raises:
        BuildError: it is missing.
    """
    home = os.environ.get("CUDA_HOME")
    pip = sorted(map(str, Path(torch.__file__).parents[1].glob("nvidia/*/bin")))
    folders = [None, f"{home}/bin" if home else "", str(Path(nvcc).resolve().parent), *pip, "/usr/local/cuda/bin"]
    for folder in folders:
        if folder != "" and (path := shutil.which("nvdisasm", path=folder)):
            return path
    raise build.BuildError("nvdisasm was not found; run `pip install nvidia-cuda-nvdisasm` or install the CUDA toolkit")


class Prediction(NamedTuple):
    kernel: Kernel
    per_pair: float  # warp instructions
    issue: float  # ms
    memory: float  # ms

    @staticmethod
    def of(row: Row, kernels: list[Kernel], gpu: Gpu, stage: Stage) -> Prediction:
        name, work = row.name.format(s=stage, p=PairStage(stage)), row.work(stage)
        kernel = next(k for k in kernels if k.name == name)
        if isinstance(work, LoopWork):
            count = work.warps * kernel.executed(row.marker, work.loops, 0, len(kernel.opcodes))
        else:
            count = work.warps * kernel.warp_instructions(row.marker, work)
        return Prediction(kernel, count / (stage.P * stage.k**2), 1e3 * count / gpu.issue, 1e3 * work.bytes / gpu.bandwidth)

    def time(self) -> float:
        return max(self.issue, self.memory)


def print_stages(gpu: Gpu, predictions: dict[Row, list[Prediction]]) -> None:
    stages = [f"stage {i + 1}" for i in range(len(STAGES))]
    rows: list[list[object]] = []
    for row, found in predictions.items():
        second = found[1]
        blocks = second.kernel.cells(gpu)[4]
        rows.append([row.label, second.kernel.registers, blocks, f"{second.per_pair:.1f}", *(f"{x.time():.3f}" for x in found)])
    header = ["kernel", "registers", "blocks", "per pair", *stages]
    print(table(f"{gpu.name}: registers, blocks per SM, instructions per pair of stage 2; ms", header, rows))
    sums: list[list[object]] = []
    for core in BOTH:
        started = [found for row, found in predictions.items() if core in row.cores]
        times = [sum(found[at].time() for found in started) for at in range(len(STAGES))]
        if core == "pairwise":
            times = [t + 1e3 * PairStage(s).small_kernels() / gpu.bandwidth for t, s in zip(times, STAGES, strict=True)]
        cores = [blocks * time for blocks, time in zip(BLOCKS, times, strict=True)]
        per_pair = sum(found[1].per_pair for found in started)
        sums.append([core, f"{per_pair:.0f}", *(f"{t:.3f}" for t in times), f"{sum(cores):.2f}"])
    header = ["core", "per pair, stage 2", *(f"one block, {s}" for s in stages), "SAN10"]
    print(table(f"{gpu.name}: training cores", header, sums))


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
    parser.add_argument("--all", action="store_true", help="print every kernel's registers and loops")
    parser.add_argument("--launches", action="store_true", help="count the kernels that each operator starts")
    parser.add_argument("sources", nargs="*", type=Path, default=build.sources("cuda"))
    arguments = parser.parse_args()
    try:
        toolchain = build.Toolchain.find(cuda=True)
        nvdisasm = find_nvdisasm(str(toolchain.nvcc))
    except build.BuildError as error:
        parser.exit(1, f"{error}\n")
    print("# Prediction, not measured\n\nAt full issue or full memory bandwidth, whichever takes longer; expect twice that.")
    for architecture, gpu in GPUS.items():
        found = {source.name: compiled(source, architecture, toolchain, nvdisasm) for source in arguments.sources}
        rows = [row for row in ROWS if row.source in found]
        print_stages(gpu, {r: [Prediction.of(r, found[r.source], gpu, s) for s in STAGES] for r in rows})
        for name, kernels in found.items() if arguments.all else ():
            print(table(f"{name}, {gpu.name}", KERNEL_COLUMNS, [k.cells(gpu) for k in sorted(kernels, key=lambda k: k.name)]))
    if arguments.launches:
        counts = launches()
        print(table("Kernels started", ["operator", "kernels"], list(counts.items())))


if __name__ == "__main__":
    main()
