"""Small values for several tests: the metrics of an epoch, finished trials and checkpoints."""

import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

import torch
from mlflow.entities import Run

from experiments.config.grid import Trial
from experiments.runner.grid_run import GridRun
from experiments.runs.store import LocalStore
from experiments.runs.summary import Epoch
from experiments.training.checkpoint import Checkpoint, Checkpoints, Origin
from experiments.training.metrics import RunningEpoch
from san import Complexity

EPOCH = Epoch(
    epoch=0,
    lr=0.1,
    train_loss=1.0,
    images_per_second=2.0,
    wait_share=0.5,
    val_loss=1.0,
    top1=50.0,
    top5=100.0,
    train_top1=25.0,
    ended=1000,
)
ORIGIN = Origin("small", "digits", "pairwise_3", 0, {}, "abc-def", ("cat", "dog"))
SHORT = ("recipe.epochs=2", "recipe.batch_size=50", "data.train_per_class=20")  # 4 steps an epoch
ALWAYS = ("checkpointing.check_every_n_steps=1", "checkpointing.checkpoint_every_n_minutes=1e-9")
"""A checkpoint after every step."""


def finish_trial(grid_run: GridRun, trial: Trial, top1: float) -> None:
    """Creates the finished MLflow run of a trial with one epoch."""
    tracked = grid_run.tracker.open(trial)
    tracked.describe(trial, Complexity(1, 2, 3, ()))
    tracked.log([replace(EPOCH, top1=top1)])
    tracked.finish()


def runs_of(grid_run: GridRun, role: str = "trial") -> list[Run]:
    """MLflow's runs of a grid's trials, or with the role `grid` its parent run."""
    client = grid_run.tracker.client
    experiment = client.get_experiment_by_name(grid_run.name)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.`san.role` = '{role}'"))


def logged_epochs(grid_run: GridRun) -> dict[tuple[str, str, str], list[int]]:
    """The epochs of each trial's run in MLflow, in the order in which they were logged, by row, run ID and status."""
    client, epochs = grid_run.tracker.client, {}
    for run in runs_of(grid_run):
        history = client.get_metric_history(run.info.run_id, "val/top1")
        epochs[run.data.tags["san.row"], run.info.run_id, run.info.status] = [metric.step for metric in history]
    return epochs


def assert_complete(grid_run: GridRun, epochs: int) -> None:
    """Every selected trial is finished, and MLflow has one run for it, with each of its epochs once."""
    logged, results = logged_epochs(grid_run), grid_run.tracker.results()
    assert sorted(row for row, _, _ in logged) == sorted(trial.row for trial in grid_run.selected)
    assert all(sorted(steps) == [*range(epochs)] for steps in logged.values()), logged
    assert all(results[trial.key].finished for trial in grid_run.selected)


def silent(metrics: Mapping[str, float]) -> None:
    """Ignores reports."""


def of_step(epoch: int, step: int = 0, value: float = 0.0, key: str = "abc") -> Checkpoint:
    """A checkpoint of two workers; top-1 decreases with each epoch."""
    history = tuple(replace(EPOCH, epoch=number, top1=50.0 - number) for number in range(epoch))
    engine = {"model": {"w": torch.full((1000,), value)}, "workers": [{"buffers": {}}, {"buffers": {}}]}
    return Checkpoint(key, ORIGIN, history, RunningEpoch(epoch, 0.1, step, 1.5), engine)


def opened_checkpoints(folder: Path, keep: int = 2) -> Checkpoints:
    """The checkpoints of a trial, opened as by a new attempt."""
    checkpoints = Checkpoints(LocalStore(folder), "checkpoints/abc", "abc", keep, 600)
    checkpoints.load()
    return checkpoints


def flip_a_bit(content: bytes) -> bytes:
    """Flips one bit in the weights of `of_step(..., value=1.0)`."""
    at = content.index(b"\x00\x00\x80\x3f" * 100) + 40
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside the block, no file can grow beyond 1000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def without_times(history: Iterable[Epoch]) -> list[tuple[float, ...]]:
    return [astuple(replace(epoch, images_per_second=0.0, wait_share=0.0, ended=0)) for epoch in history]


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now
