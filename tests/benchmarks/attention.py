"""Measures SAN10 and its attention layers on the CPU: time, memory, and shares of the machine's peak.

    python -m tests.benchmarks.attention [--threads 2] [--repeats 7] [--batch 4] [--only memory] [--json FILE]

The inputs are random images of 224x224 in channels-last memory. The back ends `reference` (pad, unfold, einsum) and `unfused`
(one kernel per operator) are compared with the fused operators: ratios are other / fused within a repeat, and the tables list
medians and ranges. Each call runs twice in a row. The second, warm run counts; `caches taken` lists the first runs, which find
the caches as the other operators left them. Each table is measured in a new process. ResNet26 and ResNet50 serve for
comparison. `python -m tests.gpu` measures GPUs.
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
from dataclasses import dataclass
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
from tests.benchmarks.stages import KINDS, MODES, STAGES, Core
from tests.benchmarks.tables import ratio, table

BACKENDS: tuple[ops.Backend, ...] = ("auto", "unfused", "reference")
Call = Callable[[], Any]
Record = dict[str, Any]  # medians by name
M_MMAP_THRESHOLD = -3  # from <malloc.h>


@dataclass(frozen=True)
class Bench:
    """Options of the command."""

    repeats: int
    batch: int
    threads: int

    def under(self, backend: ops.Backend, call: Call) -> Call:
        """Returns a function that runs the call with this back end."""

        def run() -> None:
            with ops.backend(backend):
                call()

        return run


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, by name."""

    seconds: dict[str, list[float]]

    def ms(self, name: str) -> float:
        return 1000 * statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> str:
        """Returns median and range of other / name."""
        return ratio(self.seconds[other], self.seconds[name])

    def add(self, other: Timing, times: int) -> None:
        """Adds `times` times the seconds of another timing to each repeat."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = [a + times * b for a, b in zip(self.seconds[name], seconds, strict=True)]


def measure(calls: dict[str, Call], repeats: int) -> tuple[Timing, Timing]:
    """Runs all calls in turn, `repeats` times after a warm-up; disturbances then affect all of them.

    Each call runs twice. Returns the timings of the second runs, which are warm, and of the first runs, whose caches hold the
    data of other calls.
    """
    warm, cold = (Timing({name: [] for name in calls}) for _ in range(2))
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            for timing in (cold, warm):
                start = time.perf_counter()
                call()
                if repeat:
                    timing.seconds[name].append(time.perf_counter() - start)
    return warm, cold


@contextmanager
def without_core() -> Iterator[None]:
    """Replaces attention by its beta, to measure the rest of a network."""
    with patch.object(SelfAttention, "attend", _pass_on), patch.object(PairwiseAttention, "attend", _pass_on):
        with patch.object(PatchwiseAttention, "attend", _pass_on):
            yield


def _pass_on(self: SelfAttention, phi: Tensor, psi: Tensor, beta: Tensor) -> Tensor:
    return beta + (phi.mean() + psi.mean())


def steps(model: torch.nn.Module, images: Tensor) -> tuple[Call, Call]:
    """Returns functions that run a training step (forward and backward) and an evaluation."""

    def train() -> None:
        model.train()
        model(images).sum().backward()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(images)

    return train, evaluate


def memory(bench: Bench, kind: str) -> Record:
    """Measures the memory of a training step of attention alone in each stage."""
    # malloc then returns every large block to the system. Blocks that it kept would not be counted in the next call.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    rows, record = list[list[Any]](), Record()
    for stage in STAGES:
        core = Core(kind, stage, bench.batch)
        peak = {b: peak_memory(bench.under(b, core.train)) for b in BACKENDS}
        saved = {b: saved_memory(core, bench, b) for b in BACKENDS}
        record[f"{kind}, {stage}, memory"] = {"peak": peak, "saved": saved}
        cells = ((held["auto"] / 2**20, f"{held['reference'] / max(held['auto'], 1):.1f}") for held in (peak, saved))
        rows.append([stage, *(cell for pair in cells for cell in pair)])
    header = ["training", "peak MiB", "reference / fused", "saved MiB", "reference / fused"]
    print(table(f"Memory, {kind}", header, rows), flush=True)
    return record


def saved_memory(core: Core, bench: Bench, backend: ops.Backend) -> int:
    """Returns the bytes that forward saves for backward, without inputs and parameters."""
    given = {x.untyped_storage().data_ptr() for x in core.wanted}
    saved: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        bench.under(backend, core.train)()
    return sum(saved.values())


def peak_memory(call: Call) -> float:
    """Returns the maximum number of bytes that a call allocates."""
    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024.0 * int(line.split()[1])


def machine_peak(bench: Bench) -> tuple[float, float]:
    """Returns FLOP/s of multiply-adds on registers, an upper limit for products, and bytes/s of a copy."""
    here, there = (torch.empty(64 * 2**20).fill_(i) for i in range(2))
    copy = measure({"": lambda: there.copy_(here)}, 9)[0].seconds[""]
    return multiply_add_peak(bench.threads), 8 * here.numel() / min(copy)


def multiply_add_peak(threads: int) -> float:
    """Returns the highest FLOP/s of many short runs of peak.cpp."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write all medians to this file")
    parts = ("network", "yardsticks", "cores", "memory")
    parser.add_argument("--only", choices=parts, help="measure only this part")
    options = parser.parse_args()
    bench = Bench(options.repeats, options.batch, options.threads)
    wanted = (options.only,) if options.only else parts
    record = section(machine, bench)
    for kind in KINDS if "network" in wanted else ():
        record |= section(network, bench, kind)
    if "yardsticks" in wanted:
        record |= section(yardsticks, bench)
    for kind in KINDS:
        if "cores" in wanted:
            record |= section(cores, bench, kind, record["peak_flops"], record["peak_bytes"])
        if "memory" in wanted:
            record |= section(memory, bench, kind)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def section(measure_it: Callable[..., Record], bench: Bench, *rest: str | float) -> Record:
    """Runs `measure_it` in a new process, because earlier allocations change the speed of later ones."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_section, measure_it, bench, *rest).result()


def _section(measure_it: Callable[..., Record], bench: Bench, *rest: str | float) -> Record:
    torch.set_num_threads(bench.threads)
    torch.manual_seed(0)
    return measure_it(bench, *rest)


def machine(bench: Bench) -> Record:
    """Measures the machine's peak."""
    flops, bandwidth = machine_peak(bench)
    where = f"{platform.processor() or platform.machine()} CPU"
    print(f"torch {torch.__version__}, {where}, {bench.threads} threads, batch {bench.batch}, {bench.repeats} repeats.")
    peak = f"{flops / 1e9:.0f} GFLOP/s (multiply-adds on registers)"
    print(f"Peak: {peak}, {bandwidth / 1e9:.1f} GB/s (copy of 256 MB, both ways).", flush=True)
    return {"peak_flops": flops, "peak_bytes": bandwidth}


