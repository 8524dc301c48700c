"""Compares the speed of this project's loader and of PyTorch DataLoaders, from files to normalized batches on the CPU.

    python -m tests.benchmarks.loading [--repeats 7]
    python -m tests.benchmarks.loading --root data/cifar10 --size 32

The images are 2000 JPEGs of 500x375 at quality 90 (`tests.benchmarks.photographs`), or those in `ROOT/train/CLASS`, in a warm
page cache. Each contender runs in its own process on the same two cores, with one thread or worker process per core. The
contenders take turns after each epoch. Training uses a random resized crop to 224, flips and normalization, in a new random
order in each epoch; validation resizes to 256 and crops the center. All return float32 NCHW. Ratios are those of one repeat;
the tables list medians and ranges. The difference to Pillow is the mean absolute difference of pixels from 0 to 255 in
validation.

`usual` loaders normalize each image in the workers. `tuned` ones are the fastest found: workers fill uint8 batches in shared
memory, the main process normalizes them, and malloc keeps freed memory.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image

from pipelines import Dataset, Loader, Transform
from pipelines.transform import IMAGENET_MEAN, IMAGENET_STD
from tests.benchmarks.tables import ratio, spread, table

SPLIT = "train"
IMAGES, BATCH, THREADS = 2000, 64, 2
MODES = ("training", "validation")
COMPARED = 64
"""Number of images whose pixels are compared with Pillow's."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""With these, glibc reuses the memory of large arrays instead of returning it to the kernel."""
MEAN_311, STD_311 = (255 * torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom edge of a window."""


def by_pillow(data: bytes, box: Box | None, height: int, width: int) -> Pixels:
    """Decodes an image and resizes a window of it, or all of it."""
    image = Image.open(BytesIO(data)).convert("RGB")
    return np.array(image.resize((width, height), Image.Resampling.BILINEAR, box=box))


@dataclass(frozen=True)
class Setting:
    """Options for all contenders."""

    root: Path
    transform: Transform

    def dataset(self) -> Dataset:
        return Dataset.scan(self.root, SPLIT)

    def files(self) -> list[Path]:
        dataset = self.dataset()
        return [dataset.root / path for path in dataset.paths]


PROJECT, USUAL, TUNED = "this project", "DataLoader, usual", "DataLoader, tuned"


def epochs(
    contender: str, setting: Setting, train: bool, batch: int = BATCH, threads: int = THREADS
) -> Callable[[int], Iterator[torch.Tensor]]:
    """A function from the number of an epoch to its batches: of this project's loader, or of a DataLoader of torch."""
    if contender == PROJECT:
        loader = Loader(setting.dataset(), setting.transform, train=train, batch_size=batch, threads=threads)
        return lambda number: (batch.images_NCHW for batch in loader.epoch(number))
    images = (Batches if contender == TUNED else Images)(setting.files(), train, setting.transform)
    workers: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
        images,
        batch_size=batch,
        shuffle=train,
        num_workers=threads,
        persistent_workers=True,
        collate_fn=_unchanged if contender == TUNED else None,  # type: ignore[arg-type]
    )
    if contender == USUAL:
        return lambda number: iter(workers)
    return lambda number: (batch_N3HW.float().sub_(MEAN_311).div_(STD_311) for batch_N3HW in workers)


def _unchanged(batch: torch.Tensor) -> torch.Tensor:
    return batch


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Decodes, crops and resizes images in the worker."""

    def __init__(self, files: list[Path], train: bool, transform: Transform) -> None:
        self.files, self.train, self.transform = files, train, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pixels(index).contiguous().float().sub_(MEAN_311).div_(STD_311)

    def pixels(self, index: int) -> torch.Tensor:
        data, size = self.files[index].read_bytes(), self.transform.size
        with Image.open(BytesIO(data)) as header:
            width, height = header.size
        if not self.train:
            return torch.from_numpy(validated(data, height, width, self.transform)).permute(2, 0, 1)
        square = by_pillow(data, random_window(height, width, self.transform), size, size)
        return torch.from_numpy(square[:, ::-1].copy() if random.random() < 0.5 else square).permute(2, 0, 1)


class Batches(Images):
    """Returns whole batches."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        shape = (len(indices), 3, self.transform.size, self.transform.size)
        # Without shared memory, the transfer to the main process costs a copy.
        storage = torch.UntypedStorage._new_shared(math.prod(shape))
        batch_N3HW = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]
        for out_3HW, index in zip(batch_N3HW, indices, strict=True):
            out_3HW.copy_(self.pixels(index))
        return batch_N3HW


