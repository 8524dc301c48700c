"""Compares the speed of this project's loader and of PyTorch DataLoaders, from files to normalized batches on the CPU.

    python -m tests.benchmarks.loading [--images 2000] [--batch 64] [--threads 2] [--repeats 7] [--json FILE]
    python -m tests.benchmarks.loading --root data/cifar10 --size 32

The images are JPEGs of 500x375 at quality 90 (`tests.benchmarks.photographs`), or those in `ROOT/train/CLASS`, in a warm page
cache. Each contender runs in its
own process on the same cores, with one thread or worker process per core. The contenders take turns after each epoch. Training
uses a random resized crop to 224, flips and normalization, in a new random order in each epoch; validation resizes to 256 and
crops the center. All return float32 NCHW. Ratios are those of one repeat; the tables list medians and ranges. Memory is the
proportional set size of a contender's processes in the middle of an epoch. The difference to Pillow is the mean absolute
difference of pixels from 0 to 255 in validation.

`usual` loaders normalize each image in the workers. `tuned` ones are the fastest found: workers fill uint8 batches in shared
memory, the main process normalizes them, and malloc keeps freed memory. The decoder is the fastest one installed; the program
lists the decoders that it could not use. OpenCV's linear filter skips antialiasing and so does less work.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from pipelines import Dataset, Loader, Transform
from pipelines.transform import IMAGENET_MEAN, IMAGENET_STD
from tests.benchmarks.tables import ratio, table

SPLIT = "train"
MODES = ("training", "validation")
COMPARED = 64
"""Number of images whose pixels are compared with Pillow's."""
DECODED = 200
"""Number of images in the comparison of decoders."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""With these, glibc reuses the memory of large arrays instead of returning it to the kernel."""
MEAN_311, STD_311 = (255 * torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))

Pixels = NDArray[np.uint8]
Decode = Callable[[bytes], Pixels]
Resize = Callable[[Pixels, int, int], Pixels]
Size = tuple[int, int]


def _pillow() -> Decode:
    return lambda data: np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def _simplejpeg() -> Decode:
    simplejpeg = importlib.import_module("simplejpeg")
    return lambda data: simplejpeg.decode_jpeg(data, "RGB")


def _turbojpeg() -> Decode:
    turbojpeg = importlib.import_module("turbojpeg")
    decoder = turbojpeg.TurboJPEG()
    return lambda data: decoder.decode(data, turbojpeg.TJPF_RGB)


def _opencv() -> Decode:
    cv2 = importlib.import_module("cv2")
    cv2.setNumThreads(1)
    return lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


def _imagecodecs() -> Decode:
    return importlib.import_module("imagecodecs").jpeg8_decode


def _kornia() -> Decode:
    decoder = importlib.import_module("kornia_rs.io").ImageDecoder()
    return lambda data: np.asarray(decoder.decode(data))


def _torchvision() -> Decode:
    decode = importlib.import_module("torchvision.io").decode_jpeg
    return lambda data: decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)).permute(1, 2, 0).numpy()


DECODERS: dict[str, Callable[[], Decode]] = {
    "Pillow": _pillow,
    "simplejpeg": _simplejpeg,
    "PyTurboJPEG": _turbojpeg,
    "opencv-python-headless": _opencv,
    "imagecodecs": _imagecodecs,
    "kornia-rs": _kornia,
    "torchvision": _torchvision,
}
"""Constructors of decoders, which return HWC images, by package."""


