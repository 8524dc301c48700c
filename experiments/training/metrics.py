"""What an epoch is judged by, exact over any number of workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(slots=True)
class RunningEpoch:
    """How far an epoch has come; the same on all workers but for the times."""

    number: int
    lr: float
    """Learning rate of its first step."""
    steps: int = 0
    """Steps done."""
    loss: float = 0.0
    """Sum over the images seen."""
    seconds: float = 0.0
    """Spent on training; what was done twice after a kill counts once."""
    waited: float = 0.0
    """Seconds of these spent waiting for images."""


class Accuracy:
    """Sums loss, top-1 and top-5 hits over batches of any size; every image counts once."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1, top-5, images

    def add(self, logits_NC: Tensor, labels_N: Tensor) -> None:
        best = logits_NC.topk(min(5, logits_NC.shape[1]), dim=1).indices
        hits = best == labels_N.unsqueeze(1)
        loss = cross_entropy(logits_NC.float(), labels_N, reduction="sum")
        # `new_full` and not `new_tensor`, which would stop a GPU to copy one number there.
        self.sums += torch.stack((loss, hits[:, 0].sum(), hits.sum(), loss.new_full((), len(hits))))

    def over_workers(self) -> tuple[float, float, float, int]:
        """Mean loss, top-1 and top-5 in percent, and the number of images, over all workers, or of this process alone."""
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        loss, top1, top5, images = self.sums.tolist()
        return loss / images, 100 * top1 / images, 100 * top5 / images, int(images)
