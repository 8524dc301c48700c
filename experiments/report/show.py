"""`san show`: how one attention layer of a network weighs the footprints of some pixels of an image."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from experiments.errors import UserError
from experiments.evaluation.evaluate import Opened, open_images
from experiments.grids.transform import transform
from experiments.report.attention import Attention
from pipelines import DataError, Dataset, Loader
from pipelines.datasets.check import broken_images
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention, attention_weights

KINDS = {PairwiseAttention: "pairwise", PatchwiseAttention: "patchwise", ScalarAttention: "scalar"}


def open_image(opened: Opened, image: str, split: str | None = None) -> Dataset:
    """A picture's file, of any kind that DALI decodes; or, where there is none of that name, the image of that number in a
    split (`open_split`).

    Raises:
        UserError: the split has not so many.
        DataError: there is no such file, or it is no picture, or the split cannot be used.
    """
    if os.path.isfile(image) or not image.isdecimal():
        picture = Dataset.of_image(image)
        for broken in broken_images(picture, [0]):
            raise DataError(f"{image}: {broken.reason}; give a valid JPEG or PNG file")
        return picture
    images = open_images(opened, split)
    if int(image) >= len(images):
        where = images.root / images.split
        raise UserError(
            f"image {image}: {where} has {len(images)} images; give a number from 0 to {len(images) - 1}, or a file"
        )
    return images.only([int(image)])


def look(
    opened: Opened, picture: Dataset, pixel: tuple[int, int] | None = None, grid: int = 1, layer: str | None = None
) -> Attention:
    """The attention weights of one layer for the first image of `picture`, treated as in validation.

    Args:
        pixel: (row, column) of the square that the network sees.
        grid: where no pixel is given, so many by so many, evenly spread over the image.
        layer: name or number; by default the last of the first stage that has the network's largest footprint: the largest map
            of those on which a footprint is wide.

    Raises:
        UserError: no such pixel, grid or layer, or a network without attention.
        DataError: the image cannot be used.
    """
    model, config = opened.model, opened.config
    name, attention = _layer(opened, layer)
    batch = next(Loader(picture, transform(config.data), train=False, batch=1, seed=opened.seed).epoch(0))
    with torch.no_grad():
        answer = model(batch.images_NCHW).softmax(1)[0]
        weight_GKP = attention_weights(model, batch.images_NCHW)[name][0]
    size, reduction = config.data.size, model.reductions[int(name.split(".")[1])]
    side = size // reduction
    pixels = [_map_pixel(pixel, size, reduction)] if pixel is not None else _grid(grid, side, name)
    weight_GKn = weight_GKP[:, :, [row * side + column for row, column in pixels]]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.data.mean, config.data.std))
    image_3HW = (batch.images_NCHW[0] * std + mean).clamp(0, 1)
    best = int(answer.argmax())
    return Attention(
        model=model.spec.name,
        picture=picture.paths[0],
        answer=f"{opened.classes[best] if opened.classes else f'class {best}'} ({100 * answer[best]:.1f} %)",
        layer=name,
        kind=next(word for kind, word in KINDS.items() if isinstance(attention, kind)),
        footprint=attention.footprint,
        image_HW3=image_3HW.permute(1, 2, 0).numpy(),
        reduction=reduction,
        pixels=tuple(pixels),
        weight_GKn=weight_GKn.numpy(),
        between=between_channels(weight_GKn),
        between_everywhere=between_channels(weight_GKP),
    )


def between_channels(weight_GKP: Tensor) -> float:
    """Percent of the weights' variation over footprint and channels that lies between channels.

    The variation is the sum of squares of what weights differ from their pixel's mean; between channels is what they differ
    from the mean of the channels at the same place of the footprint. 0: all channels weigh alike, so one map of weights tells
    everything. 100 (1 - 1/G): they vary as much as each other and do not correlate. 100: their mean is flat and tells nothing.
    Weights that are all equal have 0.
    """
    weight_GKP = weight_GKP.double()
    total = (weight_GKP - weight_GKP.mean((0, 1), keepdim=True)).square().sum()
    between = (weight_GKP - weight_GKP.mean(0, keepdim=True)).square().sum()
    return 100 * float(between / total) if total > 0 else 0.0


def _layer(opened: Opened, asked: str | None) -> tuple[str, SelfAttention]:
    layers = {name: module for name, module in opened.model.named_modules() if isinstance(module, SelfAttention)}
    if not layers:
        raise UserError(
            f"{opened.path}: {opened.model.spec.name} has no attention layers; give a checkpoint of a self-attention network"
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
        known = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        raise UserError(
            f"--layer {asked}: no such attention layer in {opened.model.spec.name}; "
            f"give a number or one of these names: {known}"
        )
    return name, layers[name]


def _map_pixel(pixel: tuple[int, int], size: int, reduction: int) -> tuple[int, int]:
    row, column = pixel
    if not (0 <= row < size and 0 <= column < size):
        seen = f"outside the model's input of {size} x {size} pixels"
        raise UserError(f"--pixel {row},{column}: {seen}; give a row and a column from 0 to {size - 1}")
    last = size // reduction - 1  # what pooling leaves over at the border belongs to no pixel of the map
    return min(row // reduction, last), min(column // reduction, last)


def _grid(grid: int, side: int, layer: str) -> list[tuple[int, int]]:
    if grid > side:
        raise UserError(f"--grid {grid}: the feature map of {layer} has {side} x {side} pixels; give at most {side}")
    places = [(2 * number + 1) * side // (2 * grid) for number in range(grid)]
    return [(row, column) for row in places for column in places]
