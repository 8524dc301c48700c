"""run_trial: the one place where all parts meet. Runs without Ray, in one process or in several that were launched together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import san
from experiments.config import DataConfig
from experiments.grid import Trial
from experiments.tracking import Tracker, TrialRun
from experiments.training.checkpoint import Checkpoint
from experiments.training.engine import Engine, device, join_process_group
from experiments.training.loop import run_epoch
from experiments.training.metrics import Epoch
from pipelines import Dataset, Loader, Transform, prepare_digits

PROJECT_DIR = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where runs are kept: a folder that all nodes can reach, and the tracker's address."""

    runs: Path
    tracking_uri: str

    def checkpoint(self, trial: Trial) -> Path:
        """The checkpoint of a trial."""
        return self.runs / "checkpoints" / trial.key / "last.pt"


def open_data(config: DataConfig) -> tuple[Dataset, Dataset]:
    """The training and validation images; the embedded set is written first where it is missing.

    Raises:
        DataError: a folder is missing, empty or has other classes; the text names it.
    """
    root = PROJECT_DIR / config.root
    if config.source == "digits":
        prepare_digits(root)
    train, val = Dataset.scan(root, "train"), Dataset.scan(root, "val")
    train.require_same_classes(val)
    return train, val


def transform(config: DataConfig) -> Transform:
    """What happens to an image before the model."""
    return Transform(
        size=config.size,
        resize=config.resize,
        crop_area=config.crop_area,
        crop_ratio=config.crop_ratio,
        flip=config.flip,
        mean=config.mean,
        std=config.std,
    )


def run_trial(workspace: Workspace, trial: Trial, report: Callable[[Mapping[str, float]], None]) -> None:
    """Trains one cell, or the rest of it; the result is in the tracker and the weights in the checkpoint.

    Every worker of the cell calls this. `report` is called in all of them after each epoch, with the epoch's metrics.
    """
    config = trial.config
    rank, world = join_process_group()
    torch.set_num_threads(config.placement.cpus)
    train, val = _loaders(trial, rank, world)

    torch.manual_seed(trial.seed)
    model = san.create_model(config.model.name, len(train.dataset.classes), **config.model.overrides)
    complexity = san.complexity(model, config.data.size)
    engine = Engine(model.to(train.device), config.recipe, train.steps, -(-config.recipe.batch // world))

    path = workspace.checkpoint(trial)
    saved = Checkpoint.load(path, trial.key)
    history: tuple[Epoch, ...] = ()
    if saved is not None:
        engine.load_state_dict(saved.engine)
        history = saved.history
    run: TrialRun | None = None
    if rank == 0:
        run = Tracker(workspace.tracking_uri, trial.grid, trial.profile).open(trial)
        run.describe(trial, complexity)
        run.log(history)

    for number in range(len(history), config.recipe.epochs):
        history = (*history, run_epoch(engine, train, val, number))
        if run is not None:
            # In this order a kill leaves at most an epoch that is saved but not logged, which the next start logs.
            Checkpoint(trial.key, history, engine.state_dict()).save(path)
            run.log(history)
        report({"epoch": number + 1, "epochs": config.recipe.epochs, **history[-1].metrics()})
    if run is not None:
        run.finish()
    dist.barrier()


def _loaders(trial: Trial, rank: int, world: int) -> tuple[Loader, Loader]:
    """The training and validation loaders of this worker."""
    data, batch = trial.config.data, trial.config.recipe.batch
    threads = max(1, min(trial.config.placement.cpus, len(os.sched_getaffinity(0))))
    datasets = open_data(data)
    train, val = (
        Loader(
            dataset,
            transform(data),
            train=training,
            batch=batch,
            rank=rank,
            world=world,
            seed=trial.seed,
            threads=threads,
            device=device(),
        )
        for dataset, training in zip(datasets, (True, False), strict=True)
    )
    return train, val
