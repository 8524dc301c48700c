"""The training loop, read top to bottom: one epoch of steps, one pass over the validation images."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from experiments.training.engine import Engine
from experiments.training.metrics import Accuracy, Epoch
from pipelines import Loader


def run_epoch(engine: Engine, train: Loader, val: Loader, epoch: int) -> Epoch:
    """Trains for one epoch, makes the workers' statistics one, validates.

    Raises:
        FloatingPointError: the loss is not finite; weights are left as they are and no checkpoint is written.
    """
    lr = engine.lr
    start = time.perf_counter()
    loss = _train(engine, train, epoch)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss of epoch {epoch} is {loss}; it began at learning rate {lr:.4g}: lower recipe.lr")
    seconds = time.perf_counter() - start
    engine.average_buffers()
    val_loss, top1, top5, _ = evaluate(engine.model, val)
    return Epoch(epoch, lr, loss, len(train.dataset) / seconds, train.waited / seconds, val_loss, top1, top5)


def _train(engine: Engine, loader: Loader, epoch: int) -> float:
    engine.model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=loader.device)  # loss, images
    for images, labels in loader.epoch(epoch):
        loss = engine.train_step(images, labels)
        sums += torch.stack((loss.double() * len(labels), loss.new_tensor(len(labels), dtype=torch.float64)))
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Loader) -> tuple[float, float, float, int]:
    """Mean loss, top-1 and top-5 in percent, and the number of images, over all workers."""
    model.eval()
    accuracy = Accuracy(loader.device)
    for images, labels in loader.epoch(0):
        accuracy.add(model(images), labels)
    return accuracy.over_workers()
