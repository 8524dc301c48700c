"""Unusual and broken image files: which ones can be decoded, the reasons for the others, and crashed processes."""

import os
import re
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines import DataError, Dataset, Loader, Transform
from pipelines.datasets.check import broken_images, check
from pipelines.datasets.pack import pack
from tests.pipelines.test_loader import pillow_validation

Make = Callable[[Path], object]


def picture(height: int = 24, width: int = 32) -> Image.Image:
    row, column = np.mgrid[0:height, 0:width]
    red, green = 40 + 180 * column / width, 30 + 200 * row / height
    return Image.fromarray(np.stack([red, green, 255 - (red + green) / 2], axis=-1).astype(np.uint8))


def encoded(form: str) -> bytes:
    file = BytesIO()
    picture().save(file, form)
    return file.getvalue()


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    picture().save(path, exif=exif, quality=95)


def deep_png(path: Path) -> None:
    """Writes 16 bits per color, which Pillow cannot."""
    pixels_HW3 = np.asarray(picture(), np.uint16) * 257
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels_HW3)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", pixels_HW3.shape[1], pixels_HW3.shape[0], 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    parts = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def truncated(form: str, fraction: float) -> Make:
    whole = encoded(form)
    return lambda path: path.write_bytes(whole[: int(len(whole) * fraction)])


def corrupted(form: str) -> Make:
    content = bytearray(encoded(form))
    middle = len(content) // 2
    content[middle : middle + 8] = b"\xff" * 8
    return lambda path: path.write_bytes(content)


SOUND: dict[str, Make] = {
    "plain.jpg": lambda path: picture().save(path, quality=95),
    "progressive.jpg": lambda path: picture().save(path, progressive=True, quality=95),
    "cmyk.jpg": lambda path: picture().convert("CMYK").save(path, quality=95),
    "grey.jpg": lambda path: picture().convert("L").save(path, quality=95),
    "really_png.JPEG": lambda path: path.write_bytes(encoded("PNG")),
    "upright.jpg": rotated,
    "palette.png": lambda path: picture().convert("P").save(path),
    "alpha.png": lambda path: picture().convert("RGBA").save(path),
    "grey_alpha.png": lambda path: picture().convert("LA").save(path),
    "black_white.png": lambda path: picture().convert("1", dither=Image.Dither.NONE).save(path),
    "deep.png": deep_png,
    "dot.jpg": lambda path: picture(1, 1).save(path),
    "column.jpg": lambda path: picture(57, 1).save(path),
    "junk_after.jpg": lambda path: path.write_bytes(encoded("JPEG") + b"junk" * 9),
    "link.jpg": lambda path: path.symlink_to("plain.jpg"),
    "with spaces,\tand.dots.jpg": lambda path: picture().save(path),
    "caf\udce9.jpg": lambda path: picture().save(path),  # Latin-1, as from an old archive
}
BROKEN: dict[str, tuple[Make, str]] = {
    "empty.jpg": (lambda path: path.touch(), "empty file"),
    "text.jpg": (lambda path: path.write_text("hello"), "not a JPEG"),
    "half.jpg": (truncated("JPEG", 0.95), "damaged: "),
    "half.png": (truncated("PNG", 0.8), "damaged: "),
    "other_bytes.png": (corrupted("PNG"), "damaged: "),
    "gif.jpg": (lambda path: path.write_bytes(encoded("GIF")), "a GIF image"),
}
NO_IMAGES: dict[str, Make] = {
    "notes.txt": lambda path: path.write_text("hello"),
    "Thumbs.db": lambda path: path.write_bytes(b"\xd0\xcf\x11\xe0"),
    ".DS_Store": lambda path: path.write_bytes(b"\0"),
    "._plain.jpg": lambda path: path.write_bytes(b"\0"),
    "folder.jpg": lambda path: path.mkdir(),
}


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """All of these files in `train/dirty`, and one sound image in `train/clean`."""
    root = tmp_path_factory.mktemp("dirty")
    for name in ("clean", "dirty"):
        (root / "train" / name).mkdir(parents=True)
    picture().save(root / "train/clean/1.png")
    for name, make in (*SOUND.items(), *((name, make) for name, (make, _) in BROKEN.items()), *NO_IMAGES.items()):
        make(root / "train/dirty" / name)
    return Dataset.scan(root, "train")


def found_in(data: Dataset, workers: int) -> dict[str, str]:
    """Returns the reasons of broken images by file name; also checks the count."""
    pieces = list(check(data, workers))
    assert sum(count for count, _ in pieces) == len(data)
    assert not active_children()
    return {Path(data.paths[one.index]).name: one.reason for _, broken in pieces for one in broken}


def test_check_finds_all_broken_images(dirty: Dataset) -> None:
    found = found_in(dirty, workers=2)
    assert found.keys() == BROKEN.keys()
    assert all(found[name].startswith(reason) for name, (_, reason) in BROKEN.items()), found


WHOLE = Transform(size=20, resize=20, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))


def test_sound_images_equal_those_of_pillow(dirty: Dataset) -> None:
    """This includes CMYK colors, EXIF rotations and single pixels."""
    sound = dirty.without(one.index for one in broken_images(dirty, range(len(dirty))))
    assert {Path(path).name for path in sound.paths} == SOUND.keys() | {"1.png"}
    images = torch.cat([batch.images_NCHW for batch in Loader(sound, WHOLE, train=False, batch_size=7).epoch(0)]).numpy()
    for path, image in zip(sound.paths, images, strict=True):
        assert np.abs(image - pillow_validation(sound.root / path, 20, 20)).mean() < 2, path


def test_check_reads_shards(dirty: Dataset, tmp_path: Path) -> None:
    names = {"half.jpg": BROKEN["half.jpg"], "text.jpg": BROKEN["text.jpg"]}
    kept = [index for index, path in enumerate(dirty.paths) if Path(path).name in (*SOUND, *names, "1.png")]
    packable = dirty.without(set(range(len(dirty))) - set(kept))
    list(pack(packable, tmp_path, 10**5, 1))
    packed = Dataset.open_shards(tmp_path, "train")
    broken = list(broken_images(packed, range(len(packed))))
    assert {Path(packed.paths[one.index]).name for one in broken} == names.keys()
    with pytest.raises(DataError, match=re.escape(packed.name_of(broken[0].index))):
        list(Loader(packed, WHOLE, train=False, batch_size=40).epoch(0))


@pytest.fixture
def many(tmp_path: Path) -> Dataset:
    """400 images; the last one is broken."""
    (tmp_path / "train/a").mkdir(parents=True)
    content = encoded("JPEG")
    for index in range(400):
        (tmp_path / f"train/a/{index:03d}.jpg").write_bytes(content if index < 399 else content[:99])
    return Dataset.scan(tmp_path, "train")


def test_names_the_images_of_a_process_that_was_killed(many: Dataset) -> None:
    endless = many.root / many.paths[20]
    endless.unlink()
    os.mkfifo(endless)  # the process never reads this image to its end
    with pytest.raises(DataError, match=r"process .*: .*train/a/020\.jpg, train/a/"):
        for _ in check(many, 1):
            for process in active_children():
                process.kill()
    assert not active_children()


def test_closing_the_iterator_ends_the_processes(many: Dataset, tmp_path: Path) -> None:
    """Which read shards here."""
    list(pack(many, tmp_path / "shards", 10**6, 1))
    pieces = check(Dataset.open_shards(tmp_path / "shards", "train"), 1)
    assert next(pieces) == (16, [])
    assert active_children()
    pieces.close()
    assert not active_children()
