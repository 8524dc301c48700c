"""The embedded data set: scikit-learn's 1797 handwritten digits as a folder of small JPEG files.

It stands in for ImageNet wherever a whole experiment must run in minutes without a download.
"""

import json
import os
import shutil
import uuid
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.dataset import Dataset
from pipelines.errors import DataError

SIDE = 32
"""Pixels; the originals have 8."""
QUALITY = 95
VALIDATION_PER_CLASS = 36
MANIFEST = "digits.json"


def prepare_digits(root: Path | str) -> Path:
    """Writes `root/{train,val}/<digit>/<index>.jpg`, 1437 and 360 (36 per class) images, and returns `root`.

    The split is always the same. Returns at once when the folder is complete. The folder appears whole or not
    at all, so any number of processes may call this at the same time.

    Raises:
        DataError: the folder holds something else, or its files were changed; nothing is overwritten.
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
        # Only an empty folder can be renamed over: somebody else was faster, which is as good.
        _require_complete(root)


def _require_complete(root: Path) -> None:
    try:
        found = json.loads((root / MANIFEST).read_text())
        complete = found == _manifest(root)
    except (OSError, ValueError):
        complete = False
    if not complete:
        raise DataError(
            f"{root} exists but is not a complete digits data set as described by {MANIFEST} in it: "
            "remove it or choose another folder."
        )


def _manifest(root: Path) -> dict[str, dict[str, int | str]]:
    splits = [Dataset.scan(root, split) for split in ("train", "val")]
    return {data.split: {"images": len(data), "digest": data.digest()} for data in splits}


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
    """Writes values 0..16 as a grayscale JPEG."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    grey_HW = np.round(image_HW * (255 / 16)).astype(np.uint8)
    large = Image.fromarray(grey_HW).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    large.save(path, quality=QUALITY)