def random_window(height: int, width: int, transform: Transform) -> Box:
    """Returns a random crop."""
    low, high = (math.log(ratio) for ratio in transform.crop_ratio)
    for _ in range(10):
        area, ratio = height * width * random.uniform(*transform.crop_area), math.exp(random.uniform(low, high))
        down, across = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= down <= height and 1 <= across <= width:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            return left, top, left + across, top + down
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def validated(data: bytes, height: int, width: int, transform: Transform) -> Pixels:
    """Resizes the short side and crops the center, rounded as in torchvision."""
    size, short = transform.size, min(height, width)
    height, width = transform.resize * height // short, transform.resize * width // short
    top, left = round((height - size) / 2), round((width - size) / 2)
    return by_pillow(data, None, height, width)[top : top + size, left : left + size]


def serve(contender: str, setting: Setting, train: bool, connection: Any) -> None:
    """Runs a warm-up and sends its difference to Pillow; then runs an epoch for each number and sends its speed."""
    torch.set_num_threads(1)
    epoch = epochs(contender, setting, train)
    first, *_ = epoch(0)
    connection.send(math.nan if train else difference_to_pillow(first, setting))
    while (number := connection.recv()) is not None:
        began = time.perf_counter()
        count = sum(len(images_NCHW) for images_NCHW in epoch(number))
        connection.send(count / (time.perf_counter() - began))


def difference_to_pillow(images_NCHW: torch.Tensor, setting: Setting) -> float:
    """Returns the mean absolute difference of the first validation images, for pixels from 0 to 255."""
    count = min(len(images_NCHW), COMPARED)
    reference = Images(setting.files()[:count], False, setting.transform)
    pillow = torch.stack([reference.pixels(index) for index in range(count)])
    return (images_NCHW[:count] * STD_311 + MEAN_311 - pillow).abs().mean().item()


def race(contenders: list[str], setting: Setting, train: bool, repeats: int) -> list[list[str]]:
    """Runs each contender in its own process and returns the rows of a table."""
    connections, differences = {}, {}
    for contender in contenders:
        spawn = multiprocessing.get_context("spawn")
        connection, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(contender, setting, train, theirs))
        with patch.dict(os.environ, KEEP_MEMORY if contender == TUNED else {}):
            process.start()
        theirs.close()
        differences[contender] = connection.recv()
        connections[contender] = connection
    speeds: dict[str, list[float]] = {name: [] for name in connections}
    for number in range(1, repeats + 1):
        for name, connection in connections.items():
            connection.send(number)
            speeds[name].append(connection.recv())
    for connection in connections.values():
        connection.send(None)
    project = speeds[contenders[0]]
    return [
        [name, spread(found, 0), ratio(project, found, 2), "-" if train else f"{differences[name]:.2f}"]
        for name, found in speeds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of images, instead of random ones")
    parser.add_argument("--size", type=int, default=224, help="side of the images in a batch")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    # Imported here to keep the contenders' processes small.
    from tests.benchmarks.photographs import write_photographs

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        root = options.root or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.root is None:
            write_photographs(root, SPLIT, IMAGES, THREADS)
        transform = Transform(size=options.size, resize=options.size if options.size < 224 else options.size * 8 // 7)
        setting = Setting(root, transform)
        where = f"{platform.processor() or platform.machine()} CPU, {THREADS} cores"
        print(f"torch {torch.__version__}, Pillow {PIL.__version__}, {where}, batch {BATCH}.")
        for mode in MODES:
            rows = race([PROJECT, USUAL, TUNED], setting, mode == "training", options.repeats)
            print(table(mode, ["loader", "images/s", "project / this", "difference to Pillow"], rows), flush=True)


if __name__ == "__main__":
    main()
