"""Metrics of an epoch, exact for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.runs.summary import Epoch


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
    hits: float = 0.0
    """Images that were predicted correctly; with mixup or CutMix, a label counts with its weight."""
    seconds: float = 0.0
    """Training time; steps that were repeated after a kill count once."""
    waited: float = 0.0
    """Part of `seconds` spent waiting for images."""

    def finished(self, images: int, scores: Scores | None) -> Epoch:
        """The metrics of the whole epoch, given the number of training images and, if it was validated, the scores."""
        loss, top1, top5 = (scores.loss, scores.top1, scores.top5) if scores else (None, None, None)
        return Epoch(
            epoch=self.number,
            lr=self.lr,
            train_loss=self.loss / images,
            train_top1=100 * self.hits / images,
            images_per_second=images / self.seconds,
            wait_share=self.waited / self.seconds,
            val_loss=loss,
            top1=top1,
            top5=top5,
        )


MOST_CLASSES = 50
"""Larger confusion matrices would not be readable, and are not counted."""


class Scores(NamedTuple):
    """The accuracy on a split."""

    loss: float
    """Mean cross entropy."""
    top1: float
    """Percent."""
    top5: float
    """Percent."""
    images: int
    confusion: tuple[tuple[int, ...], ...] | None
    """Images by class (row) and predicted class (column); None for more than `MOST_CLASSES` classes."""


class Accuracy:
    """Sums loss, top-1 and top-5 hits over batches of any size; every image counts once."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1, top-5, images
        self.confusion_CC = torch.zeros(classes, classes, device=device) if classes <= MOST_CLASSES else None

    def add(self, logits_NC: Tensor, labels_N: Tensor) -> None:
        best = logits_NC.topk(min(5, logits_NC.shape[1]), dim=1).indices
        hits = best == labels_N.unsqueeze(1)
        loss = cross_entropy(logits_NC.float(), labels_N, reduction="sum")
        # `new_full` and not `new_tensor`, which would wait for the GPU to copy one number there.
        self.sums += torch.stack((loss, hits[:, 0].sum(), hits.sum(), loss.new_full((), len(hits))))
        if self.confusion_CC is not None:
            one_hot_CC = torch.eye(logits_NC.shape[1], device=logits_NC.device)
            self.confusion_CC += one_hot_CC[labels_N].T @ one_hot_CC[best[:, 0]]

    def over_workers(self) -> Scores:
        """The scores over all workers or of this process alone."""
        if dist.is_initialized():
            dist.all_reduce(self.sums)
            if self.confusion_CC is not None:
                dist.all_reduce(self.confusion_CC)
        loss, top1, top5, images = self.sums.tolist()
        confusion = None if self.confusion_CC is None else tuple(map(tuple, self.confusion_CC.long().tolist()))
        return Scores(loss / images, 100 * top1 / images, 100 * top5 / images, int(images), confusion)


Batches = Iterable[tuple[Tensor, Tensor]]
"""Images and labels."""


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, classes: int) -> Scores:
    """`Accuracy.over_workers` of a whole split, which is on the model's device."""
    model.eval()
    accuracy = Accuracy(classes, next(model.parameters()).device)
    for images_NCHW, labels_N in batches:
        accuracy.add(model(images_NCHW), labels_N)
    return accuracy.over_workers()


def after_each(batches: Batches, ended: Callable[[], None]) -> Batches:
    """The same batches; calls `ended` when the work with each is done."""
    for batch in batches:
        yield batch
        ended()
