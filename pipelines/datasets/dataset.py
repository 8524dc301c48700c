"""A dataset: one split of an image folder in ImageNet's layout, `root/split/class/image`, or of shards made from one."""

import hashlib
import heapq
import os
import stat
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.datasets.manifest import digest, encode, list_path, read_list
from pipelines.datasets.shards import Shards, index_path, read_index
from pipelines.errors import DataError, join_names

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
"""Names of images, in any case. Other files are skipped and counted."""
SYNTHETIC_AT_MOST = 5_000_000
"""Maximum number of images, whose names take half a gigabyte."""
LISTING_THREADS = 16
"""Number of class folders that are listed at a time, because network file systems respond slowly."""


class Source(NamedTuple):
    """Location of an encoded image."""

    file: str
    offset: int = 0
    size: int = -1
    """Bytes; -1 for the rest of the file."""

    def read(self) -> bytes:
        """Reads the encoded image. Raises OSError."""
        with open(self.file, "rb") as file:
            if self.offset:
                file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split: the names, locations and classes of images."""

    root: Path
    split: str
    classes: tuple[str, ...]
    """Folder names, sorted; a label is an index into this tuple."""
    paths: tuple[str, ...] = field(repr=False)
    """Files relative to `root`, sorted by class and name. Packed images keep their original names."""
    labels: Sequence[int] = field(repr=False)
    """Index of the class for each path."""
    sizes: Sequence[int] = field(repr=False)
    """Bytes of each file when it was listed."""
    offsets: Sequence[int] = field(default=(), repr=False)
    """Start of each packed image in `shards`."""
    shards: Shards | None = field(default=None, repr=False, compare=False)
    is_synthetic: bool = False
    """The loader generates the images."""
    listed_in: Path | None = field(default=None, compare=False)
    """The image list, if there is one."""
    skipped: str = field(default="", compare=False)
    """The number and kind of the files that `scan` left out, such as `2 .gif, 1 .txt`."""
    has_links: bool = field(default=False, compare=False)
    """Whether `scan` found links or files with several names: then another split may have the same files."""

    @classmethod
    def open(cls, root: Path | str, split: str, lists: Path | str | None = None) -> "Dataset":
        """Opens the images in the list `<split>.txt` in the folder `lists` or in `root`; without a list, the result of `scan`.

        Raises:
            DataError: as `scan`; or the folder `lists` is missing, or the list is damaged or does not match the class folders.
        """
        _require_name(split)
        if lists is not None and not Path(lists).is_dir():
            raise DataError(f"{lists}: no such folder of image lists; create it with `san data check {root} --lists {lists}`")
        for folder in (root if lists is None else lists, root):
            path = list_path(Path(folder), split)
            if os.path.lexists(path):  # A broken link is an error.
                return cls._listed(Path(root), split, path)
        return cls.scan(root, split)

    @classmethod
    def scan(cls, root: Path | str, split: str) -> "Dataset":
        """Lists the images (`SUFFIXES`) in `root/split/<class>/` and its subfolders, except names that begin with a dot.

        Links are followed, except to folders above them, but a file that has several names counts once, under the one with the
        fewest links. What is left out is counted in `skipped`.

        Raises:
            DataError: the folder or the split cannot be read, there are no class folders, or one contains no images.
        """
        _require_name(split)
        root = Path(root)
        with _readable(root):
            folder = _split_folder(root, split)
            names = _class_names(folder)
            with ThreadPoolExecutor(LISTING_THREADS) as pool:
                by_class = dict(zip(names, pool.map(_class_files, [folder / name for name in names]), strict=True))
            links_inside = any(files.links for files in by_class.values())
            again = _remove_further_names(folder, by_class) if links_inside else 0
            has_links = links_inside or folder.is_symlink()
        _require_images(folder, by_class)
        images = {name: sorted(files.images) for name, files in by_class.items()}
        paths = tuple(f"{split}/{name}/{file}" for name, listed in images.items() for file, _ in listed)
        labels = array("q", chain.from_iterable(repeat(label, len(listed)) for label, listed in enumerate(images.values())))
        sizes = array("q", (size for listed in images.values() for _, size in listed))
        beside = Counter({"files beside the class folders": _files_in(folder)})
        skipped = _skipped([*(files.others for files in by_class.values()), beside], again)
        return cls(root, split, tuple(images), paths, labels, sizes, skipped=skipped, has_links=has_links)

    @classmethod
    def open_shards(cls, root: Path | str, split: str) -> "Dataset":
        """Opens the packed images of the index `root/<split>.index`, with the order and names of the original folder.

        Raises:
            DataError: the index is missing or damaged, or a shard is missing or has a different size.
        """
        _require_name(split)
        root = Path(root)
        path = index_path(root, split)
        if not os.path.lexists(path):
            raise DataError(f"{root}: no shards of {split!r}; expected {path}, in a folder that `san data pack` wrote")
        index = read_index(path)
        classes, labels = _classes_of(path, split, index.paths)
        shards = Shards(root, index.shards)
        return cls(root, split, classes, index.paths, labels, index.sizes, index.offsets, shards)

    @classmethod
    def of_files(cls, files: Sequence[Path | str]) -> "Dataset":
        """A dataset of images in any folders, whose class is not known. Missing files are found when they are read."""
        paths = [os.path.abspath(file) for file in files]
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = tuple(os.path.relpath(path, root) for path in paths)
        zeros = array("q", bytes(8 * len(paths)))
        return cls(Path(root), "", ("",), names, zeros, zeros)

    @classmethod
    def synthetic(cls, split: str, classes: int, per_class: int) -> "Dataset":
        """`classes` classes with `per_class` generated images each. Raises DataError if they are too many."""
        if classes * per_class > SYNTHETIC_AT_MOST:
            raise DataError(
                f"{classes} classes with {per_class} synthetic images each make {classes * per_class} images; "
                f"the maximum is {SYNTHETIC_AT_MOST}; lower data.synthetic_classes or data.synthetic_per_class"
            )
        names = tuple(f"{label:04d}" for label in range(classes))
        paths = tuple(f"synthetic/{split}/{name}/{index}" for name in names for index in range(per_class))
        labels = array("q", chain.from_iterable(repeat(label, per_class) for label in range(classes)))
        return cls(Path("synthetic"), split, names, paths, labels, array("q", bytes(8 * len(paths))), is_synthetic=True)

    @classmethod
    def _listed(cls, root: Path, split: str, path: Path) -> "Dataset":
        paths, sizes = read_list(path)
        classes, labels = _classes_of(path, split, paths)
        with _readable(root):
            folder = _split_folder(root, split)
            existing = _class_names(folder)
        gaps = (("the list", set(existing) - set(classes)), (folder, set(classes) - set(existing)))
        lacks = [f"{where} has no {join_names(lost)}" for where, lost in gaps if lost]
        if lacks:
            raise DataError(
                f"{path}: this list does not match {folder}: {' and '.join(lacks)}; use the folder that the list describes, "
                "or regenerate the list with `san data check`"
            )
        return cls(root, split, classes, paths, labels, sizes, listed_in=path)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def packed(self) -> bool:
        """Whether the images are in tar shards (use `encoded`) instead of files."""
        return self.shards is not None

    def encoded(self, index: int) -> NDArray[np.uint8]:
        """Reads a packed image.

        Raises:
            DataError: the shard cannot be read or is too short.
        """
        assert self.shards is not None, "only packed images are read by the dataset"
        return self.shards.read(self.offsets[index], self.sizes[index])

    def prefetch(self, indices: Iterable[int]) -> None:
        """Prefetches packed images from the disk."""
        assert self.shards is not None, "only packed images are read by the dataset"
        for index in indices:
            self.shards.prefetch(self.offsets[index], self.sizes[index])

    def source(self, index: int) -> Source:
        """Location of an image."""
        if self.shards is None:
            return Source(str(self.root / self.paths[index]))
        file, offset = self.shards.find(self.offsets[index])
        return Source(str(file), offset, self.sizes[index])

    def name_of(self, index: int) -> str:
        """For messages: the path of an image, or its shard, its name in the shard and its original name."""
        if self.shards is None:
            return str(self.root / self.paths[index])
        offset = self.offsets[index]
        return f"{self.shards.find(offset)[0]}: {self.shards.member(offset)} ({self.paths[index]})"

    def first(self, per_class: int, seed: int = 0) -> "Dataset":
        """A dataset with `per_class` (>= 1) images of each class: those with the smallest hash of seed and name.

        The name is `class/image`, without the folder of the split, so folders, lists and shards give the same choice. A smaller
        choice is part of a larger one, and adding or removing an image changes at most one image of the choice.

        Raises:
            DataError: a class has fewer images.
        """
        self._require_per_class(per_class, kept=0)
        return self.only(self._first(per_class, seed))

    def _first(self, per_class: int, seed: int) -> NDArray[np.int64]:
        labels = np.asarray(self.labels)
        order = np.lexsort((_hashes(self.paths, seed), labels))
        place_in_class = np.arange(len(self)) - np.searchsorted(labels[order], labels[order])
        return order[place_in_class < per_class]

    def hold_out(self, per_class: int, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Splits the dataset into images to train on, and `first(per_class, seed)`, the paper's val-split.

        Raises:
            DataError: no image of a class is left to train on.
        """
        self._require_per_class(per_class, kept=1)
        held = self._first(per_class, seed)
        return self.only(np.delete(np.arange(len(self)), held)), self.only(held)

    def without(self, indices: Iterable[int]) -> "Dataset":
        """A dataset without some images.

        Raises:
            DataError: no image of a class is left.
        """
        left = self.only(np.delete(np.arange(len(self)), np.array(list(indices), np.int64)))
        kept = set(left.labels)
        empty = {name for label, name in enumerate(self.classes) if label not in kept}
        if empty:
            raise DataError(
                f"{self.root / self.split}: no readable image left in {join_names(empty)}; add images that can be decoded, "
                "or remove the class from all splits"
            )
        return left

    def _require_per_class(self, per_class: int, kept: int) -> None:
        """Checks that each class has `per_class` images, and `kept` more."""
        counts = Counter(self.labels)
        small = {name: counts[label] for label, name in enumerate(self.classes) if counts[label] < per_class + kept}
        if small:
            listed = join_names({f"{name} has {count}" for name, count in small.items()})
            left = f" plus {kept} to keep" if kept else ""
            most = min(small.values()) - kept
            remedy = f"use at most {most}, or add images" if most > 0 else "add images, or remove the class from all splits"
            raise DataError(f"{self.root / self.split}: too few images for {per_class} per class{left}: {listed}; {remedy}")

    def only(self, indices: Iterable[int]) -> "Dataset":
        """A dataset with some of the images, in their original order."""
        chosen = np.sort(np.array(indices if isinstance(indices, np.ndarray) else list(indices), np.int64))

        def of(column: Sequence[int]) -> "array[int]":
            return array("q", np.asarray(column, np.int64)[chosen].tobytes())

        paths = tuple(self.paths[index] for index in chosen)
        offsets = of(self.offsets) if self.packed else ()
        return replace(self, paths=paths, labels=of(self.labels), sizes=of(self.sizes), offsets=offsets)

    def digest(self) -> str:
        """16 hexadecimal digits of a hash of all relative names and listed sizes; does not access the disk.

        Packed, listed and scanned datasets with the same images have the same digest.
        """
        return digest(self.paths, self.sizes)

    def require_disjoint(self, other: "Dataset") -> None:
        """Raises DataError if `other` has a file of this split, under any name."""
        mine, others = _files_on_disk(self), _files_on_disk(other)
        if shared := sorted((mine[file], others[file]) for file in mine.keys() & others.keys()):
            (here, there), number = shared[0], f"{len(shared)} image{'s'[: len(shared) > 1]}"
            raise DataError(
                f"{self.split} and {other.split} share {number}, such as {here}, which is {there}; remove the links, or the "
                "further names of the files, from one of them"
            )

    def require_several_classes(self) -> None:
        """Raises DataError for a single class: the folders may be one level deeper than they should."""
        if len(self.classes) > 1:
            return
        (only,), split = self.classes, self.root / self.split
        inside = sorted(entry.name for entry in (split / only).iterdir() if entry.is_dir()) if (split / only).is_dir() else []
        hint = f"; if the folders in it are the classes ({join_names(inside)}), move them to {split}" if inside else ""
        raise DataError(f"{split}: a single class, {only}, but a network needs at least two{hint}")

    def require_same_classes(self, other: "Dataset") -> None:
        """Raises DataError unless `other` has the same classes."""
        if self.classes == other.classes:
            return
        classes, other_classes = set(self.classes), set(other.classes)
        gaps = ((other, classes - other_classes), (self, other_classes - classes))
        if len({unicodedata.normalize("NFC", name) for name in classes ^ other_classes}) < len(classes ^ other_classes):
            same = join_names({unicodedata.normalize("NFC", name) for name in classes - other_classes})
            raise DataError(
                f"{self.root / self.split} and {other.root / other.split} spell {same} with different characters, such as "
                "one or two for an accented letter (Unicode NFC and NFD); rename the folders of one of them"
            )
        lacks = [f"{data.root / data.split} has no {join_names(lost)}" for data, lost in gaps if lost]
        raise DataError(
            f"both splits must have the same class folders, but {' and '.join(lacks)}; "
            "add the missing folders or remove the others"
        )


