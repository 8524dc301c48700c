"""Robustness to rotated images and to attacks (section 5.4 of the paper, "Robustness").

A protocol is a list of conditions under which networks are tested, each with the numbers that it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.config.grid import ProtocolName
from experiments.errors import UserError
from experiments.evaluation.evaluate import LoadedModel, evaluation_loader
from experiments.training.device import available_device, explain_oom
from experiments.training.engine import numerics
from experiments.training.images import transform
from experiments.training.metrics import Batches, after_each, evaluate
from pipelines import Dataset, Transform
from san.nn import fold

Numbers = dict[str, float]
"""Percent by name, such as `top1`."""

TITLES = {"success": "success", "top1": "top-1", "top5": "top-5"}
"""Titles of the numbers."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A network, and the images on which it is measured."""

    network: nn.Module
    """In evaluation mode; its parameters need no gradients."""
    transform: Transform
    labels: Sequence[int]
    classes: int
    seed: int
    """Chooses the targets of attacks."""
    images: Callable[[Transform], Batches]
    """The images after a transform, in the order of their labels."""


Measure = Callable[[Subject], Numbers]
"""Measures a network under a condition on all images."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a protocol."""

    name: str
    """The name in the table. Followed by `_` and the name of a number, it is a column of the paper's table."""
    key: str
    """Contains all parameters; the tracker calls the numbers `robustness/<key>/<number>`."""
    numbers: tuple[str, ...]
    """Names of the numbers: `top1`, `top5`, `success`."""
    measure: Measure

    def metric(self, number: str) -> str:
        """The name of a metric in the tracker."""
        return f"robustness/{self.key}/{number}"

    def metrics(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers by their names in the tracker."""
        return {self.metric(name): numbers[name] for name in self.numbers}

    def numbers_in(self, metrics: Mapping[str, float]) -> Numbers:
        """The numbers that a run has."""
        return {name: metrics[self.metric(name)] for name in self.numbers if self.metric(name) in metrics}


@dataclass(frozen=True, slots=True)
class Protocol:
    """Conditions in the order of the table; the first one does not disturb the images."""

    conditions: tuple[Condition, ...]
    caption: str

    def missing(self, metrics: Mapping[str, float]) -> tuple[Condition, ...]:
        """The conditions for which the metrics of a run are incomplete."""
        return tuple(condition for condition in self.conditions if len(condition.numbers_in(metrics)) < len(condition.numbers))


def measured(opened: LoadedModel, images: Dataset, condition: Condition, ended: Callable[[], None]) -> Numbers:
    """Measures a checkpoint under a condition; `ended` is called after each batch.

    Raises:
        DataError: an image cannot be used.
        UserError: out of GPU memory.
    """
    device = available_device()
    with numerics(opened.config.engine, device), explain_oom(opened.config, device, is_training=False):
        return condition.measure(subject_of(opened, images, opened.batch, ended))


def subject_of(opened: LoadedModel, images: Dataset, batch: int, ended: Callable[[], None] = lambda: None) -> Subject:
    """The folded network of a checkpoint and images that the loader reads, `batch` at a time."""

    def load(transform: Transform) -> Batches:
        return after_each(evaluation_loader(opened, images, transform, batch).epoch(0), ended)

    network = fold(opened.model).to(available_device())
    return Subject(network, transform(opened.config.data), images.labels, len(images.classes), opened.seed, load)


def percentages(numbers: Mapping[str, float]) -> str:
    """Such as `top-1 97.5 %, top-5 100.0 %`."""
    return ", ".join(f"{TITLES[name]} {value:.1f} %" for name, value in numbers.items())


MANIPULATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda images_NCHW: images_NCHW,
    "rotate90": lambda images_NCHW: torch.rot90(images_NCHW, -1, (2, 3)),
    "rotate180": lambda images_NCHW: torch.rot90(images_NCHW, 2, (2, 3)),
    "rotate270": lambda images_NCHW: torch.rot90(images_NCHW, -3, (2, 3)),
    "upside_down": lambda images_NCHW: images_NCHW.flip(2),
}
"""Exact permutations of pixels; rotations are clockwise."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Measures accuracy on images after one of the `MANIPULATIONS`.

    Training does not rotate images. Preprocessed squares are rotated, so no pixel is interpolated or comes into view. Upside
    down is a flip about the horizontal axis, as in the paper: rows change places, columns do not.
    """

    manipulation: str

    def __call__(self, subject: Subject) -> Numbers:
        turn, images = MANIPULATIONS[self.manipulation], subject.images(subject.transform)
        turned = ((turn(x_NCHW).contiguous(), labels_N) for x_NCHW, labels_N in images)
        scores = evaluate(subject.network, turned, subject.classes)
        return {"top1": scores.top1, "top5": scores.top5}


def _rotation(name: str, manipulation: str) -> Condition:
    return Condition(name, manipulation, ("top1", "top5"), Rotation(manipulation))


ROTATION = Protocol(
    conditions=(
        _rotation("none", "none"),
        _rotation("cw90", "rotate90"),
        _rotation("cw180", "rotate180"),
        _rotation("cw270", "rotate270"),
        _rotation("upside_down", "upside_down"),
    ),
    caption="Zero-shot accuracy on images rotated clockwise (cw) or flipped upside down. "
    "Drop: percentage points lost compared with `none`.",
)


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
    """A white-box targeted attack by projected gradient descent in the L-inf ball (Madry et al. 2018, arXiv 1706.06083), with
    its parameters in units of 1/255. Calling it measures its success.

    The target of an image is a random class other than its own, chosen by the seed and the image's place in the dataset. In
    each step, pixels move against the sign of the gradient of the target's cross entropy, but stay within epsilon of their
    original values and in [0, 1]. The first step starts at the image, not at a random point in the ball: the paper mentions no
    random start, its steps reach exactly epsilon, and PGD in the authors' library at that time (foolbox 2.x) starts there.
    """

    epsilon: int
    """The largest change of a pixel."""
    step: int
    steps: int

    def __call__(self, subject: Subject) -> Numbers:
        if subject.classes == 1:
            raise UserError("attacks need images of two or more classes, but these have only one class")
        pixels, device = replace(subject.transform, mean=(0.0,) * 3, std=(1.0,) * 3), next(subject.network.parameters()).device
        network = OnPixels(subject.network, subject.transform).eval().to(device)
        targets_N = targets(np.asarray(subject.labels), subject.classes, subject.seed).to(device)
        hits, seen = torch.zeros(2, dtype=torch.int64, device=device), 0
        for pixels_NCHW, labels_N in subject.images(pixels):
            wanted_N = targets_N[seen : seen + len(labels_N)]  # validation keeps the order of the dataset
            seen += len(labels_N)
            predicted_N = predictions(network, self.attacked(network, pixels_NCHW, wanted_N))
            hits += torch.stack(((predicted_N == wanted_N).sum(), (predicted_N == labels_N).sum()))
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


def _attack(name: str, attack: Attack) -> Condition:
    key = f"pgd-epsilon{attack.epsilon}-step{attack.step}-n{attack.steps}"
    return Condition(name, key, ("success", "top1"), attack)


ATTACK = Protocol(
    conditions=(
        Condition("clean", "none", ("top1",), Rotation("none")),
        _attack("n2", Attack(epsilon=8, step=4, steps=2)),
        _attack("n4", Attack(epsilon=8, step=2, steps=4)),
    ),
    caption=(
        "White-box targeted PGD, L-inf, epsilon 8/255: n2 is 2 steps of 4/255, n4 is 4 steps of 2/255. Success: images "
        "classified as the target class. Drop: percentage points of top-1 lost compared with `clean`."
    ),
)


PROTOCOLS: dict[ProtocolName, Protocol] = {"rotation": ROTATION, "attack": ATTACK}

_CONDITIONS = [condition for protocol in PROTOCOLS.values() for condition in protocol.conditions]
ROBUSTNESS_METRICS = tuple(dict.fromkeys(condition.metric(number) for condition in _CONDITIONS for number in condition.numbers))
"""The numbers of all protocols by their names in the tracker."""
