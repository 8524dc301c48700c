"""The embedded dataset: scikit-learn's 1797 handwritten digits as small JPEG files, for experiments without a download."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.datasets.prepared import is_prepared, unfinished_folder
from pipelines.errors import DataError

QUALITY = 95
VALIDATION_PER_CLASS = 36
SIDE = 32
"""Side of the images in pixels; the originals have 8."""


def prepare_digits(root: Path | str) -> Path:
    """Writes `root/{train,val}/<digit>/<index>.jpg`, 1437 and 360 (36 per class) images, and returns `root`.

    Split and images are always the same. Returns at once if the folder exists. The folder is created atomically, so several
    processes may call this at the same time.

    Raises:
        DataError: the folder contains other files, or images of other classes.
    """
    root = Path(root)
    if not is_prepared(root):
        with unfinished_folder(root) as folder:
            _write(folder)
    elif missing := [digit for digit in range(10) if not (root / "train" / str(digit)).is_dir()]:
        raise DataError(f"{root}: these are not the digits, because there is no train/{missing[0]}; choose another folder")
    return root


def _write(root: Path) -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    digits = load_digits()
    validation = _validation_indices(digits.target)
    for index, (image_HW, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if index in validation else "train"
        _write_image(image_HW, root / split / str(digit) / f"{index:04d}.jpg")


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
