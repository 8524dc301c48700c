"""run_trial: the one place where all parts meet. Runs without Ray, in one process or in several that were launched together."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
import torch.distributed as dist
from torch import nn

import san
from experiments.errors import UserError
from experiments.grids.config import TrialConfig
from experiments.grids.grid import Trial
from experiments.runs import Lease, Mirror, StorageError, writer_in
from experiments.runs.address import PATIENCE
from experiments.runs.summary import Epoch
from experiments.runs.workspace import Workspace
from experiments.training.checkpoint import OTHER_ENDS, Checkpoint, Checkpoints, Origin, best_in, only_writer
from experiments.training.device import computing, enough_memory, training_device
from experiments.training.engine import Engine, arithmetic, join_process_group
from experiments.training.images import loaders
from experiments.training.loop import BetweenSteps, run_epoch
from experiments.training.metrics import RunningEpoch
from experiments.training.teller import Teller
from experiments.training.watchdog import Watchdog

if TYPE_CHECKING:
    from experiments.training.sender import Sender

_log = logging.getLogger(__name__)

GoesOn = Callable[[str, Sequence[float]], bool]


def run_trial(
    workspace: Workspace, trial: Trial, report: Callable[[Mapping[str, float]], None], goes_on: GoesOn | None = None
) -> nn.Module:
    """Trains one cell, or the rest of it; the result is in the tracker and the weights in the checkpoints.

    Every worker of the cell calls this. `report` is called in all of them, after each epoch and, inside long ones, after the
    same steps; `Teller` says with what. After each epoch but the last the first worker asks `goes_on`, which is given the
    trial's key and top-1 of its epochs; where it says no, the trial ends there, and its checkpoints stay. Returns the model
    that was validated, which is the same on every worker.

    Raises:
        UserError: a checkpoint cannot be kept, or is another trial's, or another process trains the same; or the trial's GPU
            cannot be used or has too little memory.
        DataError: an image cannot be used.
        FloatingPointError: a loss is not finite.
    """
    workspace = workspace.on_this_node()
    config, patience = trial.config, trial.config.reliability.patience
    device = training_device(config)
    with enough_memory(config, device):
        rank, _ = join_process_group(device, patience)
    with (
        kept_log(workspace, trial) as path,
        logging_to(path, rank) as log,
        _only_writer(workspace, trial) if rank == 0 else nullcontext() as mirror,
        Watchdog(patience.total_seconds(), log) as watchdog,
        arithmetic(config.engine, device),
        enough_memory(config, device),
    ):
        return _train(workspace, trial, device, report, goes_on, watchdog, mirror)


@contextmanager
def _only_writer(workspace: Workspace, trial: Trial) -> Iterator[Mirror | None]:
    """Inside, no other process writes the trial's checkpoints; with a bucket, on no node. Yields what brings them there."""
    folder = workspace.checkpoints(trial)
    with only_writer(folder):
        if workspace.bucket is None:
            yield None
            return
        lease = Lease(workspace.bucket, f"cells/{trial.key}", f"the cell {trial.name}", writer_in(folder / "writer"))
        away = _seconds_away(trial)
        with lease.held(seconds=OTHER_ENDS, away=away):
            mirror = Mirror(folder, workspace.bucket, workspace.name(folder), lease, away)
            yield mirror
            mirror.clear()


@contextmanager
def kept_log(workspace: Workspace, trial: Trial) -> Iterator[Path]:
    """The trial's log on this node, continued where a bucket has it, and kept there when the block is left."""
    path = workspace.log(trial)
    if workspace.bucket is not None and not path.exists():
        with suppress(StorageError):  # whoever needs the bucket for more tells it
            workspace.bring(path)
    try:
        yield path
    finally:
        with suppress(StorageError, OSError):
            workspace.keep(path)


def _seconds_away(trial: Trial) -> float:
    """For which a tracker or a store may be away, while the other workers wait."""
    return min(PATIENCE, trial.config.reliability.patience.total_seconds() / 2)


def _train(
    workspace: Workspace,
    trial: Trial,
    device: torch.device,
    report: Callable[[Mapping[str, float]], None],
    goes_on: GoesOn | None,
    watchdog: Watchdog,
    mirror: Mirror | None,
) -> nn.Module:
    config, care = trial.config, trial.config.reliability
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(config.placement.cpus)
    train, val = loaders(config, trial.seed, rank, world, device)

    gc.collect()  # a model that this process trained before may lie in a circle of references, and in the memory of a GPU
    torch.manual_seed(trial.seed)
    model = config.model.spec().build(len(train.dataset.classes))
    complexity = san.complexity(model, config.data.size)
    engine = _engine(config, model.to(device), train.steps)
    how = computing(config.engine, device)
    _log.info(", ".join(f"{name}: {value}" for name, value in how.items()))

    checkpoints = Checkpoints(
        workspace.checkpoints(trial), trial.key, care.keep_checkpoints, 60 * care.checkpoint_every_n_minutes
    )
    classes = train.dataset.classes
    origin = Origin(trial.grid, trial.profile, trial.row, trial.seed, trial.record, trial.data_digest, classes)
    saved = _saved(workspace, checkpoints, mirror, rank, world)
    history: tuple[Epoch, ...] = ()
    running = RunningEpoch(0, engine.lr)
    if saved is not None:
        engine.load_state_dict(saved.engine)
        history, running = saved.history, saved.running
    run = _sender(workspace, trial, complexity, how, len(train.dataset), history) if rank == 0 else None
    send = functools.partial(_send, workspace, trial, mirror)

    def save(running: RunningEpoch) -> None:
        state = engine.state_dict()
        if not engine.is_finite():
            raise FloatingPointError(f"non-finite weights after {running.steps} steps of epoch {running.number}")
        if rank == 0:
            checkpoints.save(Checkpoint(trial.key, origin, history, running, state))
        send()

    teller = Teller(report, config.recipe.epochs, train, history)
    between = BetweenSteps(watchdog.step_ended, care.check_every_n_steps, checkpoints.due, save, teller.due, teller.tell_step)
    try:
        while running.number < config.recipe.epochs and _goes_on(goes_on, trial.key, history, running):
            history = (*history, run_epoch(engine, train, val, running, between))
            running = RunningEpoch(len(history), engine.lr)
            # In this order what is logged is saved, and what is saved but not logged, after a kill, the next start logs.
            save(running)
            if run is not None:
                run.log(history)
                send()
            teller.tell_epoch(history)
        teller.tell_end()
        if run is not None:
            _end(run, trial, checkpoints, history)
            with suppress(StorageError):  # all that counts is there
                send()
    except FloatingPointError as error:
        good = checkpoints.newest()
        raise FloatingPointError(f"{error}; last good checkpoint: {good or 'none'}; try a lower recipe.lr") from None
    finally:
        if run is not None:
            run.close()
    dist.barrier()
    return engine.model


