"""Compares a trial in a sweep of Ray Tune with a loop in plain PyTorch (`tests.benchmarks.overhead`).

They take turns, epoch by epoch, in the same processes. On several GPUs there is a process for each, and the plain loop uses
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.timing import spread


def overrides(settings: Settings, workers: int, engine: dict[str, str]) -> list[str]:
    """Returns a grid with synthetic images, which need no decoding, and batches of 32 per worker, as in the paper."""
    if settings.small:
        keys = ["recipe.epochs=2", f"recipe.batch_size={32 * workers}", "data.synthetic_per_class=16", "data.source=synthetic"]
        keys += ["data.synthetic_classes=10", "resources.gpus=0", "resources.cpus=1"]
    else:
        keys = ["recipe.epochs=8", f"recipe.batch_size={32 * workers}", "data.source=synthetic", "data.synthetic_classes=16"]
        keys += [f"data.synthetic_per_class={120 * workers}", "resources.gpus=1", "resources.cpus=4"]
    return [*keys, f"resources.workers={workers}", *(f"engine.{key}={value}" for key, value in engine.items())]


def training(several: bool, engine: dict[str, str], settings: Settings) -> Iterator[Row]:
    # Imported here, because a machine for kernel tests lacks Ray, DeepSpeed and MLflow.
    from tests.benchmarks.overhead import in_sweep, times

    devices = torch.cuda.device_count() if settings.on_gpu else 2
    if several and devices < 2:
        raise SkipCase(f"needs several GPUs; this machine has {devices}")
    if engine and not settings.on_gpu:
        raise SkipCase("needs a GPU")
    workers = devices if several else 1
    folder = Path(settings.work, f"training-{workers}-{'-'.join(engine)}")
    profile = "digits" if settings.small else "imagenet"
    trial, spent = in_sweep(times, folder, profile, overrides(settings, workers, engine))
    images = 2 * trial.config.data.synthetic_classes * trial.config.data.synthetic_per_class  # training and validation
    seconds = {loop: [wall for wall, _ in spent[loop][1:]] for loop in ("trial", "plain")}
    ratios = [of_plain / of_trial for of_trial, of_plain in zip(seconds["trial"], seconds["plain"], strict=True)]
    speeds = {loop: spread([images / wall for wall in walls]) for loop, walls in seconds.items()}
    yield {"workers": workers, "engine": engine, "images_per_s": speeds, "trial_over_plain": spread(ratios)}


ALL = [
    Case("training", "one worker", partial(training, False, {}), 24, 400),
    Case("training", "CUDA graphs, one worker", partial(training, False, {"cuda_graphs": "true"}), 42, 400),
    Case("training", "several workers", partial(training, True, {}), 43, 400),
]
