"""The attention weights of one layer for some pixels of an image."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.errors import UserError
from experiments.evaluation.evaluate import LoadedModel, open_images
from experiments.training.images import transform
from pipelines import DataError, Dataset, Loader
from pipelines.datasets.check import broken_images
from san.choice import choices
from san.models.modules import ModuleModel
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention, attention_weights

Floats = NDArray[np.float32]
KINDS = {PairwiseAttention: "pairwise", PatchwiseAttention: "patchwise", ScalarAttention: "scalar"}


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention weights of one layer in the footprints of one pixel or of a square grid of pixels."""

    model: str
    picture: str
    prediction: str
    layer: str
    kind: str
    """pairwise, patchwise or scalar."""
    footprint: int
    """Side, in pixels of the layer's map."""
    image_HW3: Floats
    """The image after preprocessing, from 0 to 1."""
    reduction: int
    """Side of a map's pixel, in pixels of the image."""
    pixels: tuple[tuple[int, int], ...]
    """(row, column) on the layer's map, row by row."""
    weight_GKn: Floats
    """Weights by channel (head), position in the footprint and pixel."""
    between: float
    """Percent of the variance of these weights that is between channels."""
    between_everywhere: float
    """The same over all pixels of the map."""

    @property
    def map(self) -> tuple[int, int]:
        """Height and width of the layer's map."""
        height, width, _ = self.image_HW3.shape
        return height // self.reduction, width // self.reduction

    @property
    def is_signed(self) -> bool:
        """Whether weights can be negative, because they are not a softmax."""
        return self.kind == "patchwise"

    @property
    def channel(self) -> str:
        """How to call a set of weights: `channel` or `head`."""
        return "head" if self.kind == "scalar" else "channel"

    @property
    def channels(self) -> str:
        """The number of channels in words."""
        count, what = len(self.weight_GKn), "head" if self.kind == "scalar" else "weight channel"
        return f"{count} {what}{'s' * (count > 1)}"

    @property
    def limit(self) -> float:
        """The largest absolute weight, or 1 if all are zero."""
        return float(np.abs(self.weight_GKn).max()) or 1.0

    @property
    def reach(self) -> int:
        """Number of map pixels by which the footprint of the first pixel extends beyond the border, at most."""
        (H, W), half, (row, column) = self.map, self.footprint // 2, self.pixels[0]
        return max(half - row, half - column, row + half - H + 1, column + half - W + 1, 0)

    def mirrored(self, reach: int) -> tuple[Floats, NDArray[np.bool_]]:
        """The image in map pixels, [h, w, r, r, 3], with a border of reflected pixels; and which pixels are reflected."""
        (H, W), r = self.map, self.reduction
        blocks = self.image_HW3[: H * r, : W * r].reshape(H, r, W, r, 3).transpose(0, 2, 1, 3, 4)
        around = ((reach, reach), (reach, reach))
        outside = np.pad(np.zeros((H, W), bool), around, constant_values=True)
        return np.pad(blocks, (*around, (0, 0), (0, 0), (0, 0)), mode="reflect"), outside

    def footprints(self) -> tuple[Floats, NDArray[np.bool_]]:
        """The image in the footprint of each pixel, [n, k, k, r, r, 3]; and which pixels are reflected, [n, k, k]."""
        k = self.footprint
        blocks, outside = self.mirrored(k // 2)
        squares = [(slice(row, row + k), slice(column, column + k)) for row, column in self.pixels]
        return np.stack([blocks[square] for square in squares]), np.stack([outside[square] for square in squares])

    def image_part(self) -> tuple[int, int, int, int]:
        """Left, top, width and height of the image inside the footprint of the first pixel, in map pixels."""
        k, (H, W), (row, column) = self.footprint, self.map, self.pixels[0]
        left, top = max(k // 2 - column, 0), max(k // 2 - row, 0)
        return left, top, min(k // 2 - column + W, k) - left, min(k // 2 - row + H, k) - top


def open_image(opened: LoadedModel, image: str, split: str | None = None) -> Dataset:
    """Opens an image file in any format that DALI decodes, or if there is no such file, the image with that number in a
    split (`open_split`).

    Raises:
        UserError: the number is too large, or a split is given with a file.
        DataError: the file does not exist or is not an image, or the split cannot be used.
    """
    if os.path.isfile(image) or not image.isdecimal():
        if split is not None:
            raise UserError(f"--split {split}: has no effect on a file; leave it out, or give an image by its number")
        picture = Dataset.of_files([image])
        for broken in broken_images(picture, [0]):
            raise DataError(f"{image}: {broken.reason}; give another image")
        return picture
    images = open_images(opened, split)
    if int(image) >= len(images):
        where = images.root / images.split
        raise UserError(
            f"image {image}: {where} has {len(images)} images; give a number from 0 to {len(images) - 1}, or a file"
        )
    return images.only([int(image)])


def compute_attention(
    opened: LoadedModel, picture: Dataset, pixel: tuple[int, int] | None = None, grid: int = 1, layer: str | None = None
) -> Attention:
    """Computes the attention weights of one layer for the first image of `picture`, preprocessed as in validation.

    Args:
        pixel: (row, column) in the network's input.
        grid: number of pixels per side of an even grid, if no pixel is given.
        layer: name or number. The default is the last layer of the first stage with the largest footprint: of all stages with
            wide footprints, this one has the largest map.

    Raises:
        UserError: no such pixel, grid or layer, a network without attention, or weights that are not finite.
        DataError: the image cannot be used.
    """
    name = layer_name(opened, layer)
    size, reduction = opened.config.data.size, _reduction(opened, name)
    pixels = [_map_pixel(pixel, size, reduction)] if pixel is not None else _grid(grid, size // reduction, name)
    return _attention(opened, _run(opened, picture), name, pixels)


def compute_all_attention(opened: LoadedModel, picture: Dataset) -> dict[str, Attention]:
    """Computes the attention weights of all layers for all pixels, by name of the layer.

    Raises:
        UserError: a network without attention, or weights that are not finite.
        DataError: the image cannot be used.
    """
    layer_name(opened, None)
    answer = _run(opened, picture)
    sides = {name: opened.config.data.size // _reduction(opened, name) for name in answer.weight_GKP}
    return {name: _attention(opened, answer, name, _grid(side, side, name)) for name, side in sides.items()}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a network computes for an image."""

    picture: str
    image_HW3: Floats
    prediction: str
    weight_GKP: dict[str, Tensor]
    """By layer."""


def _run(opened: LoadedModel, picture: Dataset) -> _Answer:
    model, data = opened.model, opened.config.data
    batch = next(Loader(picture, transform(data), train=False, batch_size=1, seed=opened.seed).epoch(0))
    with torch.no_grad():
        answer = model(batch.images_NCHW).softmax(1)[0]
        weight_NGKP = attention_weights(model, batch.images_NCHW)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
    image_3HW = (batch.images_NCHW[0] * std + mean).clamp(0, 1)
    best, true_class = int(answer.argmax()), picture.classes[picture.labels[0]]
    truth = f"; true class: {true_class}" if true_class else ""  # a single file has none
    prediction = f"{opened.classes[best] if opened.classes else f'class {best}'} ({100 * answer[best]:.1f} %{truth})"
    weight_GKP = {name: weight[0] for name, weight in weight_NGKP.items()}
    if not all(weight.isfinite().all() for weight in weight_GKP.values()):
        raise UserError(f"{picture.paths[0]}: the network's attention weights are not finite; choose another checkpoint")
    name, prediction = (words.encode(errors="replace").decode() for words in (picture.paths[0], prediction))  # may be no text
    return _Answer(name, image_3HW.permute(1, 2, 0).numpy(), prediction, weight_GKP)


def _attention(opened: LoadedModel, answer: _Answer, name: str, pixels: Sequence[tuple[int, int]]) -> Attention:
    attention, weight_GKP = opened.model.get_submodule(name), answer.weight_GKP[name]
    assert isinstance(attention, SelfAttention)
    reduction = _reduction(opened, name)
    side = opened.config.data.size // reduction
    weight_GKn = weight_GKP[:, :, [row * side + column for row, column in pixels]]
    return Attention(
        model=opened.model.spec.name,
        picture=answer.picture,
        prediction=answer.prediction,
        layer=name,
        kind=next(word for kind, word in KINDS.items() if isinstance(attention, kind)),
        footprint=attention.footprint,
        image_HW3=answer.image_HW3,
        reduction=reduction,
        pixels=tuple(pixels),
        weight_GKn=weight_GKn.numpy(),
        between=between_channels(weight_GKn),
        between_everywhere=between_channels(weight_GKP),
    )


def _reduction(opened: LoadedModel, layer: str) -> int:
    model = opened.model
    return model.reductions[model.stage_names.index(layer.partition(".")[0])]


def between_channels(weight_GKP: Tensor) -> float:
    """Percent of the variance of the weights that is between channels.

    The total is the sum of squared deviations from the mean over footprint and channels; the part between channels has
    deviations from the mean over channels at each position. The result is 0 if all channels have the same weights,
    100 (1 - 1/G) if they are uncorrelated with equal variance, and 100 if their mean is constant. Constant weights give 0.
    """
    weight_GKP = weight_GKP.double()
    total = (weight_GKP - weight_GKP.mean((0, 1), keepdim=True)).square().sum()
    between = (weight_GKP - weight_GKP.mean(0, keepdim=True)).square().sum()
    return 100 * float(between / total) if total > 0 else 0.0


def layer_name(opened: LoadedModel, asked: str | None) -> str:
    """The name of the layer with a name or number; without one, of the last layer of the first stage with the widest footprint.

    Raises:
        UserError: no such layer, or a network without attention.
    """
    layers = {name: module for name, module in opened.model.named_modules() if isinstance(module, SelfAttention)}
    if not layers or isinstance(opened.model, ModuleModel):  # whose stages are not known
        raise UserError(
            f"{opened.path}: {opened.model.spec.name} has no attention layers that can be drawn; give a checkpoint of one of "
            "this project's self-attention networks"
        )
    names = list(layers)
    if asked is None:
        widest = max(layer.footprint for layer in layers.values())
        first = next(name for name in names if layers[name].footprint == widest)
        stage = first.rpartition(".blocks.")[0]
        name = [name for name in names if name.startswith(f"{stage}.")][-1]
    elif asked.isdecimal() and int(asked) < len(names):
        name = names[int(asked)]
    elif asked in layers:
        name = asked
    else:
        known = choices(f"give a number from 0 to {len(names) - 1}, or one of these names", asked, names)
        raise UserError(f"--layer {asked}: no such attention layer in {opened.model.spec.name}; {known}")
    return name


def _map_pixel(pixel: tuple[int, int], size: int, reduction: int) -> tuple[int, int]:
    row, column = pixel
    if not (0 <= row < size and 0 <= column < size):
        seen = f"outside the model's input of {size} x {size} pixels"
        raise UserError(f"--pixel {row},{column}: {seen}; give a row and a column from 0 to {size - 1}")
    last = size // reduction - 1  # pooling drops an incomplete border
    return min(row // reduction, last), min(column // reduction, last)


def _grid(grid: int, side: int, layer: str) -> list[tuple[int, int]]:
    if grid > side:
        raise UserError(f"--grid {grid}: the feature map of {layer} has {side} x {side} pixels; give at most {side}")
    centers = [(2 * number + 1) * side // (2 * grid) for number in range(grid)]
    return [(row, column) for row in centers for column in centers]


def attention_in_words(attention: Attention) -> str:
    """Describes the weights."""
    G, K, n = attention.weight_GKn.shape
    k, (H, W), (row, column), side = attention.footprint, attention.map, attention.pixels[0], math.isqrt(n)
    one = f"the footprint of the pixel in row {row}, column {column}"
    whose = one if n == 1 else f"the footprints of a {side} x {side} grid of pixels"
    g, j, p = np.unravel_index(np.abs(attention.weight_GKn).argmax(), (G, K, n))
    down, right = int(j) // k - k // 2, int(j) % k - k // 2
    steps = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    steps += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    most, compared = (
        ("strongest", "zero is white") if attention.is_signed else ("largest", f"uniform weights would be {1 / K:.3g}")
    )
    sentences = (
        f"{attention.model} predicts {attention.prediction} for {attention.picture}.",
        f"The picture shows the weights of {attention.layer} ({attention.kind} attention, {attention.channels}) for {whose}",
        f"of its {H} x {W} feature map; each footprint has {k} x {k} pixels.",
        f"The {most} weight, {attention.weight_GKn[g, j, p]:.3g}, belongs to {attention.channel} {g} and the pixel",
        f"{' and '.join(steps) if steps else 'itself'}; {compared}.",
        variance_in_words(attention),
    )
    return " ".join(sentences)


def variance_in_words(attention: Attention) -> str:
    """Describes the variance between channels."""
    G, one = len(attention.weight_GKn), len(attention.pixels) == 1
    if G == 1:
        return f"There is only one {attention.channel}, so all value channels share one map of weights."
    whose = "this pixel's" if one else "these pixels'"
    here, everywhere, unlike = (f"{share:.0f} %" for share in (attention.between, attention.between_everywhere, 100 - 100 / G))
    return (
        f"{here} of the variance of {whose} weights is between {attention.channel}s, which one shared map of weights could "
        f"not express ({everywhere} over the whole feature map; uncorrelated {attention.channel}s would give {unlike})."
    )