def _send(workspace: Workspace, trial: Trial, mirror: Mirror | None) -> None:
    """Brings to the bucket, where there is one, what the first worker has for it, and each node's log."""
    if mirror is not None:
        mirror.send()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(StorageError):
            workspace.keep(workspace.log(trial))


def _goes_on(goes_on: GoesOn | None, key: str, history: Sequence[Epoch], running: RunningEpoch) -> bool:
    """What the first worker hears, in all of them; between two epochs only."""
    if goes_on is None or not history or running.steps:
        return True
    heard = [goes_on(key, [epoch.top1 for epoch in history]) if dist.get_rank() == 0 else True]
    dist.broadcast_object_list(heard)
    return heard[0]


def _end(run: Sender, trial: Trial, checkpoints: Checkpoints, history: tuple[Epoch, ...]) -> None:
    """Sends what is left, while the other workers wait."""
    patience = _seconds_away(trial)
    if len(history) < trial.config.recipe.epochs:
        run.stop(f"{trial.grid}-{trial.profile}", patience)
    else:
        run.finish(_best(checkpoints, history), patience)


def _engine(config: TrialConfig, model: nn.Module, steps: int) -> Engine:
    recipe = config.recipe
    if recipe.scaling is not None and dist.get_rank() == 0:
        _log.info(recipe.scaling)
    micro_batch = -(-recipe.batch_size // (dist.get_world_size() * recipe.grad_accum_steps))
    return Engine(model, recipe, steps, micro_batch, config.engine)


def _sender(
    workspace: Workspace,
    trial: Trial,
    complexity: san.Complexity,
    how: Mapping[str, str],
    images: int,
    history: tuple[Epoch, ...],
) -> Sender:
    """The trial's records on their way to the tracker, begun with what a checkpoint held."""
    from experiments.tracking.tracker import Tracker
    from experiments.training.sender import (
        Sender,  # brings MLflow, which those who only ask for a trial's images can do without
    )

    tracker = functools.partial(Tracker, workspace.tracking_uri, trial.grid, trial.profile)
    sender = Sender(tracker, trial, complexity, how, images, workspace.checkpoints(trial) / "summary.csv")
    sender.log(history)
    return sender


def _best(checkpoints: Checkpoints, history: tuple[Epoch, ...]) -> Checkpoint | None:
    """The checkpoint whose weights are registered."""
    best = best_in(checkpoints.folder)
    if best is None or best.history[-1].top1 < max(epoch.top1 for epoch in history):
        _log.warning(
            "cannot read the checkpoint of the best epoch; registered instead: %s", best.name if best else "no checkpoint"
        )
    return best


def _saved(workspace: Workspace, checkpoints: Checkpoints, mirror: Mirror | None, rank: int, world: int) -> Checkpoint | None:
    """The last checkpoint that can be read, the same for all workers: the first looks for it."""
    saved: Checkpoint | None = None
    if rank == 0:
        checkpoints.prepare()
        if mirror is not None:
            mirror.bring()
        saved = checkpoints.load()
        if mirror is not None:
            mirror.send()
    found = [saved.name if saved else None]
    dist.broadcast_object_list(found)
    (name,) = found
    if name is not None and rank != 0:
        saved = _read(workspace, checkpoints.folder / name)
    elif saved is not None:
        _log.info("resuming from %s", name)
    if saved is not None and saved.workers != world and rank == 0:
        _log.warning(
            "the number of workers changed from %d to %d: BatchNorm resumes from the mean of the workers' statistics and sees "
            "a different part of each batch, so the result will differ as with another seed",
            saved.workers,
            world,
        )
    return saved


def _read(workspace: Workspace, path: Path) -> Checkpoint:
    """The checkpoint that the first worker has found, where it may be on another node."""
    if workspace.bucket is None:
        return Checkpoint.read(path)
    content = workspace.bucket.get(workspace.name(path))
    if content is None:
        raise UserError(
            f"{workspace.place(path)}: deleted while it was being read; run the same command again to resume from another "
            "checkpoint"
        )
    return Checkpoint.of_bytes(content)


@contextmanager
def logging_to(path: Path, rank: int) -> Iterator[TextIO]:
    """Adds what this package logs to a file, which all workers of a trial share.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the log ({error.strerror}); choose another folder with --runs") from None
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank}: %(message)s"))
    logger = logging.getLogger("experiments")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield file
    finally:
        logger.removeHandler(handler)
        file.close()
