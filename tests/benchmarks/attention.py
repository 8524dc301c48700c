"""Measures SAN10 and its attention layers on the CPU: time and memory.

    python -m tests.benchmarks.attention [--repeats 7] [--only memory]

The inputs are four random images of 224x224 in channels-last memory; torch has two threads. The back ends `reference` (pad,
unfold, einsum) and `unfused` (one kernel per operator) are compared with the fused operators: ratios are other / fused within a
repeat, and the tables list medians and ranges. Each table is measured in a new process. `python -m tests.gpu` measures GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import san
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention
from tests.benchmarks.stages import KINDS, STAGES, Core
from tests.benchmarks.tables import ratio, table

BACKENDS: tuple[ops.Backend, ...] = ("auto", "unfused", "reference")
BATCH, THREADS = 4, 2
Call = Callable[[], Any]
M_MMAP_THRESHOLD = -3  # from <malloc.h>


def under(backend: ops.Backend, call: Call) -> Call:
    """Returns a function that runs the call with this back end."""

    def run() -> None:
        with ops.backend(backend):
            call()

    return run


def measure(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each repeat. All calls take turns, so that disturbances affect all of them.

    Each call runs twice, and the second, warm run counts.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            if repeat:
                found[name].append(1000 * (time.perf_counter() - start))
    return found


@contextmanager
def without_core() -> Iterator[None]:
    """Replaces attention by its beta, to measure the rest of a network."""
    with patch.object(PairwiseAttention, "attend", _pass_on), patch.object(PatchwiseAttention, "attend", _pass_on):
        yield


def _pass_on(self: object, phi: Tensor, psi: Tensor, beta: Tensor) -> Tensor:
    return beta + (phi.mean() + psi.mean())


def steps(model: torch.nn.Module, images: Tensor) -> dict[str, Call]:
    """Returns functions that run a training step (forward and backward) and an evaluation."""

    def train() -> None:
        model.train()
        model(images).sum().backward()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(images)

    return {"training step": train, "evaluation": evaluate}


def network(kind: str, repeats: int) -> None:
    """Measures SAN10 with each back end and without its attention, and ResNet26."""
    images = torch.randn(BATCH, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    resnet, rows = steps(san.create_model("resnet26"), images), []
    for name, call in steps(san.create_model(f"san10_{kind}"), images).items():
        calls: dict[str, Call] = {backend: under(backend, call) for backend in BACKENDS}
        ms = measure(calls | {"resnet26": resnet[name], "rest": without_core()(call)}, repeats)
        ours, rest, other = (statistics.median(ms[key]) for key in ("auto", "rest", "resnet26"))
        ratios = [ratio(ms[key], ms["auto"]) for key in ("reference", "unfused", "resnet26")]
        rows.append([name, ours, *ratios[:2], rest, other, ratios[2]])
    header = ["SAN10", "fused, ms", "reference / fused", "unfused / fused", "without attention, ms"]
    print(table(f"Network, {kind}", [*header, "ResNet26, ms", "ResNet26 / fused"], rows), flush=True)


def memory(kind: str) -> None:
    """Measures the memory of a training step of attention alone in each stage."""
    # malloc then returns every large block to the system. Blocks that it kept would not be counted in the next call.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    rows = list[list[Any]]()
    for stage in STAGES:
        core = Core(kind, stage, BATCH)
        compared: tuple[ops.Backend, ...] = ("auto", "reference")
        peak = {b: peak_memory(under(b, core.train)) for b in compared}
        saved = {b: saved_memory(core, b) for b in compared}
        cells = ((held["auto"] / 2**20, f"{held['reference'] / max(held['auto'], 1):.1f}") for held in (peak, saved))
        rows.append([stage, *(cell for pair in cells for cell in pair)])
    header = ["training", "peak MiB", "reference / fused", "saved MiB", "reference / fused"]
    print(table(f"Memory, {kind}", header, rows), flush=True)


def saved_memory(core: Core, backend: ops.Backend) -> int:
    """Returns the bytes that forward saves for backward, without inputs and parameters."""
    given = {x.untyped_storage().data_ptr() for x in core.wanted}
    saved: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        under(backend, core.train)()
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


PARTS = ("network", "memory")


def section(part: str, kind: str, repeats: int) -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    if part == "network":
        network(kind, repeats)
    else:
        memory(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    options = parser.parse_args()
    where = f"{platform.processor() or platform.machine()} CPU"
    print(f"torch {torch.__version__}, {where}, {THREADS} threads, batch {BATCH}, {options.repeats} repeats.")
    for part in [options.only] if options.only else PARTS:
        for kind in KINDS:  # each in a new process, because earlier allocations change the speed of later ones
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                pool.submit(section, part, kind, options.repeats).result()


if __name__ == "__main__":
    main()
