"""Attention alone at the sizes of SAN10's stages: our kernels, PyTorch operators and the authors' kernels.

Each row compares in one process, in turn: `fused` (our kernels), `unfused` (a kernel per operator), `reference` (pad, unfold,
einsum: plain torch) and `authors`. The roofline is the least time: the larger of bytes and FLOPs divided by their peak rates.
Bytes are phi, psi, beta and y once each (twice in training, for their gradients); FLOPs are two per multiply-accumulate of
gamma and the aggregation (three times as many in training). The peaks are those of a large copy and a large matrix product,
measured in the same process. The L2 cache is cold at the start of each call.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from functools import partial

import torch

from san import ops
from san.nn import ScalarAttention
from tests.benchmarks.stages import KINDS, MODES, STAGES, Core
from tests.gpu import authors
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings
from tests.gpu.timing import PRECISIONS, Call, measure, peaks, prepare, summary, under

BACKENDS: dict[str, ops.Backend] = {"fused": "auto", "unfused": "unfused", "reference": "reference"}


def cores(kind: str, how: str, settings: Settings) -> Iterator[Row]:
    """Measures training and evaluation of each stage."""
    kernels(settings)
    peak = peaks(settings)
    yield {"peaks": peak}
    batch, largest = (1, 14) if settings.small else (32, 224)
    # All at once, because the GPU's random numbers can fail after a failed capture.
    all_cores = [Core(kind, stage, batch, settings.device, half=how == "bfloat16", largest_side=largest) for stage in STAGES]
    for stage, core in zip(STAGES, all_cores, strict=True):
        for mode in MODES:
            calls = contenders(core, mode, how, settings)
            ready, left_out = prepare(calls, settings, graph=True)
            row: Row = {"core": kind, "stage": stage, "mode": mode, "precision": how, "batch": batch}
            training = mode == "train"
            seconds = {
                "bytes": core.bytes(training) / peak["bytes_per_s"],
                "FLOPs": core.flops(training) / peak["flops"][how],
            }
            limit = max(seconds, key=lambda name: seconds[name])
            if settings.on_gpu:
                row["peak_MiB"] = {name: peak_memory(calls[name]) for name in ready}
            row |= {"left_out": left_out, "roofline_ms": 1000 * seconds[limit], "limit": limit, "passed": "fused" in ready}
            yield row | summary(measure(ready, settings, 9), "fused")
            del ready, calls
            if settings.on_gpu:
                torch.cuda.empty_cache()


def contenders(core: Core, mode: str, how: str, settings: Settings) -> dict[str, Call]:
    run = partial(MODES[mode], core)
    calls = {name: under(backend, how, settings.device, run) for name, backend in BACKENDS.items()}
    has_theirs = how != "bfloat16" and not isinstance(core.attention, ScalarAttention)
    if has_theirs and settings.authors and settings.on_gpu and importlib.util.find_spec("cupy"):
        theirs = functools.cache(partial(authors.calls, core, settings))  # built in the first call, which may fail
        calls["authors"] = under("reference", how, settings.device, lambda: theirs()[mode]())
    return calls


def peak_memory(call: Call) -> float:
    """MiB that a call allocates at once, without its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


ALL = [
    Case("cores", f"{kind} {how}", partial(cores, kind, how), 20 + 6 * rank, 180)
    for rank, how in enumerate(PRECISIONS)
    for kind in KINDS
]
