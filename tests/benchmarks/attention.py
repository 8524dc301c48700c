"""What fused attention is worth: the network, its attention alone, what is left without it, memory, and the roofline.

    python -m tests.benchmarks.attention [--device cpu|cuda] [--precision float32|tf32|bfloat16] [--compiled] [--threads 2]
        [--repeats 7] [--batch 4] [--json FILE]

SAN10 at 224x224, random inputs. Ratios are other / fused, taken side by side in each repeat; medians and ranges. The other
operators are `reference` (pad, unfold, einsum: the specification) and `unfused` (a kernel for each operator). Each call is
timed right after a first run of its own, warm; `caches taken` are those first runs, which find what the other operators left.
Each table is measured in a process of its own, which has allocated nothing else before. Networks get channels-last images,
which suits all of them; ResNet26 and ResNet50 of the same library are the yardsticks. `tf32` lets a GPU round the factors of
float32 products, `bfloat16` is autocast. With `--compiled`, networks go through torch.compile too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import san
from cuda_ext import build
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention, SelfAttention

# Channels, side of the map, footprint, blocks: the stages of SAN10 at 224x224.
STAGES = {
    "stage 1": (64, 112, 3, 2),
    "stage 2": (256, 56, 7, 1),
    "stage 3": (512, 28, 7, 2),
    "stage 4": (1024, 14, 7, 4),
    "stage 5": (2048, 7, 7, 1),
}
KINDS: dict[str, type[PairwiseAttention] | type[PatchwiseAttention]] = {
    "pairwise": PairwiseAttention,
    "patchwise": PatchwiseAttention,
}
BACKENDS: tuple[ops.Backend, ...] = ("auto", "unfused", "reference")
Call = Callable[[], Any]
Record = dict[str, Any]  # medians, by what they are of
M_MMAP_THRESHOLD = -3  # of <malloc.h>


@dataclass(frozen=True)
class Bench:
    """What is asked for."""

    device: str
    precision: str
    compiled: bool
    repeats: int
    batch: int
    threads: int

    def under(self, backend: ops.Backend, call: Call) -> Call:
        """The call with these operators, in this precision."""

        def run() -> None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
            with ops.backend(backend), self.autocast():
                call()

        return run

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bfloat16")


class Core:
    """The attention of one stage alone: phi, psi, beta to y."""

    def __init__(self, kind: str, stage: str, bench: Bench) -> None:
        self.channels, self.side, self.footprint, self.blocks = STAGES[stage]
        self.batch = bench.batch
        self.attention = KINDS[kind](self.channels, self.footprint).to(bench.device)
        x = torch.randn(bench.batch, self.channels, self.side, self.side, device=bench.device)
        with bench.autocast():
            maps = [m.detach().contiguous(memory_format=torch.channels_last) for m in self.attention.transform(x)]
        self.phi, self.psi, self.beta = (m.requires_grad_() for m in maps)
        self.grad = torch.randn_like(self.beta)
        self.wanted = [self.phi, self.psi, self.beta, *self.attention.gamma.parameters()]

    def train(self) -> None:
        """Forward and backward in training."""
        self.attention.train()
        torch.autograd.grad(self.attention.attend(self.phi, self.psi, self.beta), self.wanted, self.grad)

    def evaluate(self) -> None:
        """Forward in evaluation."""
        self.attention.eval()
        with torch.no_grad():
            self.attention.attend(self.phi, self.psi, self.beta)

    def flops(self, training: bool) -> int:
        """What the fused kernels compute, recomputation included; two FLOPs per multiply-accumulate of products alone."""
        pixels, K = self.batch * self.side**2, self.footprint**2
        d_to_E, E_to_G = (2 * self.attention.gamma[i].weight.numel() for i in (2, 5))
        M = 2 * self.attention.value_channels
        if isinstance(self.attention, PairwiseAttention):
            once = d_to_E + E_to_G + M
            passes = once + d_to_E + (d_to_E + 3 * E_to_G + 2 * M) + (3 * d_to_E + 2 * E_to_G + M)
            return pixels * K * (passes if training else once)
        once = d_to_E + E_to_G + K * M
        return pixels * (once + 2 * d_to_E + 3 * E_to_G + 2 * K * M if training else once)

    def bytes(self, training: bool) -> int:
        """What must move: each map read once and written once, with its gradient in training."""
        maps = sum(m.numel() for m in (self.phi, self.psi, self.beta, self.beta))
        return self.beta.element_size() * maps * (2 if training else 1)


MODES: dict[str, Callable[[Core], None]] = {"train": Core.train, "eval": Core.evaluate}


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, by name."""

    seconds: dict[str, list[float]]

    def ms(self, name: str) -> float:
        """The median."""
        return 1000 * statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> str:
        """other / name of each repeat: median and range."""
        ratios = [b / a for a, b in zip(self.seconds[name], self.seconds[other], strict=True)]
        return f"{statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})"

    def add(self, other: Timing, times: int) -> None:
        """Adds each repeat of the other, so many times."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = [a + times * b for a, b in zip(self.seconds[name], seconds, strict=True)]


def measure(calls: dict[str, Call], repeats: int, device: str) -> tuple[Timing, Timing]:
    """Runs all calls in turn, `repeats` times after a warm-up, so that what disturbs one disturbs all; each twice.

    Returned are the second runs, warm, and the first ones, which find the caches as the others left them.
    """
    warm, cold = (Timing({name: [] for name in calls}) for _ in range(2))
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            for timing in (cold, warm):
                _wait(device)
                start = time.perf_counter()
                call()
                _wait(device)
                if repeat:
                    timing.seconds[name].append(time.perf_counter() - start)
    return warm, cold


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def without_core() -> Iterator[None]:
    """Attention that passes beta on: what a network costs besides."""
    with patch.object(SelfAttention, "attend", _pass_on), patch.object(PairwiseAttention, "attend", _pass_on):
        with patch.object(PatchwiseAttention, "attend", _pass_on):
            yield


def _pass_on(self: SelfAttention, phi: Tensor, psi: Tensor, beta: Tensor) -> Tensor:
    return beta + (phi.mean() + psi.mean())


def steps(model: torch.nn.Module, images: Tensor) -> tuple[Call, Call]:
    """A training step (forward and backward) and an evaluation of a network."""

    def train() -> None:
        model.train()
        model(images).sum().backward()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(images)

    return train, evaluate


def memory(bench: Bench, kind: str) -> Record:
    """What a training step of attention alone needs, stage by stage."""
    # Every large block now comes from the system and goes back to it: what a call finds left over would not be counted.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    rows, record = [], Record()
    for stage in STAGES:
        core = Core(kind, stage, bench)
        peak = {b: peak_memory(bench.under(b, core.train), bench.device) for b in BACKENDS}
        saved = {b: saved_memory(core, bench, b) for b in BACKENDS}
        record[f"{kind}, {stage}, memory"] = {"peak": peak, "saved": saved}
        cells = ((held["auto"] / 2**20, f"{held['reference'] / max(held['auto'], 1):.1f}") for held in (peak, saved))
        rows.append(row(stage, *(cell for pair in cells for cell in pair)))
    print(table(f"Memory, {kind}", "training | peak MiB | reference / fused | saved MiB | reference / fused", rows), flush=True)
    return record


def saved_memory(core: Core, bench: Bench, backend: ops.Backend) -> int:
    """Bytes that forward keeps for backward, beside its inputs and parameters."""
    given = {x.untyped_storage().data_ptr() for x in core.wanted}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        bench.under(backend, core.train)()
    return sum(kept.values())


def peak_memory(call: Call, device: str) -> float:
    """Bytes that a call needs at most on top of what is held before it."""
    call()
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest residency so far
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024.0 * int(line.split()[1])


def machine_peak(bench: Bench) -> tuple[float, float]:
    """FLOP/s and bytes/s (of a copy) that the machine reaches at best.

    On a CPU multiply-adds on registers, which no product can surpass; on a GPU torch's product in the precision asked for.
    """
    here, there = (torch.empty(64 * 2**20, device=bench.device).fill_(i) for i in range(2))
    copy = measure({"": lambda: there.copy_(here)}, 9, bench.device)[0].seconds[""]
    flops = product_peak(bench) if bench.device == "cuda" else multiply_add_peak(bench.threads)
    return flops, 8 * here.numel() / min(copy)


def product_peak(bench: Bench) -> float:
    """FLOP/s of a product of large matrices."""
    size, dtype = 8192, torch.bfloat16 if bench.precision == "bfloat16" else torch.float32
    a, b = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(measure({"": bench.under("auto", lambda: torch.mm(a, b))}, 9, bench.device)[0].seconds[""])


def multiply_add_peak(threads: int) -> float:
    """FLOP/s of the best of many short runs of peak.cpp, compiled for this machine."""
    steps, best = 2_000_000, 0.0
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "peak.so")
        source, cxx = Path(__file__).with_name("peak.cpp"), build.find_cxx()
        build.run([cxx, *build.CXX_FLAGS, "-march=native", "-shared", str(source), "-o", str(library), "-lpthread"])
        compute = ctypes.CDLL(str(library)).compute
        compute.restype, compute.argtypes = ctypes.c_double, (ctypes.c_int64, ctypes.c_int)
        for _ in range(20):
            start = time.perf_counter()
            flops = compute(steps, threads)
            best = max(best, flops / (time.perf_counter() - start))
    return best


def table(title: str, heading: str, rows: list[str]) -> str:
    columns = heading.count("|") + 1
    return "\n".join([f"\n**{title}**\n", f"| {heading} |", "|---" + "|---:" * (columns - 1) + "|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write all medians to this file")
    options = parser.parse_args()
    bench = Bench(options.device, options.precision, options.compiled, options.repeats, options.batch, options.threads)
    record = section(machine, bench)
    for kind in KINDS:
        record |= section(network, bench, kind)
    record |= section(yardsticks, bench)
    for kind in KINDS:
        record |= section(cores, bench, kind, record["peak_flops"], record["peak_bytes"])
        record |= section(memory, bench, kind)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def section(measure_it: Callable[..., Record], bench: Bench, *rest: str | float) -> Record:
    """What `measure_it` prints and returns, in a process of its own: allocations before it change how fast memory is had."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_section, measure_it, bench, *rest).result()


