"""Compares a whole trial (`experiments.training.trainer.run_trial`) with a loop in plain PyTorch.

They take turns, epoch by epoch, in the same processes (`tests.benchmarks.overhead`). On several GPUs there is a process
for each, and the plain loop uses DistributedDataParallel.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
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
    # Imported here, because a machine for kernel tests lacks these packages.
    import deepspeed  # noqa: F401
    import mlflow  # noqa: F401

    devices = torch.cuda.device_count() if settings.on_gpu else 2
    if several and devices < 2:
        raise SkipCase(f"needs several GPUs; this machine has {devices}")
    if engine and not settings.on_gpu:
        raise SkipCase("needs a GPU")
    workers = devices if several else 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    name = f"training-{workers}-{'-'.join(engine)}"
    runs, found = Path(settings.work, name), Path(settings.work, f"{name}.json")
    arguments = [settings.device, "digits" if settings.small else "imagenet", str(runs), str(found)]
    arguments += overrides(settings, workers, engine)
    processes = []
    for rank in range(workers):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **({k: str(v) for k, v in ranks.items()} if several else {})}
        processes.append(subprocess.Popen([sys.executable, "-m", "tests.gpu.training", *arguments], env=environment))
    codes = [process.wait() for process in processes]
    assert not any(codes), f"exit codes of the workers: {codes}"
    epochs = json.loads(found.read_text())
    ratios = [bare / trial for trial, bare in zip(epochs["trial"], epochs["bare"], strict=True)]
    speeds = {name: spread([epochs["images"] / seconds for seconds in epochs[name]]) for name in ("trial", "bare")}
    yield {"workers": workers, "engine": engine, "images_per_s": speeds, "trial_over_plain": spread(ratios)}


def worker(profile: str, runs: Path, found: Path, keys: list[str]) -> None:
    """Runs one worker of the trial and of the plain loop; the first one writes the seconds of all epochs except the first."""
    from tests.benchmarks.overhead import prepared, times

    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo" if sys.argv[1] == "cpu" else "cpu:gloo,cuda:nccl")
    workspace, trial = prepared(profile, keys, runs)
    trial_epochs, bare_epochs = times(0, workspace, trial)
    if int(os.environ.get("RANK", "0")) == 0:
        images = 2 * trial.config.data.synthetic_classes * trial.config.data.synthetic_per_class  # training and validation
        seconds = {"trial": [spent.wall for spent in trial_epochs[1:]], "bare": [spent.wall for spent in bare_epochs[1:]]}
        found.write_text(json.dumps({"images": images, **seconds}))


ALL = [
    Case("training", "one worker", partial(training, False, {}), 24, 400),
    Case("training", "one worker, CUDA graphs", partial(training, False, {"cuda_graphs": "true"}), 42, 400),
    Case("training", "several workers", partial(training, True, {}), 43, 400),
]

if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        torch.set_num_threads(1)
    worker(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
