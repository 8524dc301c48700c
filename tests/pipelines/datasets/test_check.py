"""Unusual and broken image files: which ones can be decoded, the reasons for the others, and crashed processes."""

import os
import re
import signal
import struct
import zlib
from collections.abc import Callable, Iterable
from io import BytesIO
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from pipelines import DataError, Dataset, Loader, Transform
from pipelines.datasets.check import broken_images, check
from pipelines.datasets.dataset import Source
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


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # by 90 degrees
    return exif


def rotated(path: Path) -> None:
    picture().save(path, exif=turned(), quality=95)


def deep_png(path: Path) -> None:
    """Writes 16 bits per color, which Pillow cannot."""
    pixels_HW3 = np.asarray(picture(), np.uint16) * 257
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels_HW3)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", pixels_HW3.shape[1], pixels_HW3.shape[0], 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + png_chunks(chunks))


def truncated(form: str, fraction: float) -> Make:
    whole = encoded(form)
    return lambda path: path.write_bytes(whole[: int(len(whole) * fraction)])


def corrupted(form: str) -> Make:
    content = bytearray(encoded(form))
    middle = len(content) // 2
    content[middle : middle + 8] = b"\xff" * 8
    return lambda path: path.write_bytes(content)


def tiff(pixels: NDArray[Any]) -> Make:
    return lambda path: Image.fromarray(pixels).save(path)


def planar_tiff(path: Path) -> None:
    """Writes 16 bits per color, one color after the other, which Pillow cannot."""
    pixels_3HW = np.ascontiguousarray(np.asarray(picture(), "<u2").transpose(2, 0, 1) * 257)
    _, H, W = pixels_3HW.shape
    plane, begin = 2 * H * W, 8
    after = begin + 3 * plane  # three arrays of three numbers
    tags = [
        *((256, 3, 1, W), (257, 3, 1, H), (258, 3, 3, after), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 3, after + 6)),
        *((277, 3, 1, 3), (278, 3, 1, H), (279, 4, 3, after + 18), (284, 3, 1, 2)),
    ]
    arrays = struct.pack("<3H3I3I", 16, 16, 16, *(begin + plane * color for color in range(3)), plane, plane, plane)
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    path.write_bytes(struct.pack("<2sHI", b"II", 42, after + len(arrays)) + pixels_3HW.tobytes() + arrays + directory)


def animated_png(path: Path) -> None:
    """A picture whose second frame crashes DALI's decoder, with a comment that contains the name of a chunk."""
    frame = struct.pack(">IIIIIHHBB", 0, 32, 24, 0, 0, 1, 2, 0, 1)
    whole = encoded("PNG")
    chunks = [(b"tEXt", b"Comment\0 IDAT "), (b"acTL", struct.pack(">II", 2, 0))]
    after = [(b"fcTL", frame), (b"fdAT", struct.pack(">I", 1) + zlib.compress(b"\x09" * 24 * 97))]
    path.write_bytes(whole[:33] + png_chunks(chunks) + whole[33:-12] + png_chunks(after) + whole[-12:])


