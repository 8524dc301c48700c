"""`python -m tests.faults.witness run ...` is `san run ...` with a record of training steps.

Each training step appends a line `rank pid step trial` to `runs/steps.txt`: steps count from 1 over all epochs, the
trial is its key. If runs are stored in a bucket, the file is in the scratch folder of the
driver. With WITNESS_KILL_AT_WRITE=n in the environment, the trial is killed once, in the middle of its n-th checkpoint. With
WITNESS_PAUSE=s, it waits for s seconds after each step. A worker that finds the file `runs/hang` deletes it and hangs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import experiments.runner.execute
from experiments.cli.commands import main
from experiments.config.grid import Trial
from experiments.runs.workspace import Workspace, open_store
from experiments.training.engine import Engine
from experiments.training.trainer import run_trial


class Step(NamedTuple):
    """A finished training step."""

    rank: int
    pid: int
    number: int
    trial: str


TRAIN_STEP = Engine.train_step


def steps_of(runs: os.PathLike[str]) -> list[Step]:
    """The finished steps in order."""
    try:
        with open(os.path.join(runs, "steps.txt")) as record:
            lines = [line.split() for line in record if line.endswith("\n")]
    except FileNotFoundError:
        return []
    return [Step(int(rank), int(pid), int(number), trial) for rank, pid, number, trial in lines]


def watched_trial(runs: Path, workspace: Workspace, trial: Trial, *rest: Any, **options: Any) -> nn.Module:
    """`run_trial` with a record. Patches its process permanently, which only runs trials of this grid."""
    rank = os.environ.get("RANK", "0")
    record = open(runs / "steps.txt", "a", buffering=1)
    pause, hang = float(os.environ.get("WITNESS_PAUSE", "0")), runs / "hang"

    def watched_step(engine: Engine, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        loss = TRAIN_STEP(engine, images_NCHW, labels_N)
        record.write(f"{rank} {os.getpid()} {engine.schedule.last_epoch} {trial.key}\n")
        time.sleep(pause)
        if hang.exists():
            hang.unlink(missing_ok=True)
            time.sleep(100_000)
        return loss

    Engine.train_step = watched_step  # type: ignore[assignment, method-assign]
    _kill_in_a_write(runs)
    return run_trial(workspace, trial, *rest, **options)


def _kill_in_a_write(runs: Path) -> None:
    wanted, killed = int(os.environ.get("WITNESS_KILL_AT_WRITE", "0")), runs / "killed"
    fsync, writes = os.fsync, 0

    def deadly(descriptor: int) -> None:
        nonlocal writes
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        writes += "/epoch-" in name and name.endswith(".partial")
        if writes == wanted:
            os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    if wanted and not killed.exists():
        os.fsync = deadly  # type: ignore[assignment]


if __name__ == "__main__":
    from tests.faults import witness

    runs = open_store(sys.argv[sys.argv.index("--runs") + 1]).folder
    runs.mkdir(parents=True, exist_ok=True)
    experiments.runner.execute.run_trial = partial(witness.watched_trial, runs)  # type: ignore[attr-defined]
    main()
