"""`san data`: prepares, checks and packs images."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.placement import available_cpus
from experiments.cli.options import AS_JSON, FilePath, printable
from experiments.errors import UserError

if TYPE_CHECKING:
    from pipelines import Dataset

UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

ROOT = click.argument("root", type=FilePath())
SPLITS = click.option(
    "--split", "splits", multiple=True, help="Split to read; can be given several times.  [default: train and val]"
)
LISTS = click.option("--lists", type=FilePath(), help="Folder of the image lists.  [default: ROOT]")
WORKERS = click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=available_cpus,
    help="Number of processes or, to pack, of threads.  [default: one per CPU]",
)


class Size(click.ParamType[int]):
    """A number of bytes such as 256MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+) ?([a-zA-Z]*)", value)
        if match is None or match[2] not in UNITS or int(match[1]) == 0:
            units = ", ".join(UNITS)[2:]
            self.fail(f"{value!r} is not a size; give a positive number and a unit ({units}), for example 256MiB", param, ctx)
        return int(match[1]) * UNITS[match[2]]


@click.group()
def data() -> None:
    """Prepare, check and pack image datasets.

    \b
    Example: san data check data/digits
    """


@data.command()
@click.argument("name", type=click.Choice(["cifar10", "cifar100", "digits"]))
@click.argument("folder", type=FilePath(), required=False)
@click.option(
    "--from",
    "source",
    type=FilePath(exists=True),
    help="CIFAR: the official archive (binary version), or a folder with its content, instead of a download.",
)
def prepare(name: str, folder: Path | None, source: Path | None) -> None:
    """Write CIFAR or the embedded digits as image files.

    CIFAR is downloaded unless --from is given. FOLDER defaults to the place where the profile expects the dataset.

    \b
    Example: san data prepare cifar10
    """
    from experiments.config.config import PROJECT_DIR
    from experiments.runner.progress import counting
    from pipelines import CIFAR, prepare_cifar, prepare_digits

    folder = folder or PROJECT_DIR / "data" / name
    if source is not None and name not in CIFAR:
        raise UserError("--from: the digits are embedded; leave out this option")
    try:
        click.echo(prepare_cifar(folder, name, source, counting) if name in CIFAR else prepare_digits(folder))
    except OSError as error:
        raise UserError(f"{folder}: cannot write ({error.strerror}); choose another folder") from None


@data.command()
@ROOT
@SPLITS
@LISTS
@WORKERS
@AS_JSON
def check(root: Path, splits: tuple[str, ...], lists: Path | None, workers: int, as_json: bool) -> None:
    """Decode every image and list the valid ones for training.

    Reports broken images. Training then uses the written list. For shards, verifies checksums as well and writes no list.
    The exit code is 1 if any file is broken.

    \b
    Example: san data check /data/imagenet --split train --split val
    """
    from pipelines.datasets.manifest import list_path, require_one_line, require_writable

    datasets = _found(root, splits)
    for dataset in datasets:
        if not splits:
            datasets[0].require_same_classes(dataset)
        dataset.require_several_classes()
        if not dataset.packed:
            require_one_line(dataset.paths)
            require_writable(list_path(lists or root, dataset.split))
    _require_disjoint([dataset for dataset in datasets if not dataset.packed])
    try:
        results = [_checked(dataset, lists or root, workers) for dataset in datasets]
    except KeyboardInterrupt:
        click.echo("interrupted; only fully checked splits have a new list", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(results))
    else:
        for result in results:
            for item in result["broken"]:
                click.echo(f"{printable(item['path'])}: {item['reason']}")
        for result in results:
            click.echo(printable(_sentence(result)))
    sys.exit(1 if any(result["broken"] for result in results) else 0)


def _require_disjoint(datasets: Sequence[Dataset]) -> None:
    for one, other in combinations(datasets, 2):
        if one.has_links or other.has_links:
            one.require_disjoint(other)


def _found(root: Path, splits: tuple[str, ...]) -> list[Dataset]:
    """The splits that exist as folders or as shards."""
    from pipelines import Dataset
    from pipelines.datasets.shards import has_shards

    datasets: list[Dataset] = []
    for split in splits or ("train", "val"):
        packed = has_shards(root, split)
        if (root / split).is_dir() or (splits and not packed):
            datasets.append(Dataset.scan(root, split))
        if packed:
            datasets.append(Dataset.open_shards(root, split))
    return datasets or [Dataset.scan(root, "train")]