def png_chunks(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def claims_many_pixels(path: Path) -> None:
    """A BMP of 118 bytes."""
    header = struct.pack("<IiiHHIIiiII", 40, 3_000_000, 2_000_000, 1, 24, 0, 0, 2835, 2835, 0, 0)
    path.write_bytes(b"BM" + struct.pack("<IHHI", 118, 0, 0, 54) + header + bytes(64))


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
    "with spaces,\tand.dots.jpg": lambda path: picture().save(path),
    "caf\udce9.jpg": lambda path: picture().save(path),  # Latin-1, as from an old archive
    "phone.jfif": lambda path: path.write_bytes(encoded("JPEG")),
    "lossless.webp": lambda path: picture().save(path, lossless=True),
    "lossy.WEBP": lambda path: picture().save(path, quality=95),
    "upright.webp": lambda path: picture().save(path, exif=turned(), quality=95),
    "moving.webp": lambda path: picture().save(path, lossless=True, save_all=True, append_images=[picture().rotate(180)]),
    "plain.bmp": lambda path: picture().save(path),
    "palette.bmp": lambda path: picture().quantize(256).save(path),
    "plain.tif": lambda path: picture().save(path),
    "lzw.tiff": lambda path: picture().save(path, compression="tiff_lzw"),
    "upright.tif": lambda path: picture().save(path, tiffinfo={274: 6}),
    "cmyk.tif": lambda path: picture().convert("CMYK").save(path),
    "deep_grey.tif": tiff(np.asarray(picture().convert("L"), np.uint16) * 257),
    "upright.png": lambda path: picture().save(path, exif=turned()),
    "plain.ppm": lambda path: picture().save(path),
    "grey.pgm": lambda path: picture().convert("L").save(path),
}
BROKEN: dict[str, tuple[Make, str]] = {
    "empty.jpg": (lambda path: path.touch(), "empty file"),
    "text.jpg": (lambda path: path.write_text("hello"), "not an image"),
    "half.jpg": (truncated("JPEG", 0.95), "damaged: "),
    "half.png": (truncated("PNG", 0.8), "damaged: "),
    "other_bytes.png": (corrupted("PNG"), "damaged: "),
    "gif.jpg": (lambda path: path.write_bytes(encoded("GIF")), "a GIF image"),
    "half.webp": (truncated("WEBP", 0.8), "damaged: "),
    "half.bmp": (truncated("BMP", 0.8), "damaged: "),
    "half.tif": (truncated("TIFF", 0.8), ""),
    "planar.tif": (planar_tiff, "a variant of TIFF"),
    "float.tif": (tiff(np.asarray(picture().convert("L"), np.float32)), "a variant of TIFF"),
    "grey_alpha.tif": (lambda path: picture().convert("LA").save(path), "a variant of TIFF"),
    "hundred.ppm": (lambda path: path.write_bytes(b"P6 2 2 100\n" + bytes(range(12))), "a variant of TIFF"),
    "animated.png": (animated_png, "an animated PNG"),
    "huge.jpg": (claims_many_pixels, "3000000x2000000 pixels"),
}
NO_IMAGES: dict[str, Make] = {
    "notes.txt": lambda path: path.write_text("hello"),
    "Thumbs.db": lambda path: path.write_bytes(b"\xd0\xcf\x11\xe0"),
    ".DS_Store": lambda path: path.write_bytes(b"\0"),
    "._plain.jpg": lambda path: path.write_bytes(b"\0"),
    "folder.jpg": lambda path: path.mkdir(),
    "pipe.jpg": os.mkfifo,
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


def found_in(data: Dataset) -> dict[str, str]:
    """Returns the reasons of broken images by file name; also checks the count."""
    pieces = list(check(data, workers=2))
    assert sum(count for count, _ in pieces) == len(data)
    assert not active_children()
    return {Path(data.paths[one.index]).name: one.reason for _, broken in pieces for one in broken}


def test_check_finds_all_broken_images(dirty: Dataset) -> None:
    found = found_in(dirty)
    assert found.keys() == BROKEN.keys()
    assert all(found[name].startswith(reason) for name, (_, reason) in BROKEN.items()), found


WHOLE = Transform(size=20, resize=20, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))


def test_sound_images_equal_those_of_pillow(dirty: Dataset) -> None:
    """This includes CMYK colors, EXIF rotations and single pixels."""
    sound = dirty.without(one.index for one in broken_images(dirty, range(len(dirty))))
    assert {Path(path).name for path in sound.paths} == SOUND.keys() | {"1.png"}
    images = torch.cat([batch.images_NCHW for batch in Loader(sound, WHOLE, train=False, batch_size=7).epoch(0)]).numpy()
    shown = {Path(path).name: image for path, image in zip(sound.paths, images, strict=True)}
    assert np.abs(shown["deep_grey.tif"] - shown["grey.pgm"]).max() < 2, "Pillow clips 16 bits"
    for path, image in zip(sound.paths, images, strict=True):
        if not path.endswith("deep_grey.tif"):
            assert np.abs(image - pillow_validation(sound.root / path, 20, 20)).mean() < 2, path


@pytest.mark.parametrize("name", ["planar.tif", "animated.png", "huge.jpg"])
def test_loader_names_images_that_must_not_be_decoded(dirty: Dataset, name: str) -> None:
    """Decoding them would give wrong colors, crash the process or use up the memory."""
    images = dirty.only(index for index, path in enumerate(dirty.paths) if Path(path).name in (name, "plain.jpg", "plain.bmp"))
    with pytest.raises(DataError, match=rf"dirty/{name}: .*{BROKEN[name][1]}"):
        list(Loader(images, WHOLE, train=False, batch_size=3).epoch(0))


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


class Deadly(Source):
    """An image that crashes its process."""

    def read(self) -> bytes:
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError


def test_finds_images_that_crash_the_process(many: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Dataset.source
    deadly = {20, 21}
    monkeypatch.setattr(Dataset, "source", lambda data, index: (Deadly if index in deadly else Source)(*find(data, index)))
    found = found_in(many)
    assert found.pop("399.jpg").startswith("damaged")
    assert found.keys() == {"020.jpg", "021.jpg"} and all("crashes" in reason for reason in found.values())


def test_closing_the_iterator_ends_the_processes(many: Dataset, tmp_path: Path) -> None:
    """Which read shards here."""
    list(pack(many, tmp_path / "shards", 10**6, 1))
    pieces = check(Dataset.open_shards(tmp_path / "shards", "train"), 1)
    assert next(pieces) == (16, [])
    assert active_children()
    pieces.close()
    assert not active_children()
