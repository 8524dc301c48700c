"""What engine, tracking and checkpoints cost: a trial against a bare loop of plain torch, epoch by epoch in one process.

    python -m tests.benchmarks.overhead [--setting digits] [--setting san10]

Both train the same model on the same images from the same loader, with the same SGD, cosine, label smoothing and validation;
the bare loop is `bare_epochs`. `run_trial` is whole: DeepSpeed, checkpoints, log, `summary.csv`, MLflow on SQLite with system
metrics. They take turns after each epoch. An epoch of `run_trial` lasts from the end of the bare one to its report; what the
thread that talks to MLflow computes after that, while everything else waits, is added, as if a cell had no second core for it.
The first epoch, and what comes before and after, is told apart. Ratios are taken of epochs that follow each other, and of the
fastest of each, which tells more where other work disturbs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from experiments.config import PROJECT_DIR
from experiments.grid import Trial
from experiments.run import open_job
from experiments.training.checkpoint import Checkpoints
from experiments.trial import loaders, run_trial

GRID = PROJECT_DIR / "experiments" / "grids" / "footprint.yaml"
ROW = "pairwise_7"
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "digits": ("digits", ()),
    "san10": (
        "imagenet",
        (
            *("data.source=synthetic", "data.synthetic_classes=16", "data.synthetic_per_class=8"),
            *("recipe.batch=16", "recipe.epochs=8"),
            *("placement.workers=1", "placement.cpus=2", "placement.gpus=0"),
        ),
    ),
}
SETTLE = 0.25
"""Seconds in which MLflow has an epoch's records."""


def bare_epochs(trial: Trial) -> Iterator[None]:
    """What one would write without this project's engine; yields after each epoch."""
    config, recipe = trial.config, trial.config.recipe
    train, val = loaders(config, trial.seed, rank=0, world=1)
    torch.manual_seed(trial.seed)
    model = config.model.spec().build(len(train.dataset.classes))
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


class Turns:
    """Lets the bare loop train an epoch after each of the trial's; seconds of both."""

    def __init__(self, bare: Iterator[None]) -> None:
        self.bare = bare
        self.trial_epochs: list[float] = []
        self.bare_epochs: list[float] = []
        self.tracking: list[float] = []
        """Of the trial's seconds, those that were computed after its report."""
        self.saving: list[float] = []
        """Of the trial's seconds, those of writing a checkpoint: they do not grow with the epoch."""
        self.began = time.perf_counter()

    def report(self, metrics: Mapping[str, float]) -> None:
        if "step" in metrics:  # the epoch has not ended
            return
        seconds = time.perf_counter() - self.began
        computed = time.process_time()
        time.sleep(SETTLE)
        self.tracking.append(time.process_time() - computed)
        self.trial_epochs.append(seconds + self.tracking[-1])
        self.began = time.perf_counter()
        next(self.bare)
        self.bare_epochs.append(time.perf_counter() - self.began)
        self.began = time.perf_counter()


def timed(function: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        began = time.perf_counter()
        function(*arguments)
        seconds.append(time.perf_counter() - began)

    return call


def measured(setting: str, runs: Path) -> Turns:
    profile, overrides = SETTINGS[setting]
    job = open_job(GRID, profile, overrides, runs)
    job.tracker.prepare(job.grid, runs / "artifacts")
    trial = next(trial for trial in job.trials if trial.row == ROW)
    turns = Turns(bare_epochs(trial))
    with patch.object(Checkpoints, "save", timed(Checkpoints.save, turns.saving)):
        run_trial(job.workspace, trial, turns.report)
    print(
        f"{setting}: to the end of the first epoch {turns.trial_epochs[0]:.2f} s, bare {turns.bare_epochs[0]:.2f} s; "
        f"after the last report {time.perf_counter() - turns.began:.2f} s",
        file=sys.stderr,
        flush=True,
    )
    return turns


def line(setting: str, turns: Turns) -> str:
    trial, bare = turns.trial_epochs[1:], turns.bare_epochs[1:]
    ratios = [100 * (ours / theirs - 1) for ours, theirs in zip(trial, bare, strict=True)]
    medians = " | ".join(f"{statistics.median(seconds):.3f}" for seconds in (bare, trial, turns.saving[1:], turns.tracking[1:]))
    spread = f"{statistics.median(ratios):+.1f} % ({min(ratios):+.1f} to {max(ratios):+.1f})"
    fastest = 100 * (min(trial) / min(bare) - 1)
    return f"| {setting} | {len(bare)} | {medians} | {spread} | {fastest:+.1f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    options = parser.parse_args()
    lines = []
    for setting in options.setting or SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(line(setting, measured(setting, Path(folder))))
    print(f"torch {torch.__version__}; seconds of an epoch, medians; overhead: median (range) over pairs of epochs\n")
    columns = ("setting", "pairs", "bare", "run_trial", "of it saving", "of it tracking", "overhead", "of the fastest")
    print(f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}", *lines, sep="\n")


if __name__ == "__main__":
    main()
