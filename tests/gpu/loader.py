"""Measures how fast photographs arrive on the device: decoded by the GPU, by the CPU, and by PyTorch's DataLoader."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.timing import spread

if TYPE_CHECKING:
    from pipelines import Loader

MOST_THREADS = 16
CLASSES = 10
Epoch = Callable[[int], Iterator[torch.Tensor]]
"""The batches of an epoch."""


def photographs(settings: Settings) -> Path:
    """A folder of photographs in `train` and `val`: copies of the given ones, or generated ones."""
    root, counts = Path(settings.work, "photographs"), {"train": 2048, "val": 256}
    if settings.small:
        counts = {"train": 64, "val": 16}
    if root.exists():
        return root
    if settings.photographs is None:
        from tests.benchmarks.photographs import write_photographs

        for seed, (split, count) in enumerate(counts.items()):
            write_photographs(root, split, count, len(os.sched_getaffinity(0)), seed)
        return root
    originals = sorted(Path(settings.photographs).rglob("*.[Jj][Pp]*[Gg]"))
    for split, count in counts.items():
        for number, original in zip(range(count), itertools.cycle(originals), strict=False):
            copy = root / split / f"class{number % CLASSES}" / f"{number:05d}.jpg"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, copy)
    return root


def contenders(mode: str, batch: int, threads: int, settings: Settings) -> dict[str, Epoch]:
    """Epochs by decoder."""
    # Imported here, because a machine for kernel tests lacks the packages for these modules; DALI would be loaded last.
    import nvidia.dali  # noqa: F401

    from pipelines import Dataset, Loader, Transform
    from tests.benchmarks.loading import TUNED, Setting, epochs

    train = mode != "validation"
    found: dict[str, Epoch] = {}
    if mode == "CIFAR-10":
        transform, root = Transform(size=48, resize=48, crop_padding=6), Path(settings.cifar10 or "")
    else:  # the DataLoader has no shifted crops; it comes first, because its processes are forks of this one
        transform, root = Transform(), photographs(settings)
        found["DataLoader"] = epochs(TUNED, Setting(root, transform), train, batch, threads)
    for decoder in ("cpu", settings.device) if settings.on_gpu else ("cpu",):
        device = torch.device(decoder)
        loader = Loader(Dataset.scan(root, "train"), transform, train=train, batch_size=batch, threads=threads, device=device)
        found[decoder] = partial(of_loader, loader)
    return found


def of_loader(loader: Loader, number: int) -> Iterator[torch.Tensor]:
    return (batch.images_NCHW for batch in loader.epoch(number))


def loading(mode: str, settings: Settings) -> Iterator[Row]:
    """Measures images per second of whole epochs, from files in the page cache to normalized batches on the device."""
    if mode == "CIFAR-10" and settings.cifar10 is None:
        raise SkipCase("needs --cifar10")
    batch, repeats = (16, 1) if settings.small else (128, 3)
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    found = contenders(mode, batch, threads, settings)
    speeds: dict[str, list[float]] = {name: [] for name in found}
    for epoch in range(repeats + 1):
        for name, images in found.items():
            began, loaded = time.perf_counter(), 0
            for images_NCHW in images(epoch):
                loaded += len(images_NCHW)
                if settings.on_gpu and not images_NCHW.is_cuda:
                    images_NCHW.pin_memory().to(settings.device, non_blocking=True)
            if settings.on_gpu:
                torch.cuda.synchronize()
            if epoch:  # the first is the warm-up
                speeds[name].append(loaded / (time.perf_counter() - began))
    for decoder, measured in speeds.items():
        yield {"mode": mode, "decoder": decoder, "threads": threads, "batch": batch, "images_per_s": spread(measured)}


ALL = [
    Case("loader", mode, partial(loading, mode), priority, 300)
    for mode, priority in (("training", 24), ("CIFAR-10", 25), ("validation", 40))
]
