"""Batches: which images, pixel values, reproducibility, error messages, reused pipelines, the GPU path."""

import gc
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from sklearn.datasets import load_sample_images
from torch.utils.dlpack import from_dlpack

from pipelines import DataError, Dataset, DecodingError, Loader, Transform, dali, sampler
from pipelines.loader import Batch, decoding_threads
from pipelines.transform import random_crops, random_mirrors, random_numbers

COUNT = 23
BY_CLASS = [index for label in range(3) for index in range(label, COUNT, 3)]
"""The images of `colours` in dataset order."""
PLAIN = Transform(size=16, resize=16, crop_area=(0.3, 1.0), flip=False, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
"""Keeps pixel values from 0 to 255."""
few = settings(max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""All examples can share a fixture, because they do not change images."""
AGREEMENT = 0.3
"""Allowed mean absolute difference from Pillow; pixel values go up to 255."""


def save(image: NDArray[np.uint8], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, quality=95)


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Images of a single colour, with red = 10 i in image i, in 3 classes; the same in train and val."""
    for split in ("train", "val"):
        for index in range(COUNT):
            colour = np.full((20, 30, 3), (10 * index, 7, 250), np.uint8)
            save(colour, tmp_path / split / f"class{index % 3}" / f"{index:02d}.png")
    return tmp_path


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    """Smooth images of odd sizes, darker on the left than on the right, so that mirrored ones can be recognized."""
    for index, (height, width) in enumerate([(40, 57), (61, 33), (48, 48), (90, 35)] * 4):
        row, column = np.mgrid[0:height, 0:width]
        grey = 20 + 215 * column / width
        image = np.stack([grey, 255 * row / height, 128 + 90 * np.sin((row + 3 * index) / 7)], axis=-1)
        for split in ("train", "val"):
            save(image.astype(np.uint8), tmp_path / split / f"class{index % 2}" / f"{index:02d}.png")
    return tmp_path


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """JPEGs with fine detail: landscapes, a portrait, one with an EXIF rotation, one in CMYK, and one in grayscale."""
    china, flower = (Image.fromarray(photograph) for photograph in load_sample_images().images)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for split in ("train", "val"):
        folder = tmp_path / split / "one"
        folder.mkdir(parents=True)
        china.save(folder / "0.jpg", quality=90)
        flower.save(folder / "1.jpg", quality=90)
        china.crop((150, 0, 450, 427)).save(folder / "2.jpg", quality=75)
        flower.save(folder / "3.jpg", quality=90, exif=turned)
        flower.convert("CMYK").save(folder / "4.jpg", quality=90)
        china.convert("L").save(folder / "5.jpg", quality=90)
    return tmp_path


def loader(
    root: Path,
    split: str,
    batch_size: int = 5,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    count: int | None = None,
    **changes: Any,
) -> Loader:
    """A loader of the split's first `count` images, by default of all. `changes` are fields of the transform."""
    data, transform = Dataset.scan(root, split), replace(PLAIN, **changes)
    data = data if count is None else data.only(range(count))
    return Loader(data, transform, train=split == "train", batch_size=batch_size, rank=rank, world_size=world_size, seed=seed)


def indices_seen(one: Loader) -> list[int]:
    """Returns the indices of the images, decoded from their colors; also checks the labels."""
    seen: list[int] = []
    for images, labels in one.epoch(0):
        assert images.shape[1:] == (3, 16, 16)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert len(images) == len(labels) > 0
        found = [round(red / 10) for red in images[:, 0].mean(dim=(1, 2)).tolist()]
        assert labels.tolist() == [index % 3 for index in found]
        seen += found
    return seen


@few
@given(st.integers(1, COUNT), st.integers(1, 30), st.integers(1, 4), st.sampled_from(["train", "val"]))
def test_ranks_see_each_image_once(colours: Path, count: int, batch: int, world: int, split: str) -> None:
    if split == "train" and count // sampler.steps(count, batch) < world:
        with pytest.raises(DataError, match="too few"):
            loader(colours, split, batch, world_size=world, count=count)
        return
    loaders = [loader(colours, split, batch, rank, world, count=count) for rank in range(world)]
    assert {one.steps for one in loaders} == {sampler.steps(count, batch)}
    seen = [image for one in loaders for image in indices_seen(one)]
    assert sorted(loaders[0].dataset.paths[BY_CLASS.index(image)] for image in seen) == sorted(loaders[0].dataset.paths)


def pixels(one: Loader, epoch: int) -> torch.Tensor:
    return torch.cat([batch.images_NCHW for batch in one.epoch(epoch)])


def steps_of(one: Loader, epoch: int) -> list[torch.Tensor]:
    return [batch.images_NCHW for batch in one.epoch(epoch)]


def test_image_depends_on_neither_batch_nor_ranks(shades: Path) -> None:
    alone = pixels(loader(shades, "train", batch_size=16, crop_padding=3), 1)
    assert torch.equal(pixels(loader(shades, "train", batch_size=5, crop_padding=3), 1), alone)
    by_rank = (loader(shades, "train", rank=rank, world_size=3, crop_padding=3) for rank in range(3))
    steps = zip(*(steps_of(one, 1) for one in by_rank), strict=True)
    assert torch.equal(torch.cat([torch.cat(step) for step in steps]), alone)


def test_padded_crops_are_those_of_validation_moved_within_the_padding(shades: Path) -> None:
    still, moved = (pixels(loader(shades, "train", crop_padding=padding), 0) for padding in (0, 2))
    in_order = pixels(loader(shades, "val"), 0)
    assert sorted(still.flatten(1).tolist()) == sorted(in_order.flatten(1).tolist())
    for image_CHW, crop_CHW in zip(still, moved, strict=True):
        padded_CHW = torch.nn.functional.pad(image_CHW, (2, 2, 2, 2))
        crops = [padded_CHW[:, top : top + 16, left : left + 16] for top in range(5) for left in range(5)]
        assert any(torch.equal(crop_CHW, crop) for crop in crops)


@few
@given(st.data(), st.integers(1, 16), st.integers(1, 3), st.sampled_from(["train", "val"]))
def test_rest_of_an_epoch_is_bit_identical(shades: Path, data: st.DataObject, batch: int, after: int, split: str) -> None:
    """Resumes after any step, with any number of ranks."""
    after = min(after, 16 // sampler.steps(16, batch))
    whole = list(loader(shades, split, batch).epoch(2))
    done = data.draw(st.integers(0, len(whole)))
    seen = sum(len(step.labels_N) for step in whole[:done])
    rest = [list(loader(shades, split, batch, rank, after).epoch(2, seen)) for rank in range(after)]
    for was, *parts in zip(whole[done:], *rest, strict=True):
        assert torch.equal(torch.cat([part.images_NCHW for part in parts]), was.images_NCHW)
        assert torch.equal(torch.cat([part.labels_N for part in parts]), was.labels_N)


def test_normalizes_with_mean_and_std(colours: Path) -> None:
    data = Dataset.scan(colours, "val")
    first = next(Loader(data, Transform(size=8, resize=9), train=False, batch_size=5).epoch(0)).images_NCHW[2]
    colour = np.array([60, 7, 250]) / 255
    expected = (colour - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.allclose(first.numpy(), expected[:, None, None], atol=1e-5)


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def pillow_validation(path: Path, size: int, resize: int) -> NDArray[np.float64]:
    """Returns the validation image by Pillow, [3, size, size] from 0 to 255; crops are rounded as in torchvision."""
    image = opened(path)
    width, height = (int(resize * side / min(image.size)) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)), np.float64).transpose(2, 0, 1)


@pytest.mark.parametrize("source", ["shades", "photographs"])
@pytest.mark.parametrize(("size", "resize"), [(16, 16), (24, 28), (64, 72), (224, 256)])
def test_validation_agrees_with_pillow(source: str, size: int, resize: int, request: pytest.FixtureRequest) -> None:
    one = loader(request.getfixturevalue(source), "val", size=size, resize=resize)
    ours = pixels(one, 0).numpy()
    theirs = np.stack([pillow_validation(one.dataset.root / path, size, resize) for path in one.dataset.paths])
    assert np.abs(ours - theirs).mean() < AGREEMENT


def pillow_training(one: Loader, epoch: int, index: int) -> NDArray[np.float64]:
    """Returns the training image by Pillow for the loader's random numbers."""
    numbers = random_numbers(one.seed, epoch, np.array([index]))
    image = opened(one.dataset.root / one.dataset.paths[index])
    windows = random_crops(one.transform, numbers, np.array([[image.height, image.width]]))
    (top, left), (height, width) = (window[0].tolist() for window in windows)
    crop = image.crop((left, top, left + width, top + height))
    square = crop.resize((one.transform.size, one.transform.size), Image.Resampling.BILINEAR)
    pixels_CHW = np.asarray(square, np.float64).transpose(2, 0, 1)
    return pixels_CHW[:, :, ::-1] if random_mirrors(one.transform, numbers)[0] else pixels_CHW


@pytest.mark.parametrize("source", ["shades", "photographs"])
def test_training_agrees_with_pillow(source: str, request: pytest.FixtureRequest) -> None:
    one = loader(request.getfixturevalue(source), "train", seed=3, size=96, resize=96, crop_area=(0.08, 1.0), flip=True)
    for epoch in range(2):
        sequence = sampler.epoch_order(len(one.dataset), one.seed, epoch)
        theirs = np.stack([pillow_training(one, epoch, index) for index in sequence])
        assert np.abs(pixels(one, epoch).numpy() - theirs).mean() < AGREEMENT


def damaged(kind: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "JPEG")
    whole = file.getvalue()
    return {"empty": b"", "text": b"no image", "header": whole[:300], "half": whole[: len(whole) // 2]}[kind]


@pytest.mark.parametrize(
    ("kind", "reason"), [("empty", "empty file"), ("text", "not an image"), ("header", "damaged: "), ("half", "damaged: ")]
)
def test_error_names_a_broken_image(colours: Path, kind: str, reason: str) -> None:
    (colours / "train/class1/13.png").write_bytes(damaged(kind))
    with pytest.raises(DataError, match=rf"train/class1/13\.png: .*{reason}.*san data check"):
        list(loader(colours, "train").epoch(0))


def test_error_names_an_image_that_has_changed_since_it_was_listed(colours: Path) -> None:
    """Results would be stored under the digest of the old images."""
    one = loader(colours, "val")
    path = one.dataset.root / one.dataset.paths[3]
    path.write_bytes(path.read_bytes() + b"one more")
    with pytest.raises(DataError, match=rf"{re.escape(one.dataset.paths[3])}: .* bytes, but had \d+ when it was listed"):
        list(one.epoch(0))


@pytest.mark.parametrize("split", ["train", "val"])
def test_error_names_a_truncated_jpeg_for_crops_above_the_missing_part(tmp_path: Path, split: str) -> None:
    tall = np.random.default_rng(0).integers(0, 255, (300, 40, 3), dtype=np.uint8)
    save(tall, tmp_path / split / "a/1.jpg")
    whole = (tmp_path / split / "a/1.jpg").read_bytes()
    (tmp_path / split / "a/2.jpg").write_bytes(whole + b"after the end")  # as some cameras do
    one = loader(tmp_path, split, batch_size=1, crop_area=(0.01, 0.02))
    assert sum(len(batch.labels_N) for epoch in range(3) for batch in one.epoch(epoch)) == 6

    (tmp_path / split / "a/1.jpg").write_bytes(whole[: len(whole) * 9 // 10])
    one = loader(tmp_path, split, batch_size=1, crop_area=(0.01, 0.02))
    for epoch in range(5):
        with pytest.raises(DataError, match=r"a/1\.jpg: .*damaged"):
            list(one.epoch(epoch))


def test_error_of_dali_names_the_images(colours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (colours / "val/class1/13.png").write_bytes(b"no image")
    monkeypatch.setattr("pipelines.loader.broken_images", lambda *_: iter(()))  # as if it were repaired now
    data = Dataset.scan(colours, "val")
    few = data.only(index for index, path in enumerate(data.paths) if path.startswith("val/class1/1"))
    with pytest.raises(DecodingError, match=r"val/class1/13\.png.*; its reason: .*nvImageCodec"):
        list(Loader(few, Transform(size=8, resize=8), train=False, batch_size=2).epoch(0))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Records the decoding pipelines."""
    made: list[weakref.ref[Any]] = []
    make = dali.decoding_pipeline

    def record(*arguments: Any) -> Any:
        pipeline = make(*arguments)
        made.append(weakref.ref(pipeline))
        return pipeline

    monkeypatch.setattr(dali, "decoding_pipeline", record)
    return made


@pytest.mark.parametrize("batch", [2, 5, 16])
def test_epochs_reuse_pipelines_with_identical_results(shades: Path, batch: int, built: list[weakref.ref[Any]]) -> None:
    one = loader(shades, "train", batch)
    for number, steps in ((0, 0), (1, 1), (1, 0), (2, one.steps - 1), (3, 0)):
        seen = one.seen_after(min(steps, one.steps))
        assert_same(list(one.epoch(number, seen)), list(loader(shades, "train", batch).epoch(number, seen)))
    assert sum(pipeline() is not None for pipeline in built) == 1


def assert_same(some: list[Batch], others: list[Batch]) -> None:
    assert len(some) == len(others)
    assert all(map(torch.equal, *([batch.images_NCHW for batch in batches] for batches in (some, others))))
    assert all(map(torch.equal, *([batch.labels_N for batch in batches] for batches in (some, others))))


def test_concurrent_epochs_use_separate_pipelines(shades: Path, built: list[weakref.ref[Any]]) -> None:
    one = loader(shades, "train")
    pairs = list(zip(one.epoch(0), one.epoch(1), strict=True))
    assert len(built) == 2
    for number, batches in enumerate(zip(*pairs, strict=True)):
        assert_same(list(batches), list(loader(shades, "train").epoch(number)))


def test_pipelines_are_not_reused_after_incomplete_epochs(shades: Path, built: list[weakref.ref[Any]]) -> None:
    one, expected = loader(shades, "train", batch_size=2), list(loader(shades, "train", batch_size=2).epoch(1))
    built.clear()
    gc.disable()  # pipelines must be freed without garbage collection
    try:
        left = one.epoch(0)
        next(left)
        assert_same(list(one.epoch(1)), expected)
        del left
        assert [pipeline() is None for pipeline in built] == [True, False]
        path = one.dataset.root / one.dataset.paths[7]
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)))
        for _ in range(2):
            with pytest.raises(DataError, match=one.dataset.paths[7]):
                list(one.epoch(1))
        path.write_bytes(whole)
        assert_same(list(one.epoch(1)), expected)
    finally:
        gc.enable()
    one.threads = 2
    assert_same(list(one.epoch(1)), expected)
    assert len(built) == 5, "the first, a concurrent one, one after each error, one with more threads"


def test_wait_seconds_exclude_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Loader(Dataset.synthetic("val", 2, 3), Transform(size=8, resize=8), train=False, batch_size=2)
    seconds, batches = [0.0], Loader._batches

    def slow(*arguments: Any) -> Iterator[Batch]:
        for batch in batches(*arguments):
            seconds[0] += 2
            yield batch

    monkeypatch.setattr("pipelines.loader.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(Loader, "_batches", slow)
    for _ in one.epoch(0):
        seconds[0] += 100
    assert one.wait_seconds == 2 * one.steps == 6


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (3, 2), (8, 7)])
def test_threads_leave_a_cpu_for_python(cpus: int, threads: int) -> None:
    assert decoding_threads(cpus) == threads


@pytest.mark.parametrize("train", [True, False])
def test_synthetic_batches_are_noise_with_correct_labels(train: bool) -> None:
    data = Dataset.synthetic("train", classes=3, per_class=4)
    one = Loader(data, PLAIN, train=train, batch_size=5)
    batches = list(one.epoch(0))
    assert [tuple(batch.images_NCHW.shape) for batch in batches] == [(4, 3, 16, 16)] * 3
    labels = torch.cat([batch.labels_N for batch in batches]).tolist()
    assert sorted(labels) == sorted(data.labels) and (labels == list(data.labels)) != train
    assert batches[0].images_NCHW.std() > 0.9
    assert all(map(torch.equal, steps_of(one, 0), steps_of(one, 1)))
    batches[0].images_NCHW.zero_()
    assert all(batch.images_NCHW.any() for batch in batches[1:])


@pytest.mark.parametrize("split", ["train", "val"])
def test_gpu_graph_gives_the_images_of_the_cpu(shades: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the graph for GPUs on the CPU."""
    pipeline = dali.Pipeline
    monkeypatch.setattr(dali, "Pipeline", lambda **settings: pipeline(**settings | {"device_id": None}))
    monkeypatch.setattr(dali, "GPU_DECODER", {"device": "cpu", "output_type": dali.types.RGB})
    monkeypatch.setattr(Loader, "_copy", lambda self, images: from_dlpack(images.as_tensor()).clone())
    monkeypatch.setattr("pipelines.loader.to_device", lambda tensor, device: tensor)
    on_cpu, on_gpu = loader(shades, split), loader(shades, split)
    on_gpu.device = torch.device("cuda", 0)
    for here, there in zip(on_cpu.epoch(1), on_gpu.epoch(1), strict=True):
        assert torch.equal(here.labels_N, there.labels_N)
        assert (here.images_NCHW - there.images_NCHW).abs().mean() < 2
