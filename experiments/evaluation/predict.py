"""The most probable classes of images in any folders, by any checkpoint."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from experiments.errors import UserError
from experiments.evaluation.evaluate import LoadedModel, evaluation_loader
from experiments.grids.transform import transform
from pipelines import DataError, Dataset
from pipelines.datasets.check import broken_images
from pipelines.datasets.dataset import list_images
from san.models import checkpoint
from san.nn import fold

AT_ONCE = 1024
"""Images that are checked at a time after an error, until a broken one is found."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable classes of an image, best first."""

    image: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    """From 0 to 1."""
    error: str = ""
    """Why the image cannot be used, if it has no classes."""


def find_images(names: Sequence[str], listed_in: TextIO | None = None) -> tuple[list[str], str]:
    """The paths of images: files as they are given, then those in a list with one path per line, and for each folder the images
    in it and its subfolders, sorted. `~` is the home folder. Also says what was skipped in folders.

    Raises:
        UserError: no images are found.
        DataError: a folder cannot be read.
    """
    found: list[str] = []
    skipped = []
    for name in (*names, *(line.rstrip("\r\n") for line in listed_in or () if line.strip())):
        if "\0" in name:
            raise UserError("the list has paths between null bytes; give one path per line")
        path = name if os.path.lexists(name) else os.path.expanduser(name)
        if not os.path.isdir(path):
            found.append(path)
            continue
        images, others = list_images(Path(path))
        found += [os.path.join(path, image) for image in images]
        skipped += [f"{name}: skipped {others}"] if others else []
    if not found:
        raise UserError(f"no images in {', '.join(names) or 'the list'}{''.join(f'; {text}' for text in skipped)}")
    return found, "; ".join(skipped)


def predict(opened: LoadedModel, paths: Sequence[str], top: int, ended: Callable[[], None]) -> Iterator[Prediction]:
    """The `top` most probable classes of each image, in the given order, preprocessed as in validation. `ended` is called after
    each batch. Images that cannot be used have an error."""
    images, model = Dataset.of_files(paths), fold(opened.model)
    names = opened.classes or tuple(map(str, range(checkpoint.classes(opened.model))))
    is_file = np.array(list(map(os.path.isfile, paths)))
    batch = opened.config.recipe.images_at_once()
    errors = {index: _no_file(paths[index]) for index in np.flatnonzero(~is_file).tolist()}
    left, position = np.flatnonzero(is_file), 0

    def failed(until: int) -> Iterator[Prediction]:
        return (Prediction(paths[index], error=errors[index]) for index in range(position, until))

    while len(left):
        loader, done = evaluation_loader(opened, images.only(left), transform(opened.config.data), batch), 0
        model = model.to(loader.device)
        try:
            for images_NCHW, _ in loader.epoch(0):
                with torch.inference_mode():
                    best = model(images_NCHW).float().softmax(1).topk(min(top, len(names)), dim=1)
                indices = left[done : done + len(images_NCHW)].tolist()
                for index, values, labels in zip(indices, best.values.tolist(), best.indices.tolist(), strict=True):
                    yield from failed(index)
                    position = index + 1
                    yield Prediction(paths[index], tuple(names[label] for label in labels), tuple(values))
                done += len(indices)
                ended()
            left = left[done:]
        except DataError:
            left = left[done:]
            broken = _next_broken(images, left.tolist())
            if not broken:
                raise
            errors |= broken
            left = np.setdiff1d(left, list(broken))
    yield from failed(len(paths))


def _no_file(path: str) -> str:
    return "not a file, but a pipe or a device" if os.path.exists(path) else "no such file"


def _next_broken(images: Dataset, indices: Sequence[int]) -> dict[int, str]:
    """The reasons of the next images among `indices` that cannot be used, by index."""
    for first in range(0, len(indices), AT_ONCE):
        if broken := {one.index: one.reason for one in broken_images(images, indices[first : first + AT_ONCE])}:
            return broken
    return {}


def write_csv(predictions: Iterable[Prediction], top: int, file: TextIO) -> Iterator[Prediction]:
    """Passes predictions on, and writes each as a row: image, class_1, probability_1, ..., error."""
    writer = csv.writer(file, lineterminator="\n")
    ranks = range(1, top + 1)
    writer.writerow(["image", *(f"{what}_{rank}" for rank in ranks for what in ("class", "probability")), "error"])
    for one in predictions:
        pairs = [text for name, share in zip(one.classes, one.probabilities, strict=True) for text in (name, f"{share:.6f}")]
        writer.writerow([one.image, *pairs, *[""] * (2 * top - len(pairs)), one.error])
        yield one
