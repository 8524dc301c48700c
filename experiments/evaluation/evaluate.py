"""`san evaluate`: what a checkpoint's network makes of a split, exactly: every image counts once."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from pydantic import ValidationError
from tqdm import tqdm

from experiments.errors import UserError
from experiments.grids.config import TrialConfig, flat, merged, mistakes, model_mistakes
from experiments.grids.expand import parse_override, profile_path, read_profile
from experiments.runs.store import LocalStore, is_uri, open_store
from experiments.runs.workspace import open_runs, open_workspace
from experiments.training.checkpoint import DAMAGE, Checkpoint, best_in
from experiments.training.device import available_device
from experiments.training.images import open_split
from experiments.training.job import has_store
from experiments.training.metrics import evaluate
from pipelines import Dataset, Loader, Transform
from pipelines.loader import threads_of
from san.models import checkpoint, released
from san.models.spec import Trunk

TAKEN = ("recipe.batch_size", "placement.cpus")
"""Overrides besides those of `data` that an evaluation has a use for."""
SECONDS_BETWEEN_LINES = 10.0
KEY = "[0-9a-f]{12}"
"""Of a trial."""
RUN_ID = "[0-9a-f]{32}"
"""Of MLflow."""
CHECKPOINT = (
    "a file or folder (local or s3://...), a cell's key (see `san runs`), the id of an MLflow run, or models:/NAME/VERSION"
)
"""What `reach` knows, for sentences."""

Kind = Literal["trial", "weights", "released"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A classifier, and what its images go through before it sees them."""

    path: Path
    model: Trunk
    config: TrialConfig
    epoch: int | None = None
    """Whole epochs that a trial has trained it for."""
    classes: tuple[str, ...] | None = None
    """Names; None where the file tells none."""
    data_digest: str = ""
    """Of the trial's training and validation images."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a checkpoint does on a split."""

    checkpoint: str
    model: str
    """Name of the variant."""
    epoch: int | None
    """Whole epochs that it was trained for, where the file tells."""
    root: str
    split: str
    own_images: bool | None
    """Whether the trial trained or validated on these images, by their names and sizes; None where the file is of no trial."""
    images: int
    classes: int
    top1: float
    """Percent."""
    top5: float
    """Percent."""
    loss: float
    """Mean cross entropy, without label smoothing."""


def open_checkpoint(path: Path, overrides: Sequence[str] = (), profile: str | None = None) -> Opened:
    """A trial's checkpoint, or its folder and of that the best epoch's; a file of `save_checkpoint`; one of the authors'.

    A trial's tells how its images are to be treated. Of the others, a profile does, `imagenet` where none is given.
    `overrides` such as `data.root=/data` change `data`, `recipe.batch_size` and `placement.cpus`; for a file of the
    authors', also what that does not tell, such as `model.footprint=9`.

    Raises:
        UserError: there is no such file, or it is none of these, or it does not fit the overrides.
    """
    changes = _changes(overrides)
    found = _trial_checkpoint(path)
    if found is None:
        return _other_checkpoint(path, changes, profile)
    if profile is not None:
        raise UserError(
            f"{path}: this checkpoint stores its own preprocessing; leave out --profile, and use overrides to change data.*"
        )
    _require_no_model(path, changes)
    origin = found.origin
    config = _config(merged(origin.record, changes))
    file = path / found.name if path.is_dir() else path
    return Opened(file, found.model(), config, len(found.history), origin.classes, origin.data_digest, origin.seed)


def _changes(overrides: Sequence[str]) -> dict[str, Any]:
    changes = merged({}, *map(parse_override, overrides))
    for key in flat(changes):
        if not key.startswith(("data.", "model.")) and key not in TAKEN:
            raise UserError(
                f"override {key}: not allowed here; allowed are data.*, {', '.join(TAKEN)} and, for released files, model.*"
            )
    return changes


def _require_no_model(path: Path, changes: Mapping[str, Any]) -> None:
    if "model" in changes:
        raise UserError(
            f"{path}: this checkpoint already stores its model; leave out {', '.join(flat({'model': changes['model']}))}"
        )


