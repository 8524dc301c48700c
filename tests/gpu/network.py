"""Where the time of a training step goes, and what single optimizations save.

The step is a CUDA graph, replayed under torch's profiler. Variants without an optimization, and one that torch.compile made,
take turns with it. On a CPU, they have no meaning, because each step chooses its optimizations, and kernels take no time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from san.nn import norm
from san.nn.mapping import Gamma
from tests.benchmarks.traffic import step as traffic
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings
from tests.gpu.models import Network
from tests.gpu.timing import Call, captured, measure, spread, under

NAMES = ("san10_pairwise", "san10_patchwise", "resnet26")
REPLAYS = 5
SLOWEST = 12
"""Kernels that are listed by name."""
# The first class whose pattern matches the kernel's name. The names are those of tests.benchmarks.traffic.
CLASSES = {
    "pooling, stem": "pool|stem",
    "norm": "norm_(relu|gradient|affine)|track_statistics|distance_sums|gradient_sums_kernel|batch_?norm|bn_(fw|bw)|bnAdd",
    "attention": "san::",
    "optimizer": "multi_tensor",
    "convolutions, products": "cudnn|cutlass|gemm|gemv|wgrad|dgrad|fprop|conv|splitK",
    "copies": "nchwToNhwc|nhwcToNchw|CatArray|[Mm]emcpy|copy|transpose",
    "fill": "[Mm]emset|FillFunctor",
    "sums": "reduce",
    "elementwise": "elementwise|triton",
}


def never(*_: object) -> bool:
    return False


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "norms, then ReLUs": partial(patch.object, norm, "_fuses_norm_relu", never),
    "residuals added by torch": partial(patch.object, norm, "_adds_residual", never),
    "gradients of residuals added by torch": partial(patch.object, norm, "_adds_gradients", never),
    "the stem's norm as any other": partial(patch.object, norm, "_folds", never),
    "the stem's layers one by one": partial(patch.object, norm, "_fuses_stem", never),
    "pools by torch": partial(patch.object, norm, "_fuses_max_pool", never),
    "one convolution at a time": partial(patch.object, norm, "_run_as_one", never),
    "1x1 convolutions by cuDNN": partial(patch.object, norm, "_prefers_product", never),
    "patchwise attention with stored weights": partial(patch.object, Gamma, "fuses_patch_values", never),
    "cudnn.benchmark": partial(torch.backends.cudnn.flags, enabled=True, benchmark=True),
}
"""How a step is captured."""


def class_of(kernel: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel)), "other")


def step(name: str, precision: str, settings: Settings, how: str = "graphs") -> Call:
    """A training step of 32 images, on a GPU as a CUDA graph."""
    network = Network(name, how, settings)
    call = under("auto", precision, settings.device, network.train)
    return captured(call)[0] if settings.on_gpu else call


def compiled(name: str, precision: str, settings: Settings) -> Iterator[Row]:
    """A step of the network that torch.compile has compiled, in turns with the step as it is."""
    kernels(settings)
    calls = {how: step(name, precision, settings, how) for how in ("graphs", "compiled")}
    for how, found in measure(calls, settings, 5).items():
        yield {"network": name, "precision": precision, "variant": how, "ms": spread(found)}


def profiled(name: str, precision: str, settings: Settings) -> Iterator[Row]:
    """Milliseconds and launches of each class in a step, the slowest kernels, and the time in which no kernel runs."""
    kernels(settings)
    calls: dict[str, Call] = {}
    for variant, changed in VARIANTS.items():
        with changed():
            calls[variant] = step(name, precision, settings)
    times = measure(calls, settings, 5)
    with profile(activities=[ProfilerActivity.CUDA if settings.on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(REPLAYS):
            calls["as it is"]()
        if settings.on_gpu:
            torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events:
        total = totals[class_of(event.key)]
        total[0] += event.self_device_time_total / 1000 / REPLAYS
        total[1] += event.count / REPLAYS
    named = {"network": name, "precision": precision}
    moved = traffic(name, 32, True).bytes if precision == "tf32" and settings.on_gpu else {}
    for kind, (milliseconds, launches) in sorted(totals.items(), key=lambda item: -item[1][0]):
        speed = {"TB_per_s": round(moved[kind] / milliseconds / 1e9, 2)} if kind in moved and milliseconds > 0 else {}
        yield named | {"class": kind, "ms": round(milliseconds, 3), "launches": launches, **speed}
    for event in events[:SLOWEST]:
        kernel = re.sub(r"void |[\w:]*\(anonymous namespace\)::|at::native::", "", event.key)[:160]
        yield named | {"kernel": kernel, "launches": event.count / REPLAYS, "ms": event.self_device_time_total / 1000 / REPLAYS}
    idle = spread(times["as it is"])[0] - sum(milliseconds for milliseconds, _ in totals.values())
    yield named | {"class": "idle", "ms": round(idle, 3), "launches": 0}
    for variant, found in times.items():
        yield named | {"variant": variant, "ms": spread(found)}


ALL = [
    *(
        Case("network", f"{name} {precision}", partial(profiled, name, precision), 22 + rank)
        for rank, precision in enumerate(("tf32", "bfloat16"))
        for name in NAMES
    ),
    *(Case("network", f"{name} compiled", partial(compiled, name, "tf32"), 27, 240) for name in NAMES),
]
