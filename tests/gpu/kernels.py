"""The slowest kernels in a training step of the attention of SAN10's stages, by torch's profiler, in TF32.

The comments of the kernels quote these times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.stages import KINDS, STAGES, Core
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.timing import under

CALLS = 5
SHOWN = 6
"""Kernels of each stage."""


def profiled(kind: str, settings: Settings) -> Iterator[Row]:
    if not settings.on_gpu:
        raise SkipCase("needs a GPU")
    kernels(settings)
    for stage in STAGES:
        call = under("auto", "tf32", settings.device, Core(kind, stage, 32, settings.device).train)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
        for event in events[:SHOWN]:
            name = re.sub(r"void |[\w:]*\(anonymous namespace\)::|san::cuda::|at::native::|\(.*", "", event.key)
            row = {"kind": kind, "stage": stage, "kernel": name[:80]}
            yield row | {"launches": event.count / CALLS, "ms": event.self_device_time_total / 1000 / CALLS}


ALL = [Case("kernels", kind, partial(profiled, kind), 28) for kind in KINDS]