def _files_on_disk(dataset: Dataset) -> dict[object, str]:
    """The path of each image by its file on the disk."""
    found = dict[object, str]()
    for path in dataset.paths:
        with suppress(OSError):  # a list can be older than the folder
            status = os.stat(dataset.root / path)
            found[status.st_dev, status.st_ino] = path
    return found


def counted(classes: Sequence[str]) -> str:
    """The number of classes and their first names, for people: `10 classes: airplane, bird, cat, ...`."""
    number = "1 class" if len(classes) == 1 else f"{len(classes):,} classes"
    return f"{number}: {', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"


def _hashes(paths: Iterable[str], seed: int) -> NDArray[np.uint64]:
    """A number for each path `split/class/image` that depends only on the seed, the class and the name of the image."""
    names = (f"{seed}/{path.partition('/')[2]}" for path in paths)
    return np.frombuffer(b"".join([hashlib.sha256(encode(name)).digest()[:8] for name in names]), "<u8")


def _classes_of(listing: Path, split: str, paths: Sequence[str]) -> tuple[tuple[str, ...], "array[int]"]:
    """The sorted classes of paths `split/class/.../image`, and the label of each path."""
    numbers: dict[str, int] = {}
    first_seen = np.array([numbers.setdefault("/".join(path.split("/", 2)[:-1]), len(numbers)) for path in paths])
    folders = sorted(numbers)
    if {folder.count("/") for folder in folders} != {1} or len({folder.split("/")[0] for folder in folders}) > 1:
        raise DataError(
            f"{listing}: expected rows of the form <folder>/<class>/<image>, all with one folder; regenerate the list"
        )
    if (of := folders[0].split("/")[0]) != split:
        raise DataError(
            f"{listing}: lists images of {of}/, but {split} needs images of {split}/; the list belongs to another split; "
            "regenerate it"
        )
    labels = np.argsort([numbers[folder] for folder in folders])[first_seen]
    return tuple(folder.split("/")[1] for folder in folders), array("q", labels.tobytes())


