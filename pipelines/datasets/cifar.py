"""CIFAR-10 and CIFAR-100 as image files in ImageNet's layout, from the official archives or from files that are already there.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import gzip
import hashlib
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.datasets.dataset import list_images
from pipelines.datasets.prepared import has_splits, is_prepared, unfinished_folder
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
    label_bytes: int
    """Bytes before the pixels of an image; the last one is the class."""


CIFAR = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "batches.meta.txt", 1
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "fine_label_names.txt",
        2,
    ),
}
PIXELS = 3 * 32 * 32
"""Bytes of an image's pixels, one color after the other."""
SPLITS = {"data_batch_1": "train", "train": "train", "test_batch": "val", "test": "val"} | {
    f"data_batch_{number}": "train" for number in range(2, 6)
}
"""The split of each file of images, by its name without `.bin`."""


def prepare_cifar(root: Path, name: str, source: Path | None, counting: Counting) -> Path:
    """Writes `root/{train,val}/<class>/*` and returns `root`, or returns at once if the folder exists.

    The official archive is downloaded next to `root` unless `source` is given: that archive or another one with class folders
    `train/<class>`, `val/<class>`, or a folder with the content of either. `name` is one of `CIFAR`. The folder appears only
    when it is complete.

    Raises:
        DataError: the folder exists with other content, the download failed or is damaged, or `source` has another content.
    """
    if is_prepared(root):
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    archive = source or _downloaded(CIFAR[name], root.parent)
    with unfinished_folder(root) as folder:
        with counting(f"write {root}", None, "images") as count:
            if has_splits(archive):
                _copy(archive, folder, count)
            else:
                _write(archive, folder, name, count)
        if not has_splits(folder):
            raise DataError(f"{archive}: neither the binary version of {name} nor folders train/CLASS and val/CLASS")
    if source is None:
        archive.unlink()
    return root


def _downloaded(archive: Archive, folder: Path) -> Path:
    path = folder / archive.url.rpartition("/")[2]
    if not path.exists():
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
            path.unlink()
            raise DataError(f"{archive.url}: the downloaded file is damaged and was deleted; run this command again")
    return path


def _copy(source: Path, root: Path, count: Callable[[int], None]) -> None:
    for split in ("train", "val"):
        for folder in sorted(path for path in (source / split).glob("*") if path.is_dir()):
            for name in list_images(folder)[0]:
                copy = root / split / folder.name / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / name, copy)
                count(1)


@contextmanager
def _files_in(source: Path) -> Iterator[Iterator[tuple[str, Callable[[], bytes]]]]:
    """The names of all files in a folder or an archive, and functions that read them. Links in an archive are files, too."""
    if source.is_dir():
        paths = (path for path in sorted(source.rglob("*")) if path.is_file())
        yield ((str(path.relative_to(source)), path.read_bytes) for path in paths)
        return
    try:
        with tarfile.open(source) as tar:
            yield _members(tar)
    except (EOFError, KeyError, tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{source}: cannot read this archive ({error}); expected a tar file; download it again, or give another one"
        ) from None


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for member in tar:
        if not member.isdir():
            yield member.name, partial(_read, tar, member)
    # An archive ends with blocks of zeros, but tarfile also ends, without a message, at a header that is cut off or damaged.
    assert tar.fileobj is not None
    has_read_end = tar.fileobj.tell() == tar.offset + tarfile.BLOCKSIZE  # unless a link was read meanwhile
    if not has_read_end:
        tar.fileobj.seek(tar.offset)
    block = tar.fileobj.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0") or (not block and not has_read_end):
        raise tarfile.ReadError("unexpected end of data")


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return b"" if file is None else file.read()


def _write(source: Path, root: Path, name: str, count: Callable[[int], None]) -> None:
    """Writes the images of the official binary files, and files `.../{train,val}/<class>/...` as they are."""
    archive = CIFAR[name]
    names: list[str] = []
    with _files_in(source) as files:
        for file, read in files:
            inner = PurePosixPath(file)
            splits = [place for place, part in enumerate(inner.parts) if part in ("train", "val")]
            if inner.name == archive.classes:
                names = read().decode().split()
            elif inner.suffix == ".bin" and inner.stem in SPLITS:
                content = read()
                if len(content) % (archive.label_bytes + PIXELS):
                    raise DataError(f"{source}: {file} is not from the binary version of {name}; give that archive")
                rows = np.frombuffer(content, np.uint8).reshape(-1, archive.label_bytes + PIXELS)
                count(_write_images(rows, inner.stem, root))
            elif splits and len(inner.parts) >= splits[0] + 3:
                if ".." in inner.parts:
                    raise DataError(f"{source}: {file} would be written outside of {root}; give another archive")
                copy = root.joinpath(*inner.parts[splits[0] :])
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(read())
                count(1)
    for number, class_name in enumerate(names):
        for split in ("train", "val"):
            if (numbered := root / split / str(number)).is_dir():
                numbered.rename(root / split / class_name)


def _write_images(rows: NDArray[np.uint8], stem: str, root: Path) -> int:
    """Writes rows of labels and pixels as PNG files into folders named by the number of their class; returns their number."""
    from PIL import Image

    for number, row in enumerate(rows):
        folder = root / SPLITS[stem] / str(row[-PIXELS - 1])
        folder.mkdir(parents=True, exist_ok=True)
        pixels_HWC = row[-PIXELS:].reshape(3, 32, 32).transpose(1, 2, 0)
        Image.fromarray(np.ascontiguousarray(pixels_HWC)).save(folder / f"{stem}_{number:05d}.png")
    return len(rows)
