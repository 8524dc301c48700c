"""The images of a trial: opens the datasets, and creates the transforms and the loaders."""

from __future__ import annotations

import dataclasses
import functools
import platform
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.config.config import PROJECT_DIR, DataConfig, TrialConfig, too_many_parts
from experiments.errors import UserError
from pipelines import CIFAR, DataError, Dataset, Loader, Transform, prepare_digits
from pipelines.loader import decoding_threads

CPU = torch.device("cpu")


@functools.cache
def open_data(config: DataConfig) -> tuple[Dataset, Dataset]:
    """The training and validation images. A missing embedded dataset is written first.

    Raises:
        DataError: a folder is missing, empty or has other classes, or a class is too small; the message names it.
    """
    _require_fitting(config)
    if config.source == "synthetic":
        made_up = functools.partial(Dataset.synthetic, classes=config.synthetic_classes, per_class=config.synthetic_per_class)
        return made_up("train"), made_up("val")
    root, lists = _folders(config)
    held_out = config.val_split_per_class if config.split == "val-split" else None
    train = _open_split(config.source, root, lists, "train")
    val = train if held_out is not None else _open_split(config.source, root, lists, "val")
    train.require_several_classes()
    train.require_same_classes(val)
    if held_out is None and (train.has_links or val.has_links):
        train.require_disjoint(val)
    try:
        key = "data.val_split_per_class"
        if held_out is not None:
            train, val = train.hold_out(held_out, config.val_split_seed)
        key = "data.train_per_class"
        if config.train_per_class is not None:
            train = train.first(config.train_per_class)
        key = "data.val_per_class"
        if config.val_per_class is not None:
            val = val.first(config.val_per_class)
    except DataError as error:
        raise DataError(f"{key}: {error}") from None
    return train, val


def _require_fitting(config: DataConfig) -> None:
    """Raises `DataError` for a key that the source does not use."""
    if config.lists is not None and config.source != "folder":
        raise DataError(f"data.lists: used only with data.source=folder, not {config.source}; leave out data.lists")
    for key in ("train_per_class", "val_per_class"):
        if getattr(config, key) is not None and config.source == "synthetic":
            raise DataError(
                f"data.{key}: not used with data.source=synthetic; set data.{key}=null and data.synthetic_per_class=N"
            )


def _folders(config: DataConfig) -> tuple[Path, Path | None]:
    """The folder of the images and, if it is another one, the folder of their lists."""
    if config.folder is None:
        raise DataError(
            f"data.root: missing; data.source={config.source} requires the folder of the images; add data.root=FOLDER"
        )
    return config.folder, None if config.lists is None else PROJECT_DIR / config.lists


def open_split(config: DataConfig, name: str | None = None) -> Dataset:
    """A split to evaluate on; by default, the one that a trial with this config validates on.

    `train` is the split that such a trial trains on, and `val-split` the one held out of it. Any other name, such as `val`,
    is a folder, a list or shards in `root`; the other splits need not exist.

    Raises:
        DataError: as `open_data`.
    """
    if name is None and config.val_per_class is not None:
        return open_data(config)[1]
    if name == "val-split" and config.val_split_per_class is None:
        raise DataError("data.val_split_per_class: missing; set the number of images per class to hold out")
    name = name or ("val" if config.split == "val-original" else config.split)
    if name == "train":
        return open_data(config)[0]
    if name == "val-split":
        return open_data(config.model_copy(update={"split": name}))[1]
    _require_fitting(config)
    if config.source == "synthetic":
        return Dataset.synthetic(name, config.synthetic_classes, config.synthetic_per_class)
    root, lists = _folders(config)
    return _open_split(config.source, root, lists, name)


@functools.cache
def _open_split(source: str, root: Path, lists: Path | None, name: str) -> Dataset:
    if source == "shards":
        return Dataset.open_shards(root, name)
    try:
        if root.name in CIFAR and _is_missing(root):
            raise DataError(f"{root}: no such folder; write it with `san data prepare {root.name}`")
        if source == "digits":
            _write_missing_digits(root)
        return Dataset.open(root, name, lists)
    except OSError as error:
        where = f"{error.strerror}: {error.filename}"
        raise DataError(f"{root}: cannot read or write images ({where}); set another data.root") from None


