"""The training loop, read top to bottom: one epoch of steps, one pass over the validation images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.runs.summary import Epoch
from experiments.training.engine import Engine
from experiments.training.metrics import Accuracy, RunningEpoch
from pipelines import Loader


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """What is done besides training."""

    ended: Callable[[], None]
    """A step has ended, of training or of validation."""
    check_every_n_steps: int
    """After the first step of training, and after each so many, the workers look at their losses and the first one's clock."""
    save_due: Callable[[], bool]
    """Whether to save, by the first worker's clock."""
    save: Callable[[RunningEpoch], None]
    """Called in all workers after the same step, and only where all losses up to it are finite."""
    tell_due: Callable[[bool], bool]
    """Whether to tell how far the epoch is, by the first worker's clock, after its last step of training or another."""
    tell: Callable[[RunningEpoch], None]
    """Called as `save` is."""


class _Step(NamedTuple):
    lr: float
    loss: Tensor
    images: int


class _Due(NamedTuple):
    save: bool
    tell: bool


def run_epoch(engine: Engine, train: Loader, val: Loader, running: RunningEpoch, between: BetweenSteps) -> Epoch:
    """Trains an epoch, or the rest of it, makes the workers' statistics one, validates.

    Raises:
        FloatingPointError: a loss is not finite, of a step or of the validation; raised in all workers together.
    """
    _train(engine, train, running, between)
    engine.average_buffers()
    val_loss, top1, top5, _ = evaluate(engine.model, val, between.ended)
    if not math.isfinite(val_loss):
        raise FloatingPointError(f"non-finite validation loss after epoch {running.number}")
    images = len(train.dataset)
    return Epoch(
        epoch=running.number,
        lr=running.lr,
        train_loss=running.loss / images,
        images_per_second=images / running.seconds,
        wait_share=running.waited / running.seconds,
        val_loss=val_loss,
        top1=top1,
        top5=top5,
    )


def _train(engine: Engine, loader: Loader, running: RunningEpoch, between: BetweenSteps) -> None:
    engine.module.train()
    waited_before, start = running.waited, time.perf_counter()
    unseen: list[_Step] = []
    first = running.steps + 1
    for images, labels in loader.epoch(running.number, loader.seen_after(running.steps)):
        unseen.append(_Step(engine.lr, engine.train_step(images, labels), len(labels)))
        between.ended()
        running.steps += 1
        is_first, is_last = running.steps == first, running.steps == loader.steps
        if is_first or is_last or running.steps % between.check_every_n_steps == 0:
            due = _look(unseen, running, between, is_last, loader.device)
            unseen.clear()
            running.seconds += time.perf_counter() - start
            running.waited = waited_before + loader.waited
            if due.save and not is_last:
                between.save(running)
            if due.tell:
                between.tell(running)
            start = time.perf_counter()


def _look(steps: list[_Step], running: RunningEpoch, between: BetweenSteps, is_last: bool, device: torch.device) -> _Due:
    """Adds the losses of the latest steps, over all workers, to the epoch's; returns what it is time for.

    The one place where a GPU is waited for and where workers talk about anything but gradients. The sum is the same however
    often it is looked: a resumed epoch looks after other steps.
    """
    losses = torch.stack([step.loss for step in steps]).double().tolist()
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    sums = [loss * step.images for loss, step in zip(losses, steps, strict=True)]
    mine = torch.tensor([finite, between.save_due(), between.tell_due(is_last), *sums], dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    finites, saves, tells, *totals = torch.stack(everyone).T.tolist()
    first = int(min(finites))
    if first < len(steps):
        number = running.steps - len(steps) + first + 1
        raise FloatingPointError(
            f"non-finite loss in step {number} of epoch {running.number} at learning rate {steps[first].lr:.4g}"
        )
    for total in totals:
        running.loss += sum(total)
    return _Due(bool(saves[0]), bool(tells[0]))


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Loader, ended: Callable[[], None]) -> tuple[float, float, float, int]:
    """Mean loss, top-1 and top-5 in percent, and the number of images, over all workers; `ended` is called after each step."""
    model.eval()
    accuracy = Accuracy(loader.device)
    for images, labels in loader.epoch(0):
        accuracy.add(model(images), labels)
        ended()
    return accuracy.over_workers()
