"""Runs the workers of a trial in processes that a test can kill. A fork server imports their modules in advance."""

import json
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from experiments.config.grid import Trial
from experiments.runs.workspace import Workspace
from experiments.training.engine import Engine, _import_deepspeed
from experiments.training.trainer import Control, ShouldContinue, run_trial
from tests.experiments.drivers import PATIENCE

if multiprocessing.parent_process() is None and multiprocessing.current_process().name == "MainProcess":
    SERVER = multiprocessing.get_context("forkserver")
    SERVER.set_forkserver_preload(["tests.experiments.processes"])
with patch.dict(os.environ):
    _import_deepspeed(torch.device("cpu"))


@dataclass(frozen=True)
class Kill:
    """A worker kills itself before a training step, or when it writes the file or folder of a checkpoint to disk."""

    what: str
    """`step` or `write`."""
    when: int
    """Counted from 1 over the life of the process."""


def start(
    workspace: Workspace,
    trial: Trial,
    world: int = 1,
    kill: Kill | None = None,
    body: Callable[..., None] | None = None,
    should_continue: ShouldContinue | None = None,
) -> list[BaseProcess]:
    """Starts the workers of a trial and kills the last one. Each worker calls `body` before training."""
    workspace.runs.mkdir(parents=True, exist_ok=True)
    meeting = str(workspace.runs / f"meeting-{uuid.uuid4().hex}")
    workers: list[BaseProcess] = []
    for rank in range(world):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        worker_kill = kill if rank == world - 1 else None
        arguments = (workspace, trial, group, meeting, worker_kill, body, should_continue)
        workers.append(SERVER.Process(target=_work, args=arguments, daemon=True))
        workers[-1].start()
    return workers


def ended(workers: list[BaseProcess]) -> list[int | None]:
    """Waits for the workers and returns their exit codes. If one fails, the others are killed, as a launcher would do."""
    limit = time.monotonic() + PATIENCE
    while any(worker.is_alive() for worker in workers):
        if any(worker.exitcode for worker in workers) or time.monotonic() > limit:
            for worker in workers:
                worker.kill()
        time.sleep(0.02)
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


def together(function: Callable[..., object], folder: Path, *arguments: object) -> list[Any]:
    """Calls `function(rank, *arguments)` in a process group of two processes; returns their results, and errors as text."""
    parts = [SERVER.Process(target=_call, args=(rank, folder, function, arguments), daemon=True) for rank in range(2)]
    for part in parts:
        part.start()
    assert ended(parts) == [0, 0]
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(2)]


def _call(rank: int, folder: Path, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        result = function(rank, *arguments)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    torch.save(result, folder / f"result{rank}.pt")


def weights(workspace: Workspace, rank: int = 0) -> dict[str, torch.Tensor]:
    """The weights that a worker had at its end."""
    return torch.load(workspace.runs / f"rank{rank}.pt", weights_only=True)


def reports(workspace: Workspace, rank: int) -> list[dict[str, float]]:
    """The reports of a worker."""
    sent: list[dict[str, float]] = json.loads((workspace.runs / f"reports{rank}.json").read_text())
    return sent


def _work(
    workspace: Workspace,
    trial: Trial,
    group: Mapping[str, str],
    meeting: str,
    kill: Kill | None,
    body: Callable[..., None] | None,
    should_continue: ShouldContinue | None,
) -> None:
    os.environ.update(group)
    if group["WORLD_SIZE"] != "1":
        rank, world = int(group["RANK"]), int(group["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    if kill is not None:
        place: Any = Engine if kill.what == "step" else os
        name = "train_step" if kill.what == "step" else "fsync"
        setattr(place, name, _killing(getattr(place, name), kill.when))
    if body is not None:
        body()
    sent: list[Mapping[str, float]] = []
    model = run_trial(workspace, trial, sent.append, Control(should_continue))
    (workspace.runs / f"reports{group['RANK']}.json").write_text(json.dumps(sent))
    torch.save(model.state_dict(), workspace.runs / f"rank{group['RANK']}.pt")


def _killing(function: Callable[..., object], when: int) -> Callable[..., object]:
    calls = 0

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return counted
