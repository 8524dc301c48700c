"""Where the time of a training step goes: a CUDA graph of it, replayed under torch's profiler, by class of kernel."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.models import Network, Setting
from tests.gpu.timing import Call, captured, measure, spread, under

NAMES = ("san10_pairwise", "san10_patchwise", "resnet26")
REPLAYS = 5
SLOWEST = 12
"""Kernels that are listed by name."""
# The first class whose pattern matches the kernel's name.
CLASSES = {
    "attention": "san::",
    "optimizer": "multi_tensor",
    "norm": "batch_?norm|bn_(fw|bw)|bnAdd",
    "pooling": "pool",
    "convolution and products": "cudnn|cutlass|gemm|gemv|wgrad|dgrad|fprop|conv|splitK",
    "layout and copies": "nchwToNhwc|nhwcToNchw|CatArray|[Mm]emcpy|copy|transpose",
    "fill": "[Mm]emset|FillFunctor",
    "sums": "reduce",
    "elementwise": "elementwise",
}


def class_of(kernel: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel)), "other")


def step(name: str, precision: str, settings: Settings) -> Call:
    """A training step of 32 images as a CUDA graph."""
    network = Network(name, Setting(32, precision, "graphs"), settings)
    return captured(under("auto", precision, settings.device, network.train))[0]


def profiled(name: str, precision: str, settings: Settings) -> Iterator[Row]:
    """Milliseconds and launches of each class in a step, the slowest kernels, and the time in which no kernel runs."""
    if not settings.on_gpu:
        raise SkipCase("needs a GPU")
    kernels(settings)
    times = {}
    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        call = step(name, precision, settings)
        times[benchmark] = spread(measure({"step": call}, settings, 5)["step"])
        if benchmark:
            break
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(REPLAYS):
                call()
            torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events:
        total = totals[class_of(event.key)]
        total[0] += event.self_device_time_total / 1000 / REPLAYS
        total[1] += event.count / REPLAYS
    named = {"network": name, "precision": precision}
    for kind, (milliseconds, launches) in sorted(totals.items(), key=lambda item: -item[1][0]):
        yield named | {"class": kind, "ms": round(milliseconds, 3), "launches": launches}
    for event in events[:SLOWEST]:
        kernel = re.sub(r"void |[\w:]*\(anonymous namespace\)::|at::native::", "", event.key)[:160]
        yield named | {"kernel": kernel, "launches": event.count / REPLAYS, "ms": event.self_device_time_total / 1000 / REPLAYS}
    busy = sum(milliseconds for milliseconds, _ in totals.values())
    yield named | {"step_ms": times[False], "with_cudnn_benchmark_ms": times[True], "idle_ms": times[False][0] - busy}


ALL = [
    Case("network", f"{name} {precision}", partial(profiled, name, precision), 22 + rank)
    for rank, precision in enumerate(("tf32", "bfloat16"))
    for name in NAMES
]
