"""Measures what `san run` adds to a loop in plain PyTorch: DeepSpeed, and everything else.

    python -m tests.benchmarks.overhead [--setting digits] [--setting workers]

Three loops train the same model with the same loader, SGD, cosine schedule, label smoothing and validation:

- plain: PyTorch; with the setting `workers`, DistributedDataParallel
- engine: the same loop with our `Engine`, which uses DeepSpeed
- trial: `run_trial` in a sweep of Ray Tune, with checkpoints, logs, `summary.csv`, and MLflow on SQLite with system metrics

They take turns in one process, one epoch each, after a short rest. The order of the first two alternates. The CPU time of the
MLflow thread during a rest is added to the trial, as on a single core. The first round is left out. The results are medians,
and median ratios to the plain loop with 95 % intervals from 10 000 resamples. Memory is the peak of a new process of the first
worker that trains only one way, for four epochs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cluster import ReportFn
from experiments.config.config import PROJECT_DIR
from experiments.config.grid import GridRequest, Trial
from experiments.runs.workspace import Workspace
from experiments.training.device import training_device
from experiments.training.engine import Engine, join_process_group
from experiments.training.images import loaders

GRID = PROJECT_DIR / "experiments" / "grids" / "footprint.yaml"
ROW = "pairwise_7"
SETTINGS: dict[str, tuple[str, ...]] = {
    "digits": ("recipe.epochs=80",),
    "workers": ("recipe.epochs=60", "resources.workers=2"),
}
"""Overrides of the profile `digits`."""
REST = 0.25
"""Seconds, enough for MLflow to store the records of an epoch."""
LOOPS = ("plain", "engine", "trial")


def epochs(trial: Trial, with_engine: bool) -> Iterator[None]:
    """A training loop in plain PyTorch, with DDP for several workers, or with our engine; yields after each epoch."""
    config, recipe = trial.config, trial.config.recipe
    device, world = training_device(config), dist.get_world_size()
    train, val = loaders(config, trial.seed, dist.get_rank(), world, device)
    torch.manual_seed(trial.seed)
    model: nn.Module = config.model.spec().build(len(train.dataset.classes)).to(device)
    step = _engine_step(model, trial, train.steps) if with_engine else _plain_step(model, trial, train.steps)
    for epoch in range(recipe.epochs):
        model.train()
        train_loss = 0.0
        for images, labels in train.epoch(epoch):
            train_loss += step(images, labels) * len(labels)
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


def _engine_step(model: nn.Module, trial: Trial, steps: int) -> Callable[[Tensor, Tensor], float]:
    recipe = trial.config.recipe
    engine = Engine(model, recipe, steps, recipe.batch_size // dist.get_world_size(), trial.config.engine)
    return lambda images, labels: engine.train_step(images, labels)[0].item()


def _plain_step(model: nn.Module, trial: Trial, steps: int) -> Callable[[Tensor, Tensor], float]:
    recipe, total = trial.config.recipe, steps * trial.config.recipe.epochs
    wrapped = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / total)) / 2)

    def step(images: Tensor, labels: Tensor) -> float:
        loss = cross_entropy(wrapped(images), labels, label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    return step


class Spent(NamedTuple):
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
    """Runs an epoch of the other loops after each epoch of the trial."""

    def __init__(self, trial: Trial, send: ReportFn) -> None:
        self.others = {"plain": epochs(trial, with_engine=False), "engine": epochs(trial, with_engine=True)}
        self.send = send
        self.spent: dict[str, list[Spent]] = {loop: [] for loop in LOOPS}
        self.began = Spent.so_far()

    def report(self, metrics: Mapping[str, float]) -> None:
        if "step" in metrics:  # a report during an epoch
            self.send(metrics)
            return
        mine = Spent.so_far().since(self.began)
        after = Spent.so_far()
        time.sleep(REST)
        tracking = Spent.so_far().since(after).cpu
        self.spent["trial"].append(Spent(mine.wall + tracking, mine.cpu + tracking))
        order = list(self.others)
        for loop in order if len(self.spent["trial"]) % 2 else reversed(order):
            began = Spent.so_far()
            next(self.others[loop])
            self.spent[loop].append(Spent.so_far().since(began))
            time.sleep(REST)
        self.began = Spent.so_far()
        self.send(metrics)


def times(result: Path, workspace: Workspace, trial: Trial, send: ReportFn) -> None:
    """Trains the trial and the other loops, one epoch each, on every worker; the first worker writes the durations."""
    from experiments.training.trainer import run_trial  # imports MLflow, which the other loops do not need

    turns = Turns(trial, send)
    run_trial(workspace, trial, turns.report)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(turns.spent))


def peak_of_trial(result: Path, workspace: Workspace, trial: Trial, send: ReportFn) -> None:
    """Trains the trial alone; the first worker writes the peak of its process in MB."""
    from experiments.training.trainer import run_trial

    run_trial(workspace, trial, send)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(_peak()))


def peak_of_loop(rank: int, workers: int, meeting: Path, trial: Trial, with_engine: bool) -> float:
    """Trains in one of the other ways, in a process without Ray and MLflow; returns its peak in MB."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    join_process_group(torch.device("cpu"))
    for _ in epochs(trial, with_engine):
        pass
    return _peak()