def images_of(bench: Bench) -> Tensor:
    return torch.randn(bench.batch, 3, 224, 224).contiguous(memory_format=torch.channels_last)


def network(bench: Bench, kind: str) -> Record:
    """Measures SAN10 with each back end and without its attention, and ResNet26."""
    rows, images, record = list[list[Any]](), images_of(bench), Record()
    calls_of = zip(
        ("training step", "evaluation"),
        steps(san.create_model(f"san10_{kind}"), images),
        steps(san.create_model("resnet26"), images),
        strict=True,
    )
    for name, call, resnet in calls_of:
        calls = {backend: bench.under(backend, call) for backend in BACKENDS} | {"resnet26": bench.under("auto", resnet)}
        calls["glue"] = without_core()(bench.under("auto", call))
        timing, _ = measure(calls, bench.repeats)
        record[f"{kind}, {name}"] = {key: timing.ms(key) for key in calls}
        cells = [timing.ms("auto"), *(timing.ratio("auto", other) for other in ("reference", "unfused"))]
        rows.append([name, *cells, timing.ms("glue"), timing.ms("resnet26"), timing.ratio("auto", "resnet26")])
    header = ["SAN10", "fused, ms", "reference / fused", "unfused / fused", "without attention, ms"]
    print(table(f"Network, {kind}", [*header, "ResNet26, ms", "ResNet26 / fused"], rows), flush=True)
    return record


