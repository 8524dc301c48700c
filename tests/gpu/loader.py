"""Measures the image loader with 1 to 16 threads on photographs; on a GPU, the GPU decodes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from tests.gpu.case import Case, Row, Settings
from tests.gpu.timing import spread

THREADS = (1, 2, 4, 8, 16)


def loading(mode: str, settings: Settings) -> Iterator[Row]:
    """Measures images per second of whole epochs, from files in the page cache to normalized batches on the device."""
    # Imported here, because a machine for kernel tests lacks the packages for these modules.
    from pipelines import Dataset, Loader, Transform
    from tests.benchmarks.photographs import write_photographs

    root, count, batch, repeats = Path(settings.work, "photographs"), *((64, 16, 1) if settings.small else (4000, 128, 3))
    if not root.exists():
        write_photographs(root, "train", count, len(os.sched_getaffinity(0)))
    dataset, device = Dataset.scan(root, "train"), torch.device(settings.device)
    used = [threads for threads in THREADS if threads <= len(os.sched_getaffinity(0))]
    loaders = {
        threads: Loader(dataset, Transform(), train=mode == "training", batch_size=batch, threads=threads, device=device)
        for threads in used
    }
    speeds: dict[int, list[float]] = {threads: [] for threads in used}
    for epoch in range(repeats + 1):
        for threads, loader in loaders.items():
            began = time.perf_counter()
            loaded = sum(len(batch.labels_N) for batch in loader.epoch(epoch))
            if settings.on_gpu:
                torch.cuda.synchronize()
            if epoch:  # the first is the warm-up
                speeds[threads].append(loaded / (time.perf_counter() - began))
    for threads, found in speeds.items():
        yield {"mode": mode, "threads": threads, "batch": batch, "images_per_s": spread(found)}


ALL = [Case("loader", mode, partial(loading, mode), priority, 300) for mode, priority in (("training", 24), ("validation", 40))]