def _peak() -> float:
    """In MB. Not that of `getrusage`, which a process inherits from the one that starts it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def in_sweep(function: Callable[..., None], folder: Path, profile: str, overrides: Sequence[str]) -> tuple[Trial, Any]:
    """Trains the trial as `san run` does. Returns it, and what its first worker has written."""
    from cluster.session import session
    from cluster.sweep import sweep
    from experiments.runner.grid_run import open_grid_run
    from experiments.runner.progress import Progress

    folder.mkdir()
    grid_run = open_grid_run(GridRequest(GRID, profile, tuple(overrides), folder))
    grid_run.tracker.prepare(grid_run.grid, folder / "artifacts")
    trial = next(trial for trial in grid_run.trials if trial.row == ROW)
    progress = Progress({trial.key: trial.name}, {trial.key: trial.config.recipe.epochs}, sys.stderr)
    train = functools.partial(function, folder / "result.json", grid_run.workspace)
    with session():
        sweep(train, {trial.key: trial}, grid_run.placement, storage=folder / "sweep", observer=progress)
    return trial, json.loads((folder / "result.json").read_text())


def overhead(loop: Sequence[float], plain: Sequence[float]) -> str:
    """Returns the median over rounds and its 95 % interval in percent."""
    ratios = numpy.array(loop) / numpy.array(plain)
    resampled = numpy.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = numpy.percentile(numpy.median(resampled, axis=1), (2.5, 97.5))
    median, low, high = (f"{100 * (ratio - 1):+.1f}" for ratio in (numpy.median(ratios), low, high))
    return f"{median} % ({low} to {high})"


def lines(setting: str) -> Iterator[str]:
    """The rows of the table, one for each loop."""
    overrides = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial, spent = in_sweep(times, folder / "times", "digits", overrides)
        short, peak = in_sweep(peak_of_trial, folder / "memory", "digits", (*overrides, "recipe.epochs=4"))
        workers, peaks = trial.config.resources.workers, {"trial": peak}
        for loop in LOOPS[:2]:
            with get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
                calls = [(rank, workers, folder / f"meeting-{loop}", short, loop == "engine") for rank in range(workers)]
                peaks[loop] = pool.starmap(peak_of_loop, calls, chunksize=1)[0]
    train, val = loaders(trial.config, 0, 0, 1)
    images = len(train.dataset) + len(val.dataset)
    plain, *_ = walls_and_cpus = [list(zip(*spent[loop][1:], strict=True)) for loop in LOOPS]
    for loop, (walls, cpus) in zip(LOOPS, walls_and_cpus, strict=True):
        ratios = ("", "") if loop == "plain" else (overhead(walls, plain[0]), overhead(cpus, plain[1]))
        speed = f"{images / statistics.median(walls):.0f}"
        yield f"| {' | '.join((str(workers), loop, str(len(walls)), speed, *ratios, f'{peaks[loop]:.0f}'))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    options = parser.parse_args()
    rows = [line for setting in options.setting or SETTINGS for line in lines(setting)]
    print(f"torch {torch.__version__}; overhead: median over epochs (95 % interval)\n")
    columns = ("workers", "loop", "epochs", "images/s", "overhead in time", "in CPU time", "memory, MB")
    print(f"| {' | '.join(columns)} |", f"|---:|---|{'---:|' * (len(columns) - 2)}", *rows, sep="\n")


if __name__ == "__main__":
    # Trials cannot import functions from __main__.
    from tests.benchmarks import overhead as program

    program.main()
