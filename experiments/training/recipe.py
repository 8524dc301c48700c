"""What a recipe asks for besides SGD: the course of the learning rate, mixup, the averaged model."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.config import RecipeConfig


def schedule(optimizer: torch.optim.Optimizer, recipe: RecipeConfig, steps: int) -> LambdaLR:
    """The learning rate of every step, of which an epoch has `steps`: linear from 0, then a half cosine to 0."""
    total, warm = steps * recipe.epochs, int(steps * recipe.warmup_epochs)

    def factor(step: int) -> float:
        if step < warm:
            return step / warm
        return (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2

    return LambdaLR(optimizer, factor)


class Blend(NamedTuple):
    """A step's images, or some of them: `share` of each is of the class in `labels_N`, the rest of that in `others_N`."""

    images_NCHW: Tensor
    labels_N: Tensor
    others_N: Tensor
    share: float

    def parts(self, count: int) -> list[Blend]:
        """The images in so many parts, whose sizes differ by one at most."""
        images, labels, others = (tensor.tensor_split(count) for tensor in self[:3])
        return [Blend(*part, self.share) for part in zip(images, labels, others, strict=True)]

    def loss(self, logits_NC: Tensor, label_smoothing: float) -> Tensor:
        """Mean cross-entropy with both classes by their shares, in float32."""
        logits_NC = logits_NC.float()
        loss = cross_entropy(logits_NC, self.labels_N, label_smoothing=label_smoothing)
        if self.share == 1:
            return loss
        others = cross_entropy(logits_NC, self.others_N, label_smoothing=label_smoothing)
        return self.share * loss + (1 - self.share) * others


def mixup(images_NCHW: Tensor, labels_N: Tensor, alpha: float) -> Blend:
    """Blends every image with another of the batch (Zhang et al. 2018, arXiv 1710.09412); none where alpha is 0.

    The share, one for the batch, and who is whose other come of torch's random numbers, which a checkpoint keeps.
    """
    if alpha == 0:
        return Blend(images_NCHW, labels_N, labels_N, 1.0)
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    others = torch.randperm(len(labels_N)).to(labels_N.device)
    return Blend(share * images_NCHW + (1 - share) * images_NCHW[others], labels_N, labels_N[others], share)


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of the model that `update_parameters(model)` moves by 1 - decay towards it, BatchNorm statistics too; the first
    update makes it equal."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
