"""Metrics of an epoch, exact for any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.runs.summary import Epoch
from pipelines import Loader


@dataclass(slots=True)
class RunningEpoch:
    """Progress within an epoch; the same on all workers, except for the times."""

    number: int
    lr: float
    """Learning rate of the first step."""
    steps: int = 0
    """Finished steps."""
    loss: float = 0.0
    """Sum over the images seen."""
    seconds: float = 0.0
    """Training time; steps that were repeated after a kill count once."""
    waited: float = 0.0
    """Part of `seconds` spent waiting for images."""

    def finished(self, images: int, val_loss: float, top1: float, top5: float) -> Epoch:
        """The metrics of the whole epoch; `images` is the number of training images."""
        speed, share = images / self.seconds, self.waited / self.seconds
        return Epoch(self.number, self.lr, self.loss / images, speed, share, val_loss, top1, top5)


class Accuracy:
    """Sums loss, top-1 and top-5 hits over batches of any size; every image counts once."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1, top-5, images

    def add(self, logits_NC: Tensor, labels_N: Tensor) -> None:
        best = logits_NC.topk(min(5, logits_NC.shape[1]), dim=1).indices
        hits = best == labels_N.unsqueeze(1)
        loss = cross_entropy(logits_NC.float(), labels_N, reduction="sum")
        # `new_full` and not `new_tensor`, which would wait for the GPU to copy one number there.
        self.sums += torch.stack((loss, hits[:, 0].sum(), hits.sum(), loss.new_full((), len(hits))))

    def over_workers(self) -> tuple[float, float, float, int]:
        """Mean loss, top-1 and top-5 in percent, and the number of images, over all workers or of this process alone."""
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        loss, top1, top5, images = self.sums.tolist()
        return loss / images, 100 * top1 / images, 100 * top5 / images, int(images)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, step_ended: Callable[[], None]) -> tuple[float, float, float, int]:
    """`Accuracy.over_workers` of a whole split; `step_ended` is called after each batch."""
    model.eval()
    accuracy = Accuracy(loader.device)
    for images_NCHW, labels_N in loader.epoch(0):
        accuracy.add(model(images_NCHW), labels_N)
        step_ended()
    return accuracy.over_workers()
