"""CIFAR-10 and CIFAR-100 as image files in ImageNet's layout, from the official archives.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import gzip
import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.datasets.prepared import is_prepared, unfinished_folder
from pipelines.errors import DataError

Counting = Callable[[str, int | None, str], AbstractContextManager[Callable[[int], None]]]
"""Displays the progress of a task with this name, total (if known) and unit. The context's function adds to the count."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The official binary version of a dataset."""

    url: str
    md5: str
    classes: str
    """The file with the names of the classes."""
    splits: dict[str, str]
    """The split of each file of images, by its name."""
    label_bytes: int
    """Bytes before the pixels of an image; the last one is the class."""


CIFAR = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "batches.meta.txt",
        {f"data_batch_{number}.bin": "train" for number in range(1, 6)} | {"test_batch.bin": "val"},
        1,
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "fine_label_names.txt",
        {"train.bin": "train", "test.bin": "val"},
        2,
    ),
}
PIXELS = 3 * 32 * 32
"""Bytes of an image's pixels, one color after the other."""


def prepare_cifar(root: Path, name: str, source: Path | None, counting: Counting) -> Path:
    """Writes `root/{train,val}/<class>/*` and returns `root`, or returns at once if the folder exists.

    The official archive is downloaded unless `source` is given: that archive, or a folder with its content. `name` is one of
    `CIFAR`. The folder appears only when it is complete.

    Raises:
        DataError: the folder exists with other content, the download failed or is damaged, or `source` has another content.
    """
    if is_prepared(root):
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".cifar-", dir=root.parent) as downloads, unfinished_folder(root) as folder:
        source = source or _downloaded(CIFAR[name], Path(downloads))
        with counting(f"write {root}", None, "images") as count:
            _write(source, folder, name, count)
    return root


def _downloaded(archive: Archive, folder: Path) -> Path:
    path = folder / archive.url.rpartition("/")[2]
    try:
        torch.hub.download_url_to_file(archive.url, str(path))
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{archive.url}: cannot download ({reason}); run this command again, or download the file elsewhere and give "
            "it with --from FILE"
        ) from None
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "md5").hexdigest() != archive.md5:
            raise DataError(f"{archive.url}: the downloaded file was damaged; run this command again")
    return path


def _read(source: Path, names: Collection[str]) -> dict[str, bytes]:
    """The files with these names anywhere in a folder or an archive."""
    if source.is_dir():
        return {path.name: path.read_bytes() for path in source.rglob("*") if path.name in names and path.is_file()}
    found = {}
    try:
        with tarfile.open(source) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name in names and (file := tar.extractfile(member)) is not None:
                    found[name] = file.read()
    except (EOFError, KeyError, tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{source}: cannot read this archive ({error}); expected a tar file; download it again, or give another one"
        ) from None
    return found


def _write(source: Path, root: Path, name: str, count: Callable[[int], None]) -> None:
    archive, size = CIFAR[name], CIFAR[name].label_bytes + PIXELS
    expected = {*archive.splits, archive.classes}
    found = _read(source, expected)
    if lacking := sorted(expected - found.keys()):
        raise DataError(
            f"{source}: not the binary version of {name}, or not all of it: it has no {', '.join(lacking)}; give the official "
            "archive, or use a folder with train/CLASS and val/CLASS as it is, with data.root=FOLDER"
        )
    classes = found[archive.classes].decode(errors="replace").split()
    for file, split in archive.splits.items():
        labels = np.frombuffer(found[file], np.uint8)[archive.label_bytes - 1 :: size]
        if not found[file] or len(found[file]) % size or labels.max() >= len(classes):
            raise DataError(
                f"{source}: {file} or {archive.classes} is damaged or from another version; give the official archive"
            )
        rows = np.frombuffer(found[file], np.uint8).reshape(-1, size)
        count(_write_images(rows, root / split, file.removesuffix(".bin"), classes))


def _write_images(rows: NDArray[np.uint8], folder: Path, stem: str, classes: list[str]) -> int:
    """Writes rows of labels and pixels as PNG files into the folders of their classes; returns their number."""
    from PIL import Image

    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        pixels_HWC = row[-PIXELS:].reshape(3, 32, 32).transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
        image.save(folder / classes[row[-PIXELS - 1]] / f"{stem}_{number:05d}.png")
    return len(rows)
