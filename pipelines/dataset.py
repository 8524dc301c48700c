"""What a data set is: a split of an image folder in ImageNet's layout, `root/split/class/image`."""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipelines.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png")
NAMED_AT_MOST = 10
"""Classes spelled out when two splits disagree; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split of an image folder: a list of files with a class each. Holds names only, no images."""

    root: Path
    split: str
    classes: tuple[str, ...]
    """Folder names, sorted; a label is an index into this tuple."""
    paths: tuple[str, ...] = field(repr=False)
    """Files relative to `root`, in class order, then by name."""
    labels: tuple[int, ...] = field(repr=False)
    """The class of each path."""

    @classmethod
    def scan(cls, root: Path | str, split: str) -> "Dataset":
        """Lists `root/split/<class>/*` (JPEG and PNG, any case); names that begin with a dot are passed over.

        Raises:
            DataError: root or split is missing, there is no class folder, or some hold no image.
        """
        root = Path(root)
        folder = _split_folder(root, split)
        files = {name: _images(folder / name) for name in _class_names(folder)}
        _require_images(folder, files)
        paths = [f"{split}/{name}/{file}" for name, listed in files.items() for file in listed]
        labels = [label for label, listed in enumerate(files.values()) for _ in listed]
        return cls(root, split, tuple(files), tuple(paths), tuple(labels))

    def __len__(self) -> int:
        return len(self.paths)

    def first(self, per_class: int) -> "Dataset":
        """The same data with `per_class` (>= 1) images of each class: the first of a pseudo-random order, which is always the
        same. A smaller choice is part of a larger one.

        Raises:
            DataError: a class has fewer images; the sentence names it.
        """
        self._require_per_class(per_class, kept=0)
        of_class: list[list[int]] = [[] for _ in self.classes]
        for index, label in enumerate(self.labels):
            of_class[label].append(index)
        return self._only([index for label, indices in enumerate(of_class) for index in _shuffled(indices, label)[:per_class]])

    def hold_out(self, per_class: int) -> tuple["Dataset", "Dataset"]:
        """What is left without `first(per_class)`, and that: images to train on, and the paper's val-split.

        Raises:
            DataError: a class has no more images than that; the sentence names it.
        """
        self._require_per_class(per_class, kept=1)
        held = self.first(per_class)
        taken = set(held.paths)
        return self._only([index for index, path in enumerate(self.paths) if path not in taken]), held

    def _require_per_class(self, per_class: int, kept: int) -> None:
        """Whether so many can be taken of each class and `kept` are left."""
        counts = Counter(self.labels)
        small = {name: counts[label] for label, name in enumerate(self.classes) if counts[label] < per_class + kept}
        if small:
            listed = _spell({f"{name} has {count}" for name, count in small.items()})
            left = f" and {kept} to be left" if kept else ""
            raise DataError(
                f"{self.root / self.split} has too few images for {per_class} of each class{left}: {listed}; "
                f"ask for at most {min(small.values()) - kept} or add images."
            )

    def _only(self, indices: list[int]) -> "Dataset":
        chosen = sorted(indices)
        paths, labels = tuple(self.paths[index] for index in chosen), tuple(self.labels[index] for index in chosen)
        return replace(self, paths=paths, labels=labels)

    def digest(self) -> str:
        """16 hexadecimal digits over all relative names and file sizes (bytes); reads no image.

        Raises:
            FileNotFoundError: a file was removed since the scan.
        """
        total = hashlib.sha256()
        for path in self.paths:
            total.update(f"{path}\0{os.stat(self.root / path).st_size}\n".encode())
        return total.hexdigest()[:16]

    def require_same_classes(self, other: "Dataset") -> None:
        """Raises `DataError` unless `other` has the same classes, and so the same labels."""
        if self.classes == other.classes:
            return
        mine, theirs = set(self.classes), set(other.classes)
        gaps = ((other, mine - theirs), (self, theirs - mine))
        lacks = [f"{data.root / data.split} lacks {_spell(lost)}" for data, lost in gaps if lost]
        raise DataError(
            f"The splits must have the same class folders, but {' and '.join(lacks)}: "
            "add the missing folders or remove their counterparts."
        )


def _shuffled(indices: list[int], label: int) -> list[int]:
    """A permutation that depends on the class alone, so that all seeds of a trial see the same images."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, label])))
    return [indices[place] for place in generator.permutation(len(indices))]


def _split_folder(root: Path, split: str) -> Path:
    if not root.is_dir():
        raise DataError(
            f"There is no data folder {root}: expected {root}/{split}/<class>/<image>, "
            f"so give the folder that contains {split}/."
        )
    folder = root / split
    if not folder.is_dir():
        raise DataError(
            f"The data folder {root} has no folder {split}/: expected {folder}/<class>/<image>, "
            "so create it or give another data folder."
        )
    return folder


def _class_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(
            f"{folder} has no class folders: expected {folder}/<class>/<image>, "
            "so put the images of each class into a folder of its own."
        )
    return names


def _images(folder: Path) -> list[str]:
    names = os.listdir(folder)
    return sorted(name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith("."))


def _require_images(folder: Path, files: dict[str, list[str]]) -> None:
    empty = [name for name, listed in files.items() if not listed]
    if empty:
        raise DataError(
            f"{folder} has {len(empty)} class folder(s) without an image ({', '.join(SUFFIXES)}), "
            f"so add their images or remove the folders: {', '.join(empty)}."
        )


def _spell(names: set[str]) -> str:
    listed = sorted(names)
    more = len(listed) - NAMED_AT_MOST
    return ", ".join(listed[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