def _checked(dataset: Dataset, lists: Path, workers: int) -> dict[str, Any]:
    from experiments.runner.progress import counting
    from pipelines import DataError
    from pipelines.datasets.check import check as check_images
    from pipelines.datasets.manifest import list_path, write_list

    broken = []
    if dataset.shards is not None:
        with counting(f"{dataset.split}: checksums of shards", None, "shards") as count:
            for name, problem in dataset.shards.damaged(workers):
                broken += [{"path": name, "reason": problem}] if problem else []
                count(1, f", {len(broken)} broken")
    with counting(dataset.split, len(dataset), "images") as count:
        images = []
        for number, checked in check_images(dataset, workers):
            images += checked
            count(number, f", {len(images)} broken")
    images.sort(key=lambda one: one.index)
    broken += [{"path": dataset.name_of(one.index), "reason": one.reason} for one in images]
    result = {"split": dataset.split, "packed": dataset.packed, "images": len(dataset), "broken": broken}
    result |= {"classes": dataset.classes, "skipped": dataset.skipped}
    if dataset.packed:
        return result | {"list": None, "digest": dataset.digest()}
    path = list_path(lists, dataset.split)
    try:
        sound = dataset.without(one.index for one in images)
    except DataError as error:
        old = f"; the existing {path} stays in use" if path.exists() else ""
        return result | {"list": None, "digest": None, "problem": f"{str(error).rstrip('.')}{old}"}
    write_list(path, sound.paths, sound.sizes)
    return result | {"list": str(path), "digest": sound.digest()}


def _sentence(result: dict[str, Any]) -> str:
    from pipelines.datasets.dataset import counted

    broken = len(result["broken"])
    images = f"{result['split']}: {result['images']} images{' in shards' if result['packed'] else ''}"
    text = f"{images}; {counted(result['classes'])}; {broken or 'none'} broken"
    if result["skipped"]:
        text += f"; skipped {result['skipped']}"
    if problem := result.get("problem"):
        return f"{text}; no list written: {problem}"
    listed = f"; valid images are listed in {result['list']}" if result["list"] else ""
    return f"{text}{listed}; digest {result['digest']}"


@data.command()
@ROOT
@click.argument("out", type=FilePath())
@SPLITS
@click.option("--shard-size", type=Size(), default="256MiB", show_default=True, help="Maximum size of a tar file.")
@LISTS
@WORKERS
@AS_JSON
def pack(
    root: Path, out: Path, splits: tuple[str, ...], shard_size: int, lists: Path | None, workers: int, as_json: bool
) -> None:
    """Pack images into WebDataset tar files (shards).

    Packs the images in a split's list, or all images in its folder if there is no list. Train on the result with
    data.source=shards. The shards appear when all are complete.

    \b
    Example: san data pack /data/imagenet /data/imagenet-shards
    """
    from experiments.runner.progress import counting
    from pipelines import Dataset
    from pipelines.datasets.pack import pack as pack_shards
    from pipelines.datasets.shards import index_path

    splits = splits or tuple(name for name in ("train", "val") if (root / name).is_dir()) or ("train",)
    results: list[dict[str, Any]] = []
    datasets = [Dataset.open(root, name, lists) for name in splits]
    _require_disjoint(datasets)
    for dataset in datasets:
        with counting(dataset.split, len(dataset), "images") as count:
            shards = []
            for packed in pack_shards(dataset, out, shard_size, workers):
                shards.append(packed)
                count(packed.images)
        shards.sort(key=lambda packed: packed.shard.name)
        results.append(
            {
                "split": dataset.split,
                "images": len(dataset),
                "bytes": sum(packed.shard.bytes for packed in shards),
                "digest": dataset.digest(),
                "index": str(index_path(out, dataset.split)),
                "kept": sum(packed.kept for packed in shards),
                "shards": [{"name": one.shard.name, "bytes": one.shard.bytes, "sha256": one.shard.sha256} for one in shards],
            }
        )
    if as_json:
        click.echo(json.dumps(results))
        return
    for result in results:
        line = (
            f"{result['split']}: {result['images']} images in {len(result['shards'])} shards "
            f"({result['kept']} already existed), "
            f"{result['bytes']} bytes, {result['index']}, digest {result['digest']}"
        )
        click.echo(printable(line))
