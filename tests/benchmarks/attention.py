"""Measures the memory of a training step of SAN10's attention layers on the CPU: `python -m tests.benchmarks.attention`.

The networks' input would be four images of 224x224; torch has two threads. Plain PyTorch operators (pad, unfold, einsum) are
compared with the fused ones. Each kind of attention is measured in a new process. `python -m tests.gpu` measures GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from san import ops
from tests.benchmarks.stages import KINDS, STAGES, Core
from tests.benchmarks.tables import table

BACKENDS: tuple[ops.Backend, ...] = ("auto", "reference")
BATCH, THREADS = 4, 2
M_MMAP_THRESHOLD = -3  # from <malloc.h>


def memory(kind: str) -> None:
    """Measures the memory of a training step of attention alone in each stage."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    # malloc then returns every large block to the system. Blocks that it kept would not be counted in the next call.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    rows = list[list[Any]]()
    for stage in STAGES:
        core = Core(kind, stage, BATCH)
        peak, saved = dict[ops.Backend, float](), dict[ops.Backend, float]()
        for backend in BACKENDS:
            with ops.backend(backend):
                peak[backend], saved[backend] = peak_memory(core.train), saved_memory(core)
        cells = ((held["auto"] / 2**20, f"{held['reference'] / max(held['auto'], 1):.1f}") for held in (peak, saved))
        rows.append([stage, *(cell for pair in cells for cell in pair)])
    header = ["training", "peak MiB", "reference / fused", "saved MiB", "reference / fused"]
    print(table(f"Memory, {kind}", header, rows), flush=True)


def saved_memory(core: Core) -> int:
    """Returns the bytes that forward saves for backward, without inputs and parameters."""
    given = {x.untyped_storage().data_ptr() for x in core.wanted}
    saved: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        core.train()
    return sum(saved.values())


def peak_memory(call: Callable[[], object]) -> float:
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()} CPU, {THREADS} threads, batch {BATCH}.")
    for kind in KINDS:  # each in a new process, because earlier allocations change what later ones take
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(memory, kind).result()


if __name__ == "__main__":
    main()
