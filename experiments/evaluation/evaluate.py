"""Opens checkpoints of any kind, measures their accuracy on a split, in which every image counts exactly once, and predicts the
most probable classes of images in any folders."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO
from unicodedata import normalize

import numpy as np
import torch
from pydantic import ValidationError

from experiments.config.config import TrialConfig, flat, merged, model_errors, schema_errors
from experiments.config.expand import parse_override, profile_path, read_profile, with_absolute_paths
from experiments.errors import UserError
from experiments.training.checkpoint import Checkpoint, read_checkpoint, weights_file
from experiments.training.device import available_device, explain_oom, prepare_cpu
from experiments.training.engine import numerics
from experiments.training.images import open_split, transform
from experiments.training.metrics import after_each, evaluate
from pipelines import DataError, Dataset, Loader, Transform
from pipelines.datasets.check import broken_images
from pipelines.datasets.dataset import list_images
from pipelines.errors import join_names
from pipelines.loader import decoding_threads
from san.models import checkpoint, pretrained, released
from san.models.base import BaseModel
from san.nn import fold

ALLOWED_OVERRIDES = ("recipe.batch_size", "resources.cpus")
"""Allowed besides those of `data`."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A classifier with the preprocessing of its images."""

    path: Path
    model: BaseModel
    config: TrialConfig
    epoch: int | None = None
    """Epochs of training, for the checkpoint of a trial."""
    classes: tuple[str, ...] | None = None
    """None for a file without class names."""
    data_digest: str = ""
    """Digest of the trial's training and validation images."""
    seed: int = 0
    row: str | None = None
    """Row of the trial's grid."""

    @property
    def batch(self) -> int:
        """Images at once: what one worker trained on fits, with gradients, on the same hardware."""
        return self.config.recipe.images_at_once(self.config.resources.workers)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The accuracy of a checkpoint on a split."""

    checkpoint: str
    model: str
    """Name of the model."""
    epoch: int | None
    """Epochs of training, for the checkpoint of a trial."""
    root: str
    split: str
    own_images: bool | None
    """Whether the trial trained or validated on images with these names and sizes; None for other files."""
    images: int
    classes: int
    top1: float
    """Percent."""
    top5: float
    """Percent."""
    loss: float
    """Mean cross entropy, without label smoothing."""


def open_checkpoint(path: Path, overrides: Sequence[str] = (), profile: str | None = None) -> LoadedModel:
    """Loads the checkpoint of a trial, the best checkpoint in a trial's folder, a folder in the Hub's format, a file of
    `save_checkpoint`, or a file that the paper's authors released.

    The checkpoint of a trial contains the preprocessing, and a folder in the Hub's format can name its profile; for others, the
    profile gives it (by default `imagenet`). `overrides` such as `data.root=/data` change `data`, `recipe.batch_size` and
    `resources.cpus`; for released files, also missing fields of the model, such as `model.footprint=9`.

    Raises:
        CheckpointError: the file does not exist or is not a checkpoint.
        ModelError, UserError: it does not fit the overrides.
    """
    changes, file = _changes(overrides), weights_file(path)
    found = read_checkpoint(file)
    if found is not None and "model" in changes:
        raise UserError(
            f"{path}: this checkpoint already stores its model; leave out {', '.join(flat({'model': changes['model']}))}"
        )
    if not isinstance(found, Checkpoint):
        return _opened_model(file, found, changes, profile)
    if profile is not None:
        raise UserError(
            f"{path}: this checkpoint stores its own preprocessing; leave out --profile, and use overrides to change data.*"
        )
    origin = found.origin
    # Of the settings of the engine, only this one has an effect here; other versions may not know the others.
    engine = {"tf32": origin.record.get("engine", {}).get("tf32")}
    config = _config(merged(origin.record | {"engine": engine}, changes))
    return LoadedModel(
        file, found.model(), config, len(found.history), origin.classes, origin.data_digest, origin.seed, origin.row
    )


def _changes(overrides: Sequence[str]) -> dict[str, Any]:
    changes = with_absolute_paths(merged({}, *map(parse_override, overrides)), Path.cwd())
    for key in flat(changes):
        if not key.startswith(("data.", "model.")) and key not in ALLOWED_OVERRIDES:
            raise UserError(
                f"override {key}: not allowed here; allowed are data.*, {', '.join(ALLOWED_OVERRIDES)} and, for released "
                "files, model.*"
            )
    return changes


def _opened_model(file: Path, model: BaseModel | None, changes: Mapping[str, Any], profile: str | None) -> LoadedModel:
    """A model from outside of a trial. Without a profile, images are preprocessed as in its training or, if that is not known,
    as for ImageNet."""
    is_folder = file.name == pretrained.WEIGHTS
    facts = pretrained.read_config(file.parent) if is_folder else {}
    profile = profile or facts.get("profile")
    values = read_profile(profile_path(profile or "imagenet"))
    if model is None:
        fields = dict(merged(values, changes).get("model", {}))
        model = released.load_released_checkpoint(file, fields.pop("name", None), **fields)
    if model.in_channels != 3:
        raise UserError(f"{file}: this model takes {model.in_channels}-channel images, but the dataset is RGB")
    known = checkpoint.trained_on(model)
    if profile is None and "input_size" in known:
        size, fraction = known["input_size"][-1], known.get("crop_pct", 1)
        values["data"] |= {"size": size, "resize": round(size / fraction)}
        values["data"] |= {key: known[key] for key in ("mean", "std") if key in known}
    classes = known.get("label_names")
    config = _config(merged(values, changes) | {"model": asdict(model.spec)})
    path, digest = file.parent if is_folder else file, facts.get("data_digest", "")
    return LoadedModel(path, model, config, classes=classes and tuple(classes), data_digest=digest)


def _config(values: Mapping[str, Any]) -> TrialConfig:
    try:
        config = TrialConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{key}: {what}" for key, what in schema_errors(error, TrialConfig))) from None
    if wrong := [f"{key}: {what}" for key, what in model_errors(config.model, config.data.size)]:
        raise UserError("\n".join(wrong))
    return config


def open_images(opened: LoadedModel, split: str | None = None) -> Dataset:
    """Opens the images of a split (`open_split`) and checks that they have the classes of the model.

    Raises:
        DataError: the images cannot be used.
        UserError: their classes differ.
    """
    images = open_split(opened.config.data, split)
    where = images.root / images.split
    count = checkpoint.classes(opened.model)
    if len(images.classes) != count:
        raise UserError(
            f"{opened.path}: the model has {count} classes, but {where} has {len(images.classes)}; "
            "use data.root=..., --split or --profile to select images of the model's classes"
        )
    if opened.classes is not None and images.classes != opened.classes:
        ours, theirs = (set(a) - set(b) for a, b in ((opened.classes, images.classes), (images.classes, opened.classes)))
        if same := {normalize("NFC", name) for name in ours} & {normalize("NFC", name) for name in theirs}:
            raise UserError(
                f"{opened.path}: trained on {join_names(same)}, which is spelled with other Unicode characters in {where}"
            )
        differs = f"has {join_names(theirs)} instead of {join_names(ours)}" if ours else "has them in another order"
        raise UserError(f"{opened.path}: trained on other classes: {where} {differs}")
    return images


def evaluate_checkpoint(
    opened: LoadedModel,
    images: Dataset,
    ended: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Measures exact accuracy and loss over all images, on a GPU if there is one. `ended` is called after each batch.

    With the images and transform of its trial, and on the same hardware, the results equal those of the trial's validation if
    it had one worker.

    Raises:
        DataError: an image cannot be used.
        UserError: out of GPU memory.
    """
    loader = evaluation_loader(opened, images, transform(opened.config.data), opened.batch)
    batches, classes = after_each(loader.epoch(0), ended), len(images.classes)
    with numerics(opened.config.engine, loader.device), explain_oom(opened.config, loader.device, is_training=False):
        loss, top1, top5, count, _ = evaluate(fold(opened.model).to(loader.device), batches, classes)
    return Evaluation(
        checkpoint=str(opened.path),
        model=opened.model.spec.name,
        epoch=opened.epoch,
        root=str(images.root),
        split=images.split,
        own_images=images.digest() in opened.data_digest.split("-") if opened.data_digest else None,
        images=count,
        classes=classes,
        top1=top1,
        top5=top5,
        loss=loss,
    )


def evaluation_loader(opened: LoadedModel, images: Dataset, transform: Transform, batch: int) -> Loader:
    """Loads batches in the order of the images to the available device, with the threads of the config."""
    cpus = opened.config.resources.cpus
    prepare_cpu(cpus)
    threads, where = decoding_threads(cpus), available_device()
    return Loader(images, transform, train=False, batch_size=batch, seed=opened.seed, threads=threads, device=where)


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
    errors = {
        index: "not a file, but a pipe or a device" if os.path.exists(paths[index]) else "no such file"
        for index in np.flatnonzero(~is_file).tolist()
    }
    left, position = np.flatnonzero(is_file), 0

    def failed(until: int) -> Iterator[Prediction]:
        return (Prediction(paths[index], error=errors[index]) for index in range(position, until))

    while len(left):
        loader, done = evaluation_loader(opened, images.only(left), transform(opened.config.data), opened.batch), 0
        model = model.to(loader.device)
        try:
            with (
                numerics(opened.config.engine, loader.device),
                explain_oom(opened.config, loader.device, is_training=False),
            ):
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