def _torch_resize(image: Pixels, height: int, width: int) -> Pixels:
    x_NCHW = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    return interpolate(x_NCHW, (height, width), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


def _opencv_resize(filter_name: str) -> Resize:
    def resize(image: Pixels, height: int, width: int) -> Pixels:
        cv2 = importlib.import_module("cv2")
        cv2.setNumThreads(1)
        return cv2.resize(image, (width, height), interpolation=getattr(cv2, filter_name))

    return resize


RESIZERS: dict[str, Resize] = {
    "torch": _torch_resize,
    "OpenCV, area": _opencv_resize("INTER_AREA"),
    "OpenCV, linear": _opencv_resize("INTER_LINEAR"),
}
"""Pillow is missing, because it resizes only images that it decoded."""


@dataclass(frozen=True)
class Setting:
    """Options for all contenders."""

    root: Path
    batch: int
    threads: int
    transform: Transform

    def dataset(self) -> Dataset:
        return Dataset.scan(self.root, SPLIT)

    def files(self) -> list[Path]:
        dataset = self.dataset()
        return [dataset.root / path for path in dataset.paths]


@dataclass(frozen=True)
class Project:
    """This project's loader."""

    name: str = "this project"
    tuned: bool = False

    def epochs(self, setting: Setting, mode: str) -> Callable[[int], Iterator[torch.Tensor]]:
        train = mode == "training"
        loader = Loader(setting.dataset(), setting.transform, train=train, batch_size=setting.batch, threads=setting.threads)
        return lambda number: (batch.images_NCHW for batch in loader.epoch(number))


@dataclass(frozen=True)
class Workers:
    """A DataLoader of torch."""

    decoder: str
    resizer: str
    tuned: bool

    @property
    def name(self) -> str:
        parts = self.decoder if self.decoder == self.resizer else f"{self.decoder} + {self.resizer}"
        return f"DataLoader, {parts}, {'tuned' if self.tuned else 'usual'}"

    def epochs(self, setting: Setting, mode: str) -> Callable[[int], Iterator[torch.Tensor]]:
        images = (Batches if self.tuned else Images)(setting.files(), self, mode == "training", setting.transform)
        loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
            images,
            batch_size=setting.batch,
            shuffle=images.train,
            num_workers=setting.threads,
            persistent_workers=True,
            collate_fn=_unchanged if self.tuned else None,
        )
        if not self.tuned:
            return lambda number: iter(loader)
        return lambda number: (batch_N3HW.float().sub_(MEAN_311).div_(STD_311) for batch_N3HW in loader)


def _unchanged(batch: torch.Tensor) -> torch.Tensor:
    return batch


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Decodes, crops and resizes images in the worker."""

    def __init__(self, files: list[Path], how: Workers, train: bool, transform: Transform) -> None:
        self.files, self.how, self.train, self.transform = files, how, train, transform
        self.size = transform.size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._square(index)).permute(2, 0, 1).contiguous().float().sub_(MEAN_311).div_(STD_311)

    def _square(self, index: int) -> Pixels:
        square = self._pillow_square(index) if self.how.resizer == "Pillow" else self._array_square(index)
        return square[:, ::-1].copy() if self.train and random.random() < 0.5 else square

    def _pillow_square(self, index: int) -> Pixels:
        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        if self.train:
            top, left, height, width = random_window(image.height, image.width, self.transform)
            box, bilinear = (left, top, left + width, top + height), Image.Resampling.BILINEAR
            return np.array(image.resize((self.size, self.size), bilinear, box=box))
        return validated_by_pillow(image, self.transform)

    def _array_square(self, index: int) -> Pixels:
        image, resize = _decoder(self.how.decoder)(self.files[index].read_bytes()), RESIZERS[self.how.resizer]
        if self.train:
            top, left, height, width = random_window(*image.shape[:2], self.transform)
            return resize(image[top : top + height, left : left + width], self.size, self.size)
        (height, width), (top, left) = center(*image.shape[:2], self.transform)
        return resize(image, height, width)[top : top + self.size, left : left + self.size]


class Batches(Images):
    """Returns whole batches."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        shape = (len(indices), 3, self.size, self.size)
        # Without shared memory, the transfer to the main process costs a copy.
        storage = torch.UntypedStorage._new_shared(math.prod(shape))
        batch_N3HW = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)
        for out_3HW, index in zip(batch_N3HW, indices, strict=True):
            out_3HW.copy_(torch.from_numpy(self._square(index)).permute(2, 0, 1))
        return batch_N3HW