def _require_name(split: str) -> None:
    if split in ("", ".", "..") or set(split) & set("/\n"):
        raise DataError(f"{split!r} is not a valid split; expected the name of a folder of classes, such as train or val")


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    """Turns an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{root}: cannot read this data folder ({error.strerror}: {error.filename}); "
            "change its permissions or use another data folder"
        ) from None


def _split_folder(root: Path, split: str) -> Path:
    if not root.is_dir():
        raise DataError(
            f"{root}: no such data folder; expected {root}/{split}/<class>/<image>; set data.root to the folder that "
            f"contains {split}/"
        )
    folder = root / split
    if not folder.is_dir():
        if (root / f"{split}.index").is_file():
            raise DataError(f"{root}: contains shards of {split}; set data.source=shards")
        hold_out = ", hold out training images with data.split=val-split data.val_split_per_class=N" if split == "val" else ""
        raise DataError(
            f"{root}: this data folder has no folder {split}/; expected {folder}/<class>/<image>; create this folder, "
            f"provide a list {split}.txt{hold_out}, or use another data folder"
        )
    return folder


def _class_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    lost = {entry.name for entry in visible if not os.path.exists(entry.path)}
    if lost:
        raise DataError(f"{folder}: broken links: {join_names(lost)}; repair them (is a disk missing?) or remove them")
    names = sorted(entry.name for entry in visible if entry.is_dir())
    if not names:
        raise DataError(
            f"{folder}: no class folders; expected {folder}/<class>/<image>; "
            "put the images of each class into a separate folder"
        )
    return names


def _files_in(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(not entry.is_dir() and not entry.name.startswith(".") for entry in entries)


def list_images(folder: Path) -> tuple[list[str], str]:
    """The images in a folder and its subfolders, sorted, each once; and what was left out, as in `Dataset.skipped`.

    Raises:
        DataError: a folder cannot be read.
    """
    with _readable(folder):
        files = _class_files(folder)
        again = _remove_further_names(folder, {"": files}) if files.links else 0
    return sorted(name for name, _ in files.images), _skipped([files.others], again)


@dataclass(slots=True)
class _ClassFiles:
    """The files of a class."""

    images: list[tuple[str, int]]
    """Names and sizes in bytes. Names of files in subfolders contain the subfolder."""
    links: dict[str, int]
    """The number of symbolic links in the paths of images that may have other names, too: linked ones and hard links."""
    others: Counter[str]
    """The number of other files by suffix."""


def _class_files(folder: Path) -> _ClassFiles:
    """Lists the folder of a class. Each folder in it is listed once, under a path with few links."""
    files, visited = _ClassFiles([], {}, Counter()), set[tuple[int, int]]()
    real = os.path.realpath(folder)
    waiting = [(int(folder.is_symlink()), "")]
    while waiting:
        links, inside = heapq.heappop(waiting)
        status = os.stat(folder / inside)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder / inside) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name, links_of_entry = inside + entry.name, links + entry.is_symlink()
                if reason := _left_out(entry, real):
                    files.others[reason] += 1
                elif entry.is_dir():
                    heapq.heappush(waiting, (links_of_entry, f"{name}/"))
                else:
                    status = entry.stat()
                    files.images.append((name, status.st_size))
                    if links_of_entry or status.st_nlink > 1:
                        files.links[name] = links_of_entry
    return files


def _left_out(entry: os.DirEntry[str], folder: str) -> str:
    """Why an entry is skipped; empty for images and folders. `folder` is the real path of the class folder."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        return "broken links"
    if entry.is_symlink() and folder.startswith(os.path.join(os.path.realpath(entry.path), "")):
        return "links to folders above"
    if entry.is_dir():
        return ""
    if not entry.name.lower().endswith(SUFFIXES):
        return os.path.splitext(entry.name)[1].lower() or "without suffix"
    return "" if stat.S_ISREG(entry.stat().st_mode) else "special files"


