"""The embedded datasets: scikit-learn's 1797 handwritten digits as small JPEG files, for experiments without a download."""

import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.datasets.dataset import Dataset
from pipelines.errors import DataError

QUALITY = 95
VALIDATION_PER_CLASS = 36


@dataclass(frozen=True, slots=True)
class Drawing:
    """Size and position of a white digit on a black square."""

    digit: int
    """Side of a digit in pixels; the originals have 8."""
    canvas: int
    """Side of the image in pixels. In a larger image, each digit has a random position."""

    def position(self, index: int) -> tuple[int, int]:
        """Left and top of an image's digit: uniformly distributed, and always the same for an index."""
        generator = np.random.Generator(np.random.PCG64(index))
        left, top = generator.integers(0, self.canvas - self.digit, size=2, endpoint=True)
        return int(left), int(top)


DIGITS = {
    "digits": Drawing(digit=32, canvas=32),
    # The position does not depend on the class: the model has to find the digit and relate its strokes to each other.
    "shifted_digits": Drawing(digit=16, canvas=24),
}
"""The embedded datasets by name."""


def prepare_digits(root: Path | str, name: str = "digits") -> Path:
    """Writes `root/{train,val}/<digit>/<index>.jpg`, 1437 and 360 (36 per class) images, and returns `root`.

    `name` is one of `DIGITS`. Split and images are always the same. Returns at once if the folder is complete. The folder is
    created atomically, so several processes may call this at the same time.

    Raises:
        DataError: the folder contains other or changed files, which are not overwritten.
    """
    root = Path(root)
    if root.is_dir() and any(root.iterdir()):
        _require_complete(root, name)
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = root.with_name(f".{root.name}.{uuid.uuid4().hex}")
    try:
        _write(unfinished, name)
        _publish(unfinished, root, name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return root


def _publish(unfinished: Path, root: Path, name: str) -> None:
    try:
        os.rename(unfinished, root)
    except OSError:
        # The folder is not empty: another process may have created it.
        _require_complete(root, name)


def _require_complete(root: Path, name: str) -> None:
    manifest = _manifest_path(root, name)
    try:
        complete = json.loads(manifest.read_text()) == _manifest(root, name)
    except (OSError, ValueError):
        complete = False
    if not complete:
        raise DataError(
            f"{root}: exists, but does not hold the complete {name} dataset that {manifest.name} describes; "
            "remove this folder or choose another one"
        )


def _manifest_path(root: Path, name: str) -> Path:
    return root / f"{name}.json"


def _manifest(root: Path, name: str) -> dict[str, dict[str, int | str]]:
    splits = [Dataset.scan(root, split) for split in ("train", "val")]
    images: dict[str, dict[str, int | str]] = {s.split: {"images": len(s), "digest": s.digest()} for s in splits}
    return {"drawing": asdict(DIGITS[name])} | images


def _write(root: Path, name: str) -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    digits = load_digits()
    validation = _validation_indices(digits.target)
    for index, (image_HW, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if index in validation else "train"
        _write_image(image_HW, DIGITS[name], index, root / split / str(digit) / f"{index:04d}.jpg")
    _manifest_path(root, name).write_text(json.dumps(_manifest(root, name), indent=2) + "\n")


def _validation_indices(targets: NDArray[np.int64]) -> set[int]:
    chosen: set[int] = set()
    for digit in range(10):
        generator = np.random.Generator(np.random.PCG64(digit))
        chosen.update(generator.permutation(np.flatnonzero(targets == digit))[:VALIDATION_PER_CLASS].tolist())
    return chosen


def _write_image(image_HW: NDArray[np.float64], drawing: Drawing, index: int, path: Path) -> None:
    """Writes values from 0 to 16 as a grayscale JPEG."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    grey_HW = np.round(image_HW * (255 / 16)).astype(np.uint8)
    large = Image.fromarray(grey_HW).resize((drawing.digit, drawing.digit), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (drawing.canvas, drawing.canvas))
    canvas.paste(large, drawing.position(index))
    canvas.save(path, quality=QUALITY)
