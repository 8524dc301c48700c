"""Measures training and evaluation of whole networks at 224x224, each next to ResNet26 in the same process.

A training step is forward, loss, backward and the step of SGD with momentum and weight decay; images are random, channels last.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import san
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings
from tests.gpu.timing import PRECISIONS, Call, measure, prepare, spread, under

YARDSTICK = "resnet26"
NAMES = ("san10_pairwise", "san10_patchwise", "san10_scalar")
BATCH = 32
HOW = ("eager", "graphs")
MODES = ("eval", "train")


class Network:
    """A model with its optimizer on random images. `how` is `eager`, `graphs` or `compiled`."""

    def __init__(self, name: str, how: str, settings: Settings) -> None:
        size: dict[str, Any] = {"num_stages": 2, "width_mult": 0.5} if settings.small else {}
        batch, side, device = (2, 32, settings.device) if settings.small else (BATCH, 224, settings.device)
        self.model: nn.Module = san.create_model(name, **size).to(device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Random numbers of the CPU, because those of the GPU can fail after a failed capture.
        self.images = torch.randn(batch, 3, side, side).to(device).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(1000, (batch,)).to(device)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.model
        if how == "compiled":
            self.run = torch.compile(self.model, backend="inductor" if settings.on_gpu else "aot_eager")

    def train(self) -> None:
        self.model.train()
        self.sgd.zero_grad()
        cross_entropy(self.run(self.images), self.labels).backward()
        self.sgd.step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.run(self.images)


def network(name: str, precision: str, how: str, settings: Settings) -> Iterator[Row]:
    """Measures images per second and peak memory; running out of memory is a result."""
    kernels(settings)
    for mode in MODES:
        yield {"model": name, "precision": precision, "how": how, **measured(name, precision, how, mode, settings)}


def measured(name: str, precision: str, how: str, mode: str, settings: Settings) -> Row:
    """Measures a network and ResNet26 in one mode. The memory of both is free again afterwards."""
    calls: dict[str, Call] = {}
    peak: dict[str, float | None] = {}
    left_out: dict[str, str] = {}
    for each in (name, YARDSTICK):
        before = free_memory(settings)
        ready, missing = prepare({each: step(each, precision, how, mode, settings)}, settings, how == "graphs")
        calls, left_out = calls | ready, left_out | missing
        peak[each] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1) if settings.on_gpu and ready else None
    samples, batch = measure(calls, settings, 7), 2 if settings.small else BATCH
    speeds = {each: spread([1000 * batch / ms for ms in times]) for each, times in samples.items()}
    row: Row = {"mode": mode, "left_out": left_out, "images_per_s": speeds, "peak_MiB": peak}
    if YARDSTICK in samples and name in samples:
        ratios = [theirs / ours for ours, theirs in zip(samples[name], samples[YARDSTICK], strict=True)]
        row["times_resnet26"] = spread(ratios)
    return row | {"passed": left_out.get(name) in (None, "out of memory")}


def step(name: str, precision: str, how: str, mode: str, settings: Settings) -> Call:
    """Returns a call that creates the network the first time, so that an error there concerns only this network."""
    net = functools.cache(partial(Network, name, how, settings))
    run = {"train": Network.train, "eval": Network.evaluate}[mode]
    return under("auto", precision, settings.device, lambda: run(net()))


def free_memory(settings: Settings) -> int:
    """Frees memory, resets the peak, and returns the bytes that remain allocated."""
    gc.collect()
    if not settings.on_gpu:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _cases() -> Iterator[Case]:
    """Those of pairwise and patchwise attention come first, TF32 before bfloat16, eager before CUDA graphs."""
    for name, precision, how in itertools.product(NAMES, PRECISIONS[:2], HOW):
        far = 2 * (name == NAMES[-1]) + PRECISIONS.index(precision) + HOW.index(how)
        yield Case("models", f"{name} {precision} {how}", partial(network, name, precision, how), 21 + far, 120)


ALL = list(_cases())
SMALL = [case for case in ALL if case.name.endswith("eager")]
