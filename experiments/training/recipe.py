"""Parts of the recipe: optimizer, learning rate, mixup, CutMix, random erasing, frozen parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from experiments.config.config import RecipeConfig
from pipelines.loader import to_device
from san.models.base import BaseModel


def schedule(optimizer: torch.optim.Optimizer, recipe: RecipeConfig, steps: int) -> LambdaLR:
    """Warms the learning rate up linearly from 0, then follows half a cosine to 0. An epoch has `steps` steps."""
    total, warm = steps * recipe.epochs, int(steps * recipe.warmup_epochs)

    def factor(step: int) -> float:
        if step < warm:
            return step / warm
        return (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2

    return LambdaLR(optimizer, factor)


class MixedBatch(NamedTuple):
    """The images of a step or of a part of it. With mixup or CutMix, each image has two classes, `labels_N` and
    `others_N`, with the weights `shares_2`; otherwise, `others_N` and `shares_2` are None."""

    images_NCHW: Tensor
    labels_N: Tensor
    others_N: Tensor | None = None
    shares_2: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]

    def clone(self) -> MixedBatch:
        return MixedBatch(*(None if tensor is None else tensor.clone() for tensor in self))  # type: ignore[arg-type]

    def parts(self, count: int) -> list[MixedBatch]:
        """Splits the images into parts, whose sizes differ by at most one."""
        images, labels = self.images_NCHW.tensor_split(count), self.labels_N.tensor_split(count)
        others = [None] * count if self.others_N is None else self.others_N.tensor_split(count)
        return [MixedBatch(*part, self.shares_2) for part in zip(images, labels, others, strict=True)]

    def loss(self, logits_NC: Tensor, label_smoothing: float, weight_C: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in float32; weighted over both classes if there are two.

        With `weight_C`, the loss of each image is multiplied by the weight of its class, and still divided by the number of
        images and not by the sum of their weights, which workers do not share.
        """
        logits_NC = logits_NC.float()

        def mean(labels_N: Tensor) -> Tensor:
            if weight_C is None:
                return cross_entropy(logits_NC, labels_N, label_smoothing=label_smoothing)
            loss_N = cross_entropy(logits_NC, labels_N, label_smoothing=label_smoothing, reduction="none")
            return (weight_C[labels_N] * loss_N).mean()

        if self.others_N is None or self.shares_2 is None:
            return mean(self.labels_N)
        return self.shares_2[0] * mean(self.labels_N) + self.shares_2[1] * mean(self.others_N)

    def accuracy(self, logits_NC: Tensor) -> Tensor:
        """Share of images whose class has the highest logit; weighted over both classes if there are two."""
        best_N = logits_NC.argmax(dim=1)
        share = (best_N == self.labels_N).float().mean()
        if self.others_N is None or self.shares_2 is None:
            return share
        return self.shares_2[0] * share + self.shares_2[1] * (best_N == self.others_N).float().mean()


def mixup(images_NCHW: Tensor, labels_N: Tensor, alpha: float) -> MixedBatch:
    """Blends every image with another one of the batch (Zhang et al. 2018, arXiv 1710.09412), unless alpha is 0.

    The weights, the same for the whole batch, and the pairs come from torch's random state, which is in the checkpoint.
    """
    if alpha == 0:
        return MixedBatch(images_NCHW, labels_N)
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    others_N = to_device(torch.randperm(len(labels_N)), labels_N.device)
    shares_2 = to_device(torch.tensor([share, 1 - share]), labels_N.device)
    mixed_NCHW = shares_2[0] * images_NCHW + shares_2[1] * images_NCHW[others_N]
    return MixedBatch(mixed_NCHW, labels_N, labels_N[others_N], shares_2)


def cutmix(images_NCHW: Tensor, labels_N: Tensor, alpha: float) -> MixedBatch:
    """Replaces a rectangle of every image, the same for the whole batch, by that of another one of the batch (Yun et al. 2019,
    arXiv 1905.04899). As in torchvision, a rectangle that reaches over the border is cut, and the areas are the weights.
    """
    H, W = images_NCHW.shape[2:]
    area = 1 - float(torch.distributions.Beta(alpha, alpha).sample())
    others_N = to_device(torch.randperm(len(labels_N)), labels_N.device)
    y, x = int(torch.randint(H, ())), int(torch.randint(W, ()))
    half_height, half_width = int(0.5 * math.sqrt(area) * H), int(0.5 * math.sqrt(area) * W)
    rows = slice(max(y - half_height, 0), min(y + half_height, H))
    columns = slice(max(x - half_width, 0), min(x + half_width, W))
    mixed_NCHW = images_NCHW.clone()
    mixed_NCHW[:, :, rows, columns] = images_NCHW[others_N][:, :, rows, columns]
    share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (H * W)
    return MixedBatch(mixed_NCHW, labels_N, labels_N[others_N], to_device(torch.tensor([share, 1 - share]), labels_N.device))