def kind_of(path: Path) -> Kind:
    """Whose a file or folder is: a trial's, which tells its model and how images are treated; of `save_checkpoint`, which tells
    its model; or of the authors', which need not tell either.

    Raises:
        UserError: as `open_checkpoint`.
    """
    if _trial_checkpoint(path) is not None:
        return "trial"
    return "weights" if checkpoint.is_checkpoint(_read(path)) else "released"


def _trial_checkpoint(path: Path) -> Checkpoint | None:
    """None for a file that is no trial's."""
    if os.path.isdir(path):
        best = best_in(LocalStore(path))
        if best is None:
            raise UserError(f"{path}: no readable checkpoint of a complete epoch (epoch-*-step-0000000.pt) in this folder")
        return best
    if "engine" not in _read(path):
        return None
    try:
        return Checkpoint.read(path)
    except DAMAGE as error:
        raise UserError(
            f"{path}: checkpoint damaged or written by an older version ({type(error).__name__}: {error})"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return checkpoint.read(path)
    except checkpoint.CheckpointError as error:
        raise UserError(str(error)) from None


def _other_checkpoint(path: Path, changes: Mapping[str, Any], profile: str | None) -> Opened:
    values = merged(read_profile(profile_path(profile or "imagenet")), changes)
    try:
        if checkpoint.is_checkpoint(_read(path)):
            _require_no_model(path, changes)
            model = checkpoint.load_checkpoint(path)
            if model.in_channels != 3:
                raise UserError(f"{path}: this model takes {model.in_channels}-channel images, but the dataset is RGB")
        else:
            fields = dict(values.get("model", {}))
            model = released.load_released_checkpoint(path, fields.pop("name", None), **fields)
    except ValueError as error:  # CheckpointError and UserError are
        raise UserError(str(error)) from None
    return Opened(path, model, _config(values | {"model": asdict(model.spec)}))


def _config(values: Mapping[str, Any]) -> TrialConfig:
    try:
        config = TrialConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{key}: {what}" for key, what in mistakes(error, TrialConfig))) from None
    if wrong := [f"{key}: {what}" for key, what in model_mistakes(config.model, config.data.size)]:
        raise UserError("\n".join(wrong))
    return config


def open_images(opened: Opened, split: str | None = None) -> Dataset:
    """The images of a split (`open_split`) with the classes that the network knows.

    Raises:
        DataError: they cannot be used.
        UserError: they have other classes.
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
        theirs, ours = next(pair for pair in zip(images.classes, opened.classes, strict=True) if pair[0] != pair[1])
        raise UserError(
            f"{opened.path}: trained on different classes from those in {where}: for example {ours!r} instead of {theirs!r}"
        )
    return images


def evaluate_checkpoint(
    opened: Opened,
    images: Dataset,
    transform: Transform,
    ended: Callable[[], None] = lambda: None,
    batch: int | None = None,
) -> Evaluation:
    """Exact accuracy and loss over all images, on a GPU where torch sees one; `ended` is called after each batch, of the
    recipe's size unless `batch` gives another.

    With the images, the transform and the batch of its trial, and on the same hardware, what the trial's validation gave.

    Raises:
        DataError: an image cannot be used.
    """
    loader = evaluation_loader(opened, images, transform, batch or opened.config.recipe.batch_size)
    loss, top1, top5, count = evaluate(opened.model.to(loader.device), loader, ended)
    return Evaluation(
        checkpoint=str(opened.path),
        model=opened.model.spec.name,
        epoch=opened.epoch,
        root=str(images.root),
        split=images.split,
        own_images=images.digest() in opened.data_digest.split("-") if opened.data_digest else None,
        images=count,
        classes=len(images.classes),
        top1=top1,
        top5=top5,
        loss=loss,
    )


def evaluation_loader(opened: Opened, images: Dataset, transform: Transform, batch: int) -> Loader:
    """Batches in the order of the images, where the network is to run, with the threads that the config gives."""
    cpus = opened.config.placement.cpus
    torch.set_num_threads(cpus)
    threads, where = threads_of(cpus), available_device()
    return Loader(images, transform, train=False, batch=batch, seed=opened.seed, threads=threads, device=where)


@contextmanager
def shown(images: int, batch: int, what: str = "") -> Iterator[Callable[[], None]]:
    """Shows how far an evaluation is, with each call of what it yields: a bar on a terminal, lines in a log."""
    steps, start = -(-images // batch), time.monotonic()
    if sys.stderr.isatty():
        with tqdm(total=steps, desc=what or None, unit="batch", dynamic_ncols=True, leave=False) as bar:
            yield bar.update
        return
    done, told = 0, start

    def ended() -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            told_of = f"{what}: " if what else ""
            print(f"[{told - start:4.0f} s] {told_of}{done} of {steps} batches", file=sys.stderr, flush=True)

    yield ended


@contextmanager
def reach(name: str, runs: str | Path | None) -> Iterator[tuple[Path, str | None]]:
    """The checkpoint that a name means, as a file or folder of this machine: a path, a URI, a trial's key, the id of its run
    in MLflow, or its registered model, `models:/NAME/VERSION` or `models:/NAME@ALIAS`. One in a bucket is there as long as the
    block lasts, and comes with its URI; of a folder there, it is that of the best epoch.

    `runs` is where runs are kept, as `open_workspace` takes it.

    Raises:
        UserError: there is none; or MLflow, where it is asked, cannot be used or has no such run or model.
        StorageError: the bucket cannot be used.
    """
    if not name or (is_uri(name) and not name.startswith("s3://")):
        told = f"{name.partition('://')[0]}://..." if name else "''"  # the rest may hold a password
        raise UserError(f"{told}: not a checkpoint; give {CHECKPOINT}")
    store, asked = open_runs(runs), name
    if (key := _tracked(name, runs)) is not None:
        if store.shared and not (store.folder / "checkpoints" / key).is_dir():
            raise UserError(f"{name}: the checkpoints of cell {key} are not in {store.folder}; give their folder with --runs")
        asked = key
    if not store.shared and re.fullmatch(KEY, asked) and not os.path.exists(asked):
        asked = store.uri(f"checkpoints/{asked}")
    if not is_uri(asked):
        yield checkpoint_path(asked, store.folder if store.shared else Path()), None
        return
    found = open_store(asked)
    own = ""  # the name of what the address names
    if (content := found.read(own)) is None:
        best = best_in(found)
        if best is None:
            raise UserError(f"{found}: no such file, and no folder with a readable checkpoint of a complete epoch")
        own, content = best.name, best.as_bytes()
    with tempfile.TemporaryDirectory(prefix="san-checkpoint-") as folder:
        path = Path(folder) / (own or urlsplit(asked).path.rpartition("/")[2])
        path.write_bytes(content)
        yield path, found.uri(own) if own else str(found)


def _tracked(name: str, runs: str | Path | None) -> str | None:
    """The key of the trial where it is the id of its run, or its registered model; None for any other name."""
    is_run = re.fullmatch(RUN_ID, name) and not os.path.exists(name)
    if not is_run and not name.startswith("models:/"):
        return None
    uri = open_workspace(runs).tracking_uri
    if not has_store(uri):
        raise UserError(f"{name}: no runs in {uri} yet; choose another store with --runs or MLFLOW_TRACKING_URI")
    if is_run:
        from experiments.tracking.listing import trial_key  # brings MLflow

        return trial_key(uri, name)
    from experiments.tracking.registry import model_key  # brings MLflow's models

    return model_key(uri, name)


def checkpoint_path(name: str, runs: Path) -> Path:
    """A path as it is; a trial's key, where there is no such file, as the folder of its checkpoints.

    Raises:
        UserError: there is neither.
    """
    path = Path(name)
    if not re.fullmatch(r"\w{1,40}", name) or path.exists():
        return path
    if not re.fullmatch(KEY, name):
        raise UserError(
            f"{name}: no such file, and not a key (12 characters from 0-9 and a-f); run `san runs` to list the keys"
        )
    folder = runs / "checkpoints" / name
    if not folder.is_dir():
        raise UserError(f"{name}: no such file, and no cell with this key in {runs}; run `san runs` to list the keys")
    return folder
