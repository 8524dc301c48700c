"""White-box targeted attacks by projected gradient descent in the L-inf ball (Madry et al. 2018, arXiv 1706.06083).

The target of an image is a random class other than its own, chosen by the seed and the image's place in the dataset. In each
of n steps, pixels move against the sign of the gradient of the target's cross entropy, but stay within epsilon of their
original values and in [0, 1]. The first step starts at the image, not at a random point in the ball: the paper mentions no
random start, its steps reach exactly epsilon, and PGD in the authors' library at that time (foolbox 2.x) starts there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.evaluation.evaluate import LoadedModel, evaluation_loader
from experiments.evaluation.protocol import Condition, Ended, Numbers, Protocol
from experiments.evaluation.rotation import Rotation
from experiments.grids.transform import transform
from pipelines import Dataset, Transform
from san.nn import fold


class OnPixels(nn.Module):
    """A network that takes pixels in [0, 1] and normalizes them."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, network: nn.Module, transform: Transform) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean_C11", torch.tensor(transform.mean).view(3, 1, 1))
        self.register_buffer("std_C11", torch.tensor(transform.std).view(3, 1, 1))

    def forward(self, pixels_NCHW: Tensor) -> Tensor:
        return self.network((pixels_NCHW - self.mean_C11) / self.std_C11)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack with its parameters in units of 1/255. Calling it measures its success."""

    epsilon: int
    """The largest change of a pixel."""
    step: int
    steps: int

    def __call__(self, opened: LoadedModel, images: Dataset, batch: int, ended: Ended) -> Numbers:
        normalized = transform(opened.config.data)
        pixels = replace(normalized, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # exact pixels
        loader = evaluation_loader(opened, images, pixels, batch)
        network = OnPixels(fold(opened.model), normalized).eval().to(loader.device)
        targets_N = targets(np.asarray(images.labels), len(images.classes), opened.seed).to(loader.device)
        hits, seen = torch.zeros(2, dtype=torch.int64, device=loader.device), 0
        for pixels_NCHW, labels_N in loader.epoch(0):
            wanted_N = targets_N[seen : seen + len(labels_N)]  # validation keeps the order of the dataset
            seen += len(labels_N)
            predicted_N = predictions(network, self.attacked(network, pixels_NCHW, wanted_N))
            hits += torch.stack(((predicted_N == wanted_N).sum(), (predicted_N == labels_N).sum()))
            ended()
        success, top1 = (100 * hits.double() / seen).tolist()
        return {"success": success, "top1": top1}

    def attacked(self, network: nn.Module, pixels_NCHW: Tensor, targets_N: Tensor) -> Tensor:
        """Returns the attacked images [N, 3, H, W], with pixels in [0, 1] before and after.

        Runs n forward and n backward passes; the network's parameters should not require gradients.
        """
        low_NCHW, high_NCHW = within(pixels_NCHW, self.epsilon / 255)
        x_NCHW = pixels_NCHW
        for _ in range(self.steps):
            x_NCHW = x_NCHW.detach().requires_grad_()
            loss = cross_entropy(network(x_NCHW), targets_N, reduction="sum")  # a sum, so images do not affect each other
            (gradient_NCHW,) = torch.autograd.grad(loss, x_NCHW)
            x_NCHW = x_NCHW.detach().sub(gradient_NCHW.sign_(), alpha=self.step / 255).clamp_(low_NCHW, high_NCHW)
        return x_NCHW


@torch.no_grad()
def predictions(network: nn.Module, pixels_NCHW: Tensor) -> Tensor:
    """The predicted classes [N]."""
    return network(pixels_NCHW).argmax(1)


def within(pixels_NCHW: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The smallest and largest values in [0, 1] that differ by at most `epsilon`, without rounding errors."""
    exact_NCHW = pixels_NCHW.double()

    def rounded_inwards(edge_NCHW: Tensor) -> Tensor:
        near_NCHW = edge_NCHW.clamp_(0, 1).to(pixels_NCHW.dtype)
        beyond_NCHW = (near_NCHW.double() - exact_NCHW).abs() > epsilon
        return torch.where(beyond_NCHW, torch.nextafter(near_NCHW, pixels_NCHW), near_NCHW)

    return rounded_inwards(exact_NCHW - epsilon), rounded_inwards(exact_NCHW + epsilon)


def targets(labels_N: np.ndarray[tuple[int], np.dtype[np.int64]], classes: int, seed: int) -> Tensor:
    """A random class for each image that differs from its label, int64 [N]; depends only on the seed and the image's place."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return torch.from_numpy((labels_N + generator.integers(1, classes, len(labels_N))) % classes)


def _condition(name: str, attack: Attack) -> Condition:
    key = f"pgd-epsilon{attack.epsilon}-step{attack.step}-n{attack.steps}"
    return Condition(name, key, ("success", "top1"), attack)


PROTOCOL = Protocol(
    conditions=(
        Condition("clean", "none", ("top1",), Rotation("none")),
        _condition("n2", Attack(epsilon=8, step=4, steps=2)),
        _condition("n4", Attack(epsilon=8, step=2, steps=4)),
    ),
    caption=(
        "White-box targeted PGD, L-inf, epsilon 8/255: n2 is 2 steps of 4/255, n4 is 4 steps of 2/255. Success: images "
        "classified as the target class. Drop: percentage points of top-1 lost compared with `clean`."
    ),
)
