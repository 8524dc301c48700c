"""Measures the overhead of engine, tracking and checkpoints: a trial against a loop in plain PyTorch.

    python -m tests.benchmarks.overhead [--setting digits] [--setting workers]

Both train the same model with the same loader, SGD, cosine schedule, label smoothing and validation; the plain loop is
`bare_epochs`. With the setting `workers`, two workers train in step, in the plain loop with DistributedDataParallel.
`run_trial` includes DeepSpeed, checkpoints, logs, `summary.csv`, and MLflow on SQLite with system metrics.
They take turns in one process: one epoch of the trial, two of the loop, two of the trial, and so on, each after a short rest,
so each one comes first equally often. The CPU time of the MLflow thread during a rest is added to the epoch before, as on a
single core. The first pair is left out. The results are the median ratios of wall time and of the CPU time of all
threads of the first worker over pairs, with 95 % intervals from 10 000 resamples. Memory is the peak of a new process of the
first worker that trains only one way, for four epochs.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from experiments.grids.config import PROJECT_DIR
from experiments.grids.grid import Trial
from experiments.runs.workspace import Workspace
from experiments.training.device import training_device
from experiments.training.engine import join_process_group
from experiments.training.images import loaders
from experiments.training.trainer import run_trial

GRID = PROJECT_DIR / "experiments" / "grids" / "footprint.yaml"
ROW = "pairwise_7"
SETTINGS: dict[str, tuple[str, ...]] = {
    "digits": ("recipe.epochs=120",),
    "workers": ("recipe.epochs=60", "resources.workers=2"),
}
"""Overrides of the profile `digits`."""
REST = 0.25
"""Seconds, enough for MLflow to store the records of an epoch."""


def bare_epochs(trial: Trial) -> Iterator[None]:
    """A training loop in plain PyTorch, with DDP for several workers; yields after each epoch."""
    config, recipe = trial.config, trial.config.recipe
    device, world = training_device(config), dist.get_world_size()
    train, val = loaders(config, trial.seed, dist.get_rank(), world, device)
    torch.manual_seed(trial.seed)
    model: nn.Module = config.model.spec().build(len(train.dataset.classes)).to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    total = train.steps * recipe.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / total)) / 2)
    for epoch in range(recipe.epochs):
        model.train()
        train_loss = 0.0
        for images, labels in train.epoch(epoch):
            loss = cross_entropy(model(images), labels, label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            train_loss += loss.item() * len(labels)
        model.eval()
        val_loss = top1 = top5 = 0.0
        with torch.no_grad():
            for images, labels in val.epoch(0):
                logits = model(images)
                val_loss += cross_entropy(logits, labels, reduction="sum").item()
                hits = logits.topk(5, dim=1).indices == labels.unsqueeze(1)
                top1 += hits[:, 0].sum().item()
                top5 += hits.sum().item()
        yield


@dataclass(frozen=True, slots=True)
class Spent:
    """The duration of an epoch in seconds."""

    wall: float
    cpu: float
    """CPU time of all threads."""

    @classmethod
    def so_far(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Spent) -> Spent:
        return Spent(self.wall - earlier.wall, self.cpu - earlier.cpu)


class Turns:
    """Runs epochs of the plain loop between those of the trial."""

    def __init__(self, bare: Iterator[None]) -> None:
        self.bare = bare
        self.trial_epochs: list[Spent] = []
        self.bare_epochs: list[Spent] = []
        self.began = Spent.so_far()

    def report(self, metrics: Mapping[str, float]) -> None:
        if "step" in metrics:  # a report during an epoch
            return
        mine = Spent.so_far().since(self.began)
        after = Spent.so_far()
        time.sleep(REST)
        tracking = Spent.so_far().since(after).cpu
        self.trial_epochs.append(Spent(mine.wall + tracking, mine.cpu + tracking))
        if len(self.trial_epochs) % 2:
            for _ in range(2):
                began = Spent.so_far()
                next(self.bare)
                self.bare_epochs.append(Spent.so_far().since(began))
                time.sleep(REST)
        self.began = Spent.so_far()


def prepared(profile: str, overrides: Sequence[str], runs: Path) -> tuple[Workspace, Trial]:
    """The trial, which workers may now train."""
    from experiments.grids.request import GridRequest
    from experiments.runner.grid_run import open_grid_run  # imports MLflow, which the plain loop does not need

    grid_run = open_grid_run(GridRequest(GRID, profile, tuple(overrides), runs))
    if os.environ.get("RANK", "0") == "0":
        grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
    return grid_run.workspace, next(trial for trial in grid_run.trials if trial.row == ROW)


def times(rank: int, workspace: Workspace, trial: Trial) -> tuple[list[Spent], list[Spent]]:
    """Trains the trial and the plain loop in turn; every worker calls this. The number of epochs must be even."""
    turns = Turns(bare_epochs(trial))
    run_trial(workspace, trial, turns.report)
    return turns.trial_epochs, turns.bare_epochs


def peak_memory(rank: int, workspace: Workspace, trial: Trial, is_bare: bool) -> float:
    """Trains only one way; returns the peak of this process in MB."""
    if is_bare:
        join_process_group(torch.device("cpu"))
        list(bare_epochs(trial))
    else:
        run_trial(workspace, trial, lambda metrics: None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_workers(function: Callable[..., Any], workspace: Workspace, trial: Trial, *arguments: object) -> Any:
    """Calls the function in a new process for each worker of the trial; returns the result of the first one."""
    workers = trial.config.resources.workers
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        calls = [(rank, workers, Path(folder, "meeting"), function, workspace, trial, *arguments) for rank in range(workers)]
        return pool.starmap(_worker, calls, chunksize=1)[0]


def _worker(rank: int, workers: int, meeting: Path, function: Callable[..., Any], *arguments: object) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    return function(rank, *arguments)


def overhead(trial: Sequence[float], bare: Sequence[float]) -> str:
    """Returns the median over pairs and its 95 % interval in percent."""
    ratios = numpy.array(trial) / numpy.array(bare)
    resampled = numpy.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = numpy.percentile(numpy.median(resampled, axis=1), (2.5, 97.5))
    median, low, high = (f"{100 * (ratio - 1):+.1f}" for ratio in (numpy.median(ratios), low, high))
    return f"{median} % ({low} to {high})"


def line(setting: str) -> str:
    overrides = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        trial_epochs, bare_epochs = in_workers(times, *prepared("digits", overrides, Path(folder, "times")))
        short = prepared("digits", (*overrides, "recipe.epochs=4"), Path(folder, "memory"))
        memory = [in_workers(peak_memory, *short, is_bare) for is_bare in (True, False)]
    pairs = list(zip(trial_epochs[1:], bare_epochs[1:], strict=True))
    walls = [trial.wall for trial, _ in pairs], [bare.wall for _, bare in pairs]
    cpus = [trial.cpu for trial, _ in pairs], [bare.cpu for _, bare in pairs]
    medians = (f"{statistics.median(each):.3f}" for each in reversed(walls))
    times_and_memory = " | ".join((*medians, overhead(*walls), overhead(*cpus), *(f"{peak:.0f}" for peak in memory)))
    return f"| {setting} | {len(pairs)} | {times_and_memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    options = parser.parse_args()
    lines = [line(setting) for setting in options.setting or SETTINGS]
    print(f"torch {torch.__version__}; seconds of an epoch, medians; overhead: median over pairs of epochs (95 % interval)\n")
    columns = ("setting", "pairs", "bare", "run_trial", "overhead", "in CPU time", "bare, MB", "run_trial, MB")
    print(f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}", *lines, sep="\n")


if __name__ == "__main__":
    main()