def mixed(images_NCHW: Tensor, labels_N: Tensor, recipe: RecipeConfig) -> MixedBatch:
    """The batch after mixup or CutMix; after one of the two at random if the recipe has both."""
    if recipe.cutmix_alpha and (not recipe.mixup_alpha or torch.rand(()) < 0.5):
        return cutmix(images_NCHW, labels_N, recipe.cutmix_alpha)
    return mixup(images_NCHW, labels_N, recipe.mixup_alpha)


def erased(images_NCHW: Tensor, probability: float) -> Tensor:
    """Replaces a random rectangle of each image by 0, the mean color of normalized images, with this probability.

    As in torchvision, the rectangle has 2 to 33 % of the image's area and a ratio of height to width from 0.3 to 3.3; sides
    longer than the image are shortened. It comes from torch's random state, which is in the checkpoint.
    """
    if probability == 0:
        return images_NCHW
    N, _, H, W = images_NCHW.shape
    chosen_N, area_N, ratio_N, top_N, left_N = torch.rand(5, N)
    area_N, ratio_N = (0.02 + 0.31 * area_N) * H * W, 0.3 * 11**ratio_N
    height_N, width_N = (area_N * ratio_N).sqrt().clamp(1, H).round(), (area_N / ratio_N).sqrt().clamp(1, W).round()
    top_N, left_N = (top_N * (H - height_N + 1)).floor(), (left_N * (W - width_N + 1)).floor()
    height_N = height_N * (chosen_N < probability)
    row_H, column_W = torch.arange(H), torch.arange(W)
    in_rows_NH = (row_H >= top_N[:, None]) & (row_H < (top_N + height_N)[:, None])
    in_columns_NW = (column_W >= left_N[:, None]) & (column_W < (left_N + width_N)[:, None])
    erased_N1HW = to_device(in_rows_NH[:, None, :, None] & in_columns_NW[:, None, None, :], images_NCHW.device)
    return images_NCHW.masked_fill(erased_N1HW, 0)


def balancing_weights(labels: Sequence[int], classes: int) -> Tensor:
    """The weight of each class, [classes], in inverse proportion to its number of labels; their mean over all labels is 1."""
    count_C = np.bincount(np.asarray(labels), minlength=classes)
    return torch.from_numpy(len(labels) / (classes * count_C)).float()


def optimizer(model: nn.Module, recipe: RecipeConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters, in groups with one learning rate and weight decay each, head first."""
    groups = []
    for weights, scale in scaled_groups(model, recipe.layer_decay):
        plain = [weight for weight in weights if weight.dim() <= 1 and recipe.decay == "weights"]
        decayed = [weight for weight in weights if weight.dim() > 1 or recipe.decay == "all"]
        for each, decay in ((decayed, recipe.weight_decay), (plain, 0.0)):
            if each:
                groups.append({"params": each, "lr": recipe.lr_used * scale, "weight_decay": decay})
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=(recipe.momentum, 0.999))
    return torch.optim.SGD(groups, momentum=recipe.momentum, nesterov=recipe.nesterov)


def frozen_parts(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Excludes the parts of a model with these names from training; returns them. The caller keeps them in evaluation mode."""
    frozen = [module for name in names for module in _parts(model)[name]]
    for module in frozen:
        module.requires_grad_(False).eval()
    return frozen


def _parts(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules of each part of a model, from the stem to the head."""
    assert isinstance(model, BaseModel)
    return model.parts()


def scaled_groups(model: nn.Module, decay: float) -> list[tuple[list[nn.Parameter], float]]:
    """The trainable weights of each part, head first, with the factor of their learning rate: 1, decay, decay², ..."""
    if decay == 1:
        return [([w for w in model.parameters() if w.requires_grad], 1.0)]
    weights = [[w for module in modules for w in module.parameters() if w.requires_grad] for modules in _parts(model).values()]
    return [(each, decay**distance) for distance, each in enumerate(reversed(weights)) if each]