def _section(measure_it: Callable[..., Record], bench: Bench, *rest: str | float) -> Record:
    torch.set_num_threads(bench.threads)
    torch.manual_seed(0)
    return measure_it(bench, *rest)


def machine(bench: Bench) -> Record:
    """What the machine can do."""
    flops, bandwidth = machine_peak(bench)
    where = torch.cuda.get_device_name() if bench.device == "cuda" else f"{platform.processor() or platform.machine()} CPU"
    how = "matrix product" if bench.device == "cuda" else "multiply-adds on registers"
    print(
        f"torch {torch.__version__}, {where}, {bench.threads} threads, batch {bench.batch}, {bench.repeats} repeats, "
        f"{bench.precision}."
    )
    print(f"Peak: {flops / 1e9:.0f} GFLOP/s ({how}), {bandwidth / 1e9:.1f} GB/s (copy of 256 MB, both ways).", flush=True)
    return {"peak_flops": flops, "peak_bytes": bandwidth}


def images_of(bench: Bench) -> Tensor:
    return torch.randn(bench.batch, 3, 224, 224, device=bench.device).contiguous(memory_format=torch.channels_last)


def network(bench: Bench, kind: str) -> Record:
    """SAN10 with each back end, without its attention, and ResNet26."""
    rows, images, record = [], images_of(bench), Record()
    calls_of = zip(
        ("training step", "evaluation"),
        steps(san.create_model(f"san10_{kind}").to(bench.device), images),
        steps(san.create_model("resnet26").to(bench.device), images),
        strict=True,
    )
    for name, call, resnet in calls_of:
        calls = {backend: bench.under(backend, call) for backend in BACKENDS} | {"resnet26": bench.under("auto", resnet)}
        calls["glue"] = without_core()(bench.under("auto", call))
        if bench.precision != "float32":
            calls["unfused float32"] = replace(bench, precision="float32").under("unfused", call)
        timing, _ = measure(calls, bench.repeats, bench.device)
        record[f"{kind}, {name}"] = {key: timing.ms(key) for key in calls}
        cells = [timing.ms("auto"), *(timing.ratio("auto", other) for other in ("reference", "unfused"))]
        cells += [timing.ratio("auto", "unfused float32")] if "unfused float32" in calls else []
        rows.append(row(name, *cells, timing.ms("glue"), timing.ms("resnet26"), timing.ratio("auto", "resnet26")))
    rounded = " | unfused in float32 / fused" if bench.precision != "float32" else ""
    heading = (
        f"SAN10 | fused, ms | reference / fused | unfused / fused{rounded} | without attention, ms | ResNet26, ms | "
        "ResNet26 / fused"
    )
    print(table(f"Network, {kind}", heading, rows), flush=True)
    return record


