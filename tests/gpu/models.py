"""Measures training and evaluation of whole networks at 224x224, each next to ResNet26 in the same process.

A training step is forward, loss, backward and the step of SGD with momentum and weight decay; images are random, channels last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
NAMES = (
    "san10_pairwise",
    "san10_patchwise",
    "resnet50",
    "san15_pairwise",
    "san15_patchwise",
    "san19_pairwise",
    "san19_patchwise",
)
BATCHES = (32, 128, 64, 256)
HOW = ("eager", "graphs", "compiled")


@dataclass(frozen=True)
class Setting:
    """One combination of network, batch size, precision and mode."""

    batch: int
    precision: str
    how: str


class Network:
    """A model with its optimizer on random images."""

    def __init__(self, name: str, setting: Setting, settings: Settings) -> None:
        size: dict[str, Any] = {"num_stages": 2, "width_mult": 0.5} if settings.small else {}
        batch, side, device = (2, 32, settings.device) if settings.small else (setting.batch, 224, settings.device)
        self.batch, self.before = batch, torch.cuda.memory_allocated() if settings.on_gpu else 0
        if settings.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.model: nn.Module = san.create_model(name, **size).to(device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(1000, (batch,), device=device)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.model
        if setting.how == "compiled":
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


def network(name: str, setting: Setting, settings: Settings) -> Iterator[Row]:
    """Measures images per second and peak memory in training and evaluation; running out of memory is a result."""
    kernels(settings)
    row: Row = {"model": name, "precision": setting.precision, "how": setting.how}
    graph = setting.how == "graphs"
    for mode in ("train", "eval"):
        calls: dict[str, Call] = {}
        peak: dict[str, float | None] = {}
        batch = setting.batch
        for each in (name, YARDSTICK):
            try:
                net = Network(each, setting, settings)
                batch = net.batch
                call = under("auto", setting.precision, settings.device, net.train if mode == "train" else net.evaluate)
                ready, _ = prepare({each: call}, settings, graph)
                calls |= ready
                peak[each] = peak_MiB(net.before, settings) if ready else None
            except torch.OutOfMemoryError:
                peak[each] = None
        samples = measure(calls, settings, 7) if name in calls else {}
        speeds = {each: spread([1000 * batch / ms for ms in times]) for each, times in samples.items()}
        found: Row = {"mode": mode, "batch": batch, "oom": name not in calls, "images_per_s": speeds, "peak_MiB": peak}
        if YARDSTICK in samples and name in samples:
            ratios = [theirs / ours for ours, theirs in zip(samples[name], samples[YARDSTICK], strict=True)]
            found["times_resnet26"] = spread(ratios)
        yield row | found
        del calls, samples
        if settings.on_gpu:
            torch.cuda.empty_cache()


def peak_MiB(before: int, settings: Settings) -> float | None:
    """Returns the peak memory since the network was created, including warm-up and capture."""
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1) if settings.on_gpu else None


def _cases() -> Iterator[Case]:
    """Yields all combinations; those closest to 32 images, TF32 and eager come first."""
    for name, batch, how_precise, how in itertools.product(NAMES, BATCHES, PRECISIONS, HOW):
        ranks = NAMES.index(name), BATCHES.index(batch), PRECISIONS.index(how_precise), HOW.index(how)
        setting = Setting(batch, how_precise, how)
        label = f"{name} batch {batch} {how_precise} {how}"
        # SAN10 at batch 32 without torch.compile, in TF32 or bfloat16, comes before one case of each other kind (24).
        is_usual = ranks[0] <= 1 and ranks[1] == 0 and ranks[2] <= 1 and ranks[3] <= 1
        far = max(0, ranks[0] - 1) + sum(ranks[1:])
        yield Case("models", label, partial(network, name, setting), 21 + (1 if is_usual else 4) * far, 180)


ALL = list(_cases())
USUAL = ("batch 32 tf32 eager", "batch 32 bfloat16 eager", "pairwise batch 32 tf32 compiled")
SMALL = [case for case in ALL if case.name.startswith("san10") and case.name.endswith(USUAL)]