def _write_missing_digits(root: Path) -> None:
    try:
        prepare_digits(root)
    except DataError as error:
        raise DataError(f"data.source=digits: {error}; for your own images, use `--profile folder`") from None


def notes_on(config: DataConfig) -> list[str]:
    """Notes on a folder of images, for people: the lists in use and skipped files."""
    if config.source != "folder":
        return []
    splits = dict.fromkeys(dataset.split for dataset in open_data(config))
    opened = [_open_split(config.source, *_folders(config), name) for name in splits]
    skipped = [f"{one.split}: skipped {one.skipped}" for one in opened if one.skipped]
    listed = [f"images listed in {one.listed_in}; list new ones with `san data check`" for one in opened if one.listed_in]
    return skipped + listed


def without_writing(config: DataConfig) -> DataConfig:
    """The same images for a command that must not write: a missing embedded dataset is in a temporary folder, which is deleted
    at the end of the process."""
    if config.source != "digits" or config.folder is None or not _is_missing(config.folder):
        return config
    return config.model_copy(update={"root": str(prepare_digits(Path(_temporary().name, "digits")))})


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="san-plan-")


def _is_missing(root: Path) -> bool:
    return not (root.is_dir() and any(root.iterdir()))


@functools.cache
def data_digest(config: DataConfig) -> str:
    """Digests of the names and sizes of the training and validation images."""
    return "-".join(dataset.digest() for dataset in open_data(config))


def loaders(config: TrialConfig, seed: int, rank: int, world: int, device: torch.device = CPU) -> tuple[Loader, Loader]:
    """The training and validation loaders of one worker, whose batches go to `device`.

    Raises:
        DataError: images, transform or batch cannot be used.
        UserError: a step has fewer images than `recipe.grad_accum_steps`.
    """
    train, val = (
        Loader(
            dataset,
            transform(config.data),
            train=is_train,
            # Larger batches than in training may not fit into the GPU, not even without gradients.
            batch_size=config.recipe.batch_size if is_train else config.recipe.images_at_once(),
            rank=rank,
            world_size=world,
            seed=seed,
            threads=decoding_threads(config.resources.cpus),
            device=device,
        )
        for dataset, is_train in zip(_broadcast_data(config.data, rank, world, device), (True, False), strict=True)
    )
    if config.recipe.batch_size > len(train.dataset):
        most = f"the number of training images, {len(train.dataset)}"
        raise UserError(f"recipe.batch_size: must be at most {most}, not {config.recipe.batch_size}")
    smallest = len(train.dataset) // train.steps // world
    if smallest < config.recipe.grad_accum_steps:
        raise UserError(f"recipe.grad_accum_steps: {too_many_parts(config, smallest)}")
    return train, val


def _broadcast_data(config: DataConfig, rank: int, world: int, device: torch.device) -> tuple[Dataset, Dataset]:
    """`open_data` by the first worker for all, so that a million files are listed only once."""
    # Every node writes missing digits itself.
    if world == 1 or config.source not in ("folder", "shards") or not dist.is_initialized():
        return open_data(config)
    opened: list[tuple[Dataset, Dataset] | DataError | None] = [None]
    if rank == 0:
        try:
            opened = [open_data(config)]
        except DataError as error:
            opened = [error]
    dist.broadcast_object_list(opened, device=device)
    if isinstance(opened[0], DataError):
        raise opened[0]
    assert opened[0] is not None
    root = opened[0][0].root
    if not root.is_dir():
        raise DataError(
            f"{root}: no such folder on node {platform.node()}; make the images available at the same path on every node"
        )
    return opened[0]


def transform(config: DataConfig) -> Transform:
    """The transform of a configuration, whose keys have the names of its fields."""
    return Transform(**config.model_dump(include={field.name for field in dataclasses.fields(Transform)}))