def yardsticks(bench: Bench) -> Record:
    """Images per second of SAN10 and of ResNets, which run torch's operators alone."""
    rows, images, record = [], images_of(bench), Record()
    for name in ("san10_pairwise", "san10_patchwise", "resnet26", "resnet50"):
        backend: ops.Backend = "auto" if name.startswith("san") else "reference"
        model = san.create_model(name).to(bench.device)
        variants = {"eager": model} | ({"compiled": torch.compile(model)} if bench.compiled else {})
        calls = {}
        for how, variant in variants.items():
            train, evaluate = steps(variant, images)
            calls |= {f"train {how}": bench.under(backend, train), f"eval {how}": bench.under(backend, evaluate)}
        timing, _ = measure(calls, bench.repeats, bench.device)
        record[f"images/s, {name}"] = speeds = {key: 1000 * bench.batch / timing.ms(key) for key in calls}
        cells = (f"{speeds[f'{mode} {how}']:.1f}" if how in variants else "" for how in ("eager", "compiled") for mode in MODES)
        rows.append(row(name, *cells))
    heading = "images per second | training | evaluation | compiled: training | evaluation"
    print(table("Yardsticks", heading, rows), flush=True)
    return record


def cores(bench: Bench, kind: str, peak_flops: float, peak_bytes: float) -> Record:
    """Attention alone, stage by stage: time, memory, and shares of the machine's peak."""
    rows, roofs, record = [], [], Record()
    names = [f"{mode} {backend}" for mode in MODES for backend in BACKENDS]
    total, total_cold = (Timing({name: [0.0] * bench.repeats for name in names}) for _ in range(2))
    for stage in STAGES:
        core = Core(kind, stage, bench)
        calls = {f"{mode} {b}": bench.under(b, partial(run, core)) for mode, run in MODES.items() for b in BACKENDS}
        timing, cold = measure(calls, bench.repeats, bench.device)
        total.add(timing, core.blocks)
        total_cold.add(cold, core.blocks)
        record[f"{kind}, {stage}"] = {name: timing.ms(name) for name in names}
        rows.append(row(stage, *_times(timing)))
        for mode in MODES:
            flops, moved, ms = core.flops(mode == "train"), core.bytes(mode == "train"), timing.ms(f"{mode} auto")
            shares = (f"{share / ms / 1e-3:.0%}".replace("%", " %") for share in (flops / peak_flops, moved / peak_bytes))
            roofs.append(row(f"{stage}, {mode}", f"{flops / 1e9:.2f}", moved / 1e6, ms, f"{flops / ms / 1e6:.0f}", *shares))
    record[f"{kind}, all stages"] = {name: total.ms(name) for name in names}
    record[f"{kind}, all stages, cold"] = {name: total_cold.ms(name) for name in names}
    rows.append(row("all ten blocks", *_times(total)))
    rows.append(row("all ten blocks, caches taken", *_times(total_cold)))
    timed = "{}, ms | reference / fused | unfused / fused"
    heading = f"attention alone | {timed.format('training')} | {timed.format('evaluation')}"
    print(table(f"Core, {kind}", heading, rows), flush=True)
    heading = "attention alone | GFLOP | MB | ms | GFLOP/s | of peak FLOP/s | of peak bytes/s"
    print(table(f"Roofline, {kind}", heading, roofs), flush=True)
    return record


def _times(timing: Timing) -> list[float | str]:
    cells: list[float | str] = []
    for mode in MODES:
        cells.append(timing.ms(f"{mode} auto"))
        cells += [timing.ratio(f"{mode} auto", f"{mode} {backend}") for backend in ("reference", "unfused")]
    return cells


def row(*cells: float | str) -> str:
    return "| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.1f}" for cell in cells) + " |"


if __name__ == "__main__":
    main()