def _remove_further_names(folder: Path, by_class: dict[str, _ClassFiles]) -> int:
    """Leaves one name of each file, with as few links as possible; returns the number of removed names."""
    images = [(one.links.get(file, 0), name, file, size) for name, one in by_class.items() for file, size in one.images]
    kept: dict[tuple[int, int], tuple[str, str, int]] = {}
    for _, name, file, size in sorted(images):
        status = os.stat(folder / name / file)
        kept.setdefault((status.st_dev, status.st_ino), (name, file, size))
    for one in by_class.values():
        one.images.clear()
    for name, file, size in kept.values():
        by_class[name].images.append((file, size))
    return len(images) - len(kept)


def _skipped(others: Iterable[Counter[str]], again: int) -> str:
    counts = sum(others, Counter[str]())
    parts = [f"{number:,} {kind}" for kind, number in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return ", ".join([*parts, *([f"{again:,} further names of the same files (links)"] if again else [])])


def _require_images(folder: Path, by_class: dict[str, _ClassFiles]) -> None:
    empty = [name for name, one in by_class.items() if not one.images]
    if empty:
        others = _skipped([by_class[name].others for name in empty], 0)
        links = any(by_class[name].links for name in empty)
        raise DataError(
            f"{folder}: {len(empty)} class {'folder' if len(empty) == 1 else 'folders'} without an image "
            f"{'of its own (links lead to those of other classes) ' if links else ''}({', '.join(SUFFIXES)}): "
            f"{join_names(empty)}; {f'other files there: {others}; ' if others else ''}add images or remove the folders"
        )