def yardsticks(bench: Bench) -> Record:
    """Measures the images per second of SAN10 and of ResNets with PyTorch's operators."""
    rows, images, record = list[list[Any]](), images_of(bench), Record()
    for name in ("san10_pairwise", "san10_patchwise", "resnet26", "resnet50"):
        backend: ops.Backend = "auto" if name.startswith("san") else "reference"
        calls = {m: bench.under(backend, call) for m, call in zip(MODES, steps(san.create_model(name), images), strict=True)}
        timing, _ = measure(calls, bench.repeats)
        record[f"images/s, {name}"] = speeds = {mode: 1000 * bench.batch / timing.ms(mode) for mode in MODES}
        rows.append([name, *speeds.values()])
    print(table("Yardsticks", ["images per second", "training", "evaluation"], rows), flush=True)
    return record


def cores(bench: Bench, kind: str, peak_flops: float, peak_bytes: float) -> Record:
    """Measures attention alone in each stage: time, and shares of the machine's peak."""
    rows, roofs, record = list[list[Any]](), list[list[Any]](), Record()
    names = [f"{mode} {backend}" for mode in MODES for backend in BACKENDS]
    total, total_cold = (Timing({name: [0.0] * bench.repeats for name in names}) for _ in range(2))
    for stage in STAGES:
        core = Core(kind, stage, bench.batch)
        calls = {f"{mode} {b}": bench.under(b, partial(run, core)) for mode, run in MODES.items() for b in BACKENDS}
        timing, cold = measure(calls, bench.repeats)
        total.add(timing, core.blocks)
        total_cold.add(cold, core.blocks)
        record[f"{kind}, {stage}"] = {name: timing.ms(name) for name in names}
        rows.append([stage, *_times(timing)])
        for mode in MODES:
            flops, moved, ms = core.flops(mode == "train"), core.bytes(mode == "train"), timing.ms(f"{mode} auto")
            shares = (f"{share / ms / 1e-3:.0%}".replace("%", " %") for share in (flops / peak_flops, moved / peak_bytes))
            roofs.append([f"{stage}, {mode}", f"{flops / 1e9:.2f}", moved / 1e6, ms, f"{flops / ms / 1e6:.0f}", *shares])
    record[f"{kind}, all stages"] = {name: total.ms(name) for name in names}
    record[f"{kind}, all stages, cold"] = {name: total_cold.ms(name) for name in names}
    rows += [["all ten blocks", *_times(total)], ["all ten blocks, caches taken", *_times(total_cold)]]
    timed = [[f"{mode}, ms", "reference / fused", "unfused / fused"] for mode in ("training", "evaluation")]
    print(table(f"Core, {kind}", ["attention alone", *timed[0], *timed[1]], rows), flush=True)
    header = ["attention alone", "GFLOP", "MB", "ms", "GFLOP/s", "of peak FLOP/s", "of peak bytes/s"]
    print(table(f"Roofline, {kind}", header, roofs), flush=True)
    return record


def _times(timing: Timing) -> list[float | str]:
    cells: list[float | str] = []
    for mode in MODES:
        cells.append(timing.ms(f"{mode} auto"))
        cells += [timing.ratio(f"{mode} auto", f"{mode} {backend}") for backend in ("reference", "unfused")]
    return cells


if __name__ == "__main__":
    main()