@cache
def _decoder(name: str) -> Decode:
    return DECODERS[name]()


def random_window(height: int, width: int, transform: Transform) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of a random crop."""
    low, high = (math.log(ratio) for ratio in transform.crop_ratio)
    for _ in range(10):
        area, ratio = height * width * random.uniform(*transform.crop_area), math.exp(random.uniform(low, high))
        down, across = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= down <= height and 1 <= across <= width:
            return random.randint(0, height - down), random.randint(0, width - across), down, across
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def center(height: int, width: int, transform: Transform) -> tuple[Size, Size]:
    """Returns height and width of the resized image, then top and left of the center crop, rounded as in torchvision."""
    short = min(height, width)
    resized = transform.resize * height // short, transform.resize * width // short
    return resized, (round((resized[0] - transform.size) / 2), round((resized[1] - transform.size) / 2))


def validated_by_pillow(image: Image.Image, transform: Transform) -> Pixels:
    (height, width), (top, left) = center(image.height, image.width, transform)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.array(resized.crop((left, top, left + transform.size, top + transform.size)))


Contender = Project | Workers


def serve(contender: Contender, setting: Setting, mode: str, connection: Any) -> None:
    """Runs a warm-up and sends its memory and difference to Pillow; then runs an epoch for each number and sends its speed."""
    torch.set_num_threads(1)
    epoch = contender.epochs(setting, mode)
    middle = len(setting.files()) // setting.batch // 2
    found: dict[str, float] = {}
    for step, images_NCHW in enumerate(epoch(0)):
        if step == 0 and mode == "validation":
            found["difference"] = difference_to_pillow(images_NCHW, setting)
        if step == middle:
            found["MiB"] = resident() / 2**20
    connection.send(found)
    while (number := connection.recv()) is not None:
        began = time.perf_counter()
        count = sum(len(images_NCHW) for images_NCHW in epoch(number))
        connection.send(count / (time.perf_counter() - began))


def difference_to_pillow(images_NCHW: torch.Tensor, setting: Setting) -> float:
    """Returns the mean absolute difference of the first validation images, for pixels from 0 to 255."""
    count = min(len(images_NCHW), COMPARED)
    images = (Image.open(file).convert("RGB") for file in setting.files()[:count])
    pillow = torch.stack([torch.from_numpy(validated_by_pillow(image, setting.transform)) for image in images])
    ours = images_NCHW[:count] * STD_311 + MEAN_311
    return (ours - pillow.permute(0, 3, 1, 2)).abs().mean().item()


def resident() -> int:
    """Returns the memory of this process and its children in bytes; shared pages count once."""
    children = (child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split())
    rollups = (Path(f"/proc/{process}/smaps_rollup").read_text().splitlines() for process in ("self", *children))
    return sum(1024 * int(line.split()[1]) for lines in rollups for line in lines if line.startswith("Pss:"))


class Race:
    """Runs each contender in its own process."""

    def __init__(self, contenders: list[Contender], setting: Setting, mode: str) -> None:
        self.names = [contender.name for contender in contenders]
        self.found: dict[str, dict[str, float]] = {}
        self.speeds: dict[str, list[float]] = {name: [] for name in self.names}
        self._connections = {}
        for contender in contenders:
            spawn = multiprocessing.get_context("spawn")
            connection, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(contender, setting, mode, theirs))
            with patch.dict(os.environ, KEEP_MEMORY if contender.tuned else {}):
                process.start()
            theirs.close()
            self.found[contender.name] = connection.recv()
            self._connections[contender.name] = connection

    def run(self, repeats: int) -> None:
        for number in range(1, repeats + 1):
            for name, connection in self._connections.items():
                connection.send(number)
                self.speeds[name].append(connection.recv())
        for connection in self._connections.values():
            connection.send(None)


def measure_decoders(files: list[Path], repeats: int) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the images per second of each decoder on one core, and the reasons for missing decoders."""
    data, decoders, left_out = [file.read_bytes() for file in files[:DECODED]], {}, {}
    for name, make in DECODERS.items():
        try:
            decoders[name] = make()
            decoders[name](data[0])
        except ImportError:
            left_out[name] = f"not installed, `pip install {name}`"
            decoders.pop(name, None)
        except Exception as error:  # any failure of a third-party decoder
            left_out[name] = f"does not work here ({str(error).splitlines()[0]})"
            decoders.pop(name, None)
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for repeat in range(repeats + 1):
        for name, decode in decoders.items():
            began = time.perf_counter()
            for image in data:
                decode(image)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: len(data) / statistics.median(times) for name, times in seconds.items()}, left_out


