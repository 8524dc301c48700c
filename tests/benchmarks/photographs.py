"""Writes JPEGs like those of a real data set: 500x375, quality 90, about 110 KB, all different.

They are random crops of three photographs from scikit-learn and matplotlib, with mirroring, color changes and film grain.
Without the grain, the files would have only 60 KB and decode faster.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import matplotlib
import numpy as np
import sklearn.datasets
from PIL import Image, ImageFilter

SIZE = (500, 375)
"""Width and height, pixels."""
QUALITY = 90
CLASSES = 10
GRAIN = (4.0, 40.0)
"""Range of the standard deviation of the grain, for pixels from 0 to 255."""


def write_photographs(root: Path, split: str, count: int, processes: int, seed: int = 0) -> None:
    """Writes `count` images as `root/split/<class>/<number>.jpg`. Each depends only on its number and the seed."""
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(partial(_write_photograph, root / split, seed), range(count), chunksize=50))


@cache
def _originals() -> list[Image.Image]:
    photographs = [Image.fromarray(image) for image in sklearn.datasets.load_sample_images().images]
    photographs.append(Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg").convert("RGB"))
    return [photograph.filter(ImageFilter.UnsharpMask(radius=1, percent=150, threshold=0)) for photograph in photographs]


def _write_photograph(folder: Path, seed: int, number: int) -> None:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))
    originals = _originals()
    whole = originals[number % len(originals)]
    width = min(whole.width, whole.height * SIZE[0] / SIZE[1]) * generator.uniform(0.7, 1)
    height = width * SIZE[1] / SIZE[0]
    left, top = generator.uniform(0, whole.width - width), generator.uniform(0, whole.height - height)
    part = whole.resize(SIZE, Image.Resampling.LANCZOS, box=(left, top, left + width, top + height))
    if generator.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    colours = generator.uniform(0.8, 1.2, 3).astype(np.float32)
    grain_HW1 = generator.uniform(*GRAIN) * generator.standard_normal((SIZE[1], SIZE[0], 1), np.float32)
    pixels_HW3 = np.asarray(part, np.float32) * colours + grain_HW1
    path = folder / f"class{number % CLASSES}" / f"{number:05d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels_HW3.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
