"""The embedded dataset: scikit-learn's 1797 handwritten digits as small JPEG files, for experiments without a download."""

import json
import os
import shutil
import uuid
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.datasets.dataset import Dataset
from pipelines.errors import DataError

QUALITY = 95
VALIDATION_PER_CLASS = 36
SIDE = 32
"""Side of the images in pixels; the originals have 8."""
MANIFEST = "digits.json"
"""File that describes the complete dataset."""


def prepare_digits(root: Path | str) -> Path:
    """Writes `root/{train,val}/<digit>/<index>.jpg`, 1437 and 360 (36 per class) images, and returns `root`.

    Split and images are always the same. Returns at once if the folder is complete. The folder is created atomically, so
    several processes may call this at the same time.

    Raises:
        DataError: the folder contains other or changed files, which are not overwritten.
    """
    root = Path(root)
    if root.is_dir() and any(root.iterdir()):
        _require_complete(root)
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = root.with_name(f".{root.name}.{uuid.uuid4().hex}")
    try:
        _write(unfinished)
        _publish(unfinished, root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return root


def _publish(unfinished: Path, root: Path) -> None:
    try:
        os.rename(unfinished, root)
    except OSError:
        # The folder is not empty: another process may have created it.
        _require_complete(root)


def _require_complete(root: Path) -> None:
    try:
        complete = json.loads((root / MANIFEST).read_text()).items() >= _manifest(root).items()
    except (OSError, ValueError):
        complete = False
    if not complete:
        raise DataError(
            f"{root}: exists, but does not hold the complete digits dataset that {MANIFEST} describes; "
            "remove this folder or choose another one"
        )


def _manifest(root: Path) -> dict[str, dict[str, int | str]]:
    splits = [Dataset.scan(root, split) for split in ("train", "val")]
    return {s.split: {"images": len(s), "digest": s.digest()} for s in splits}


def _write(root: Path) -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    digits = load_digits()
    validation = _validation_indices(digits.target)
    for index, (image_HW, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if index in validation else "train"
        _write_image(image_HW, root / split / str(digit) / f"{index:04d}.jpg")
    (root / MANIFEST).write_text(json.dumps(_manifest(root), indent=2) + "\n")


def _validation_indices(targets: NDArray[np.int64]) -> set[int]:
    chosen: set[int] = set()
    for digit in range(10):
        generator = np.random.Generator(np.random.PCG64(digit))
        chosen.update(generator.permutation(np.flatnonzero(targets == digit))[:VALIDATION_PER_CLASS].tolist())
    return chosen


def _write_image(image_HW: NDArray[np.float64], path: Path) -> None:
    """Writes values from 0 to 16 as a grayscale JPEG."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    grey_HW = np.round(image_HW * (255 / 16)).astype(np.uint8)
    Image.fromarray(grey_HW).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=QUALITY)