def contenders_with(decoders: dict[str, float]) -> list[Contender]:
    """Returns the project's loader, Pillow's, and the fastest decoder with each resizer."""
    fastest = max(decoders, key=lambda name: decoders[name])
    contenders: list[Contender] = [Project(), Workers("Pillow", "Pillow", tuned=False), Workers("Pillow", "Pillow", tuned=True)]
    resizers = RESIZERS if "opencv-python-headless" in decoders else ["torch"]
    return contenders + [Workers(fastest, resizer, tuned=True) for resizer in resizers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--root", type=Path, help="folder of images, instead of random ones")
    parser.add_argument("--size", type=int, default=224, help="side of the images in a batch")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="cores that each contender gets")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    options = parser.parse_args()
    # Imported here to keep the contenders' processes small.
    from tests.benchmarks.photographs import QUALITY, SIZE, write_photographs

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        root = options.root or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.root is None:
            write_photographs(root, SPLIT, options.images, options.threads)
        transform = Transform(size=options.size, resize=options.size if options.size < 224 else options.size * 8 // 7)
        setting = Setting(root, options.batch, options.threads, transform)
        files = setting.files()
        size = sum(file.stat().st_size for file in files) // len(files)
        where = f"{platform.processor() or platform.machine()} CPU, {options.threads} cores"
        print(
            f"torch {torch.__version__}, Pillow {Image.__version__}, {where}, batch {options.batch}, {options.repeats} repeats."
        )
        kind = f"{SIZE[0]}x{SIZE[1]}, quality {QUALITY}" if options.root is None else str(options.root)
        print(f"{len(files)} JPEGs, {kind}, {size / 1000:.0f} KB on average, to {options.size}x{options.size}.")
        decoders, left_out = measure_decoders(files, options.repeats)
        record: dict[str, Any] = {"mean_bytes": size, "decoding alone, images/s on one core": decoders, "left out": left_out}
        rows = [[name, round(speed)] for name, speed in decoders.items()]
        print(table("Decoding alone, from memory", ["decoder", "images/s on one core"], rows))
        for name, reason in left_out.items():
            print(f"Left out: {name}, {reason}.")
        for mode in MODES:
            race = Race(contenders_with(decoders), setting, mode)
            race.run(options.repeats)
            print(table(mode.capitalize(), *_rows(race, options.threads)), flush=True)
            record[mode] = {name: {"images/s": race.speeds[name], **race.found[name]} for name in race.names}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _rows(race: Race, cores: int) -> tuple[list[str], list[list[str]]]:
    header = ["contender", "images/s", "range", "images/s per core", "project / this", "memory, MiB"]
    compared = "difference" in race.found[race.names[0]]
    rows = []
    for name, speeds in race.speeds.items():
        speed = statistics.median(speeds)
        cells = [f"{speed:.0f}", f"{min(speeds):.0f}-{max(speeds):.0f}", f"{speed / cores:.0f}"]
        cells += [ratio(race.speeds[race.names[0]], speeds, 2), f"{race.found[name]['MiB']:.0f}"]
        rows.append([name, *cells, *([f"{race.found[name]['difference']:.2f}"] if compared else [])])
    return header + (["difference to Pillow"] if compared else []), rows


if __name__ == "__main__":
    main()
