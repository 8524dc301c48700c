"""Random crops and mirrors, which depend only on seed, epoch and index."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines import Transform
from pipelines.transform import random_crops, random_mirrors, random_numbers, shifted

sides = st.integers(1, 60) | st.integers(1, 9000)
seeds = st.integers(0, 2**40)
transforms = st.sampled_from(
    [
        Transform(),
        Transform(crop_area=(0.3, 1.0), crop_ratio=(0.5, 0.6)),
        Transform(crop_area=(0.9, 1.0), crop_ratio=(2.0, 7.0)),
        Transform(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0)),
    ]
)


def usual_crop(transform: Transform, numbers: list[float], height: int, width: int) -> tuple[int, int, int, int]:
    """The usual random resized crop of one image: top, left, height, width."""
    (least, most), (narrow, wide) = transform.crop_area, transform.crop_ratio
    for attempt in range(10):
        area = (least + (most - least) * numbers[attempt]) * (height * width)
        ratio = math.exp(math.log(narrow) + (math.log(wide) - math.log(narrow)) * numbers[10 + attempt])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return math.floor((height - h + 1) * numbers[20]), math.floor((width - w + 1) * numbers[21]), h, w
    h, w = height, width
    if width / height < narrow:
        h = max(round(width / narrow), 1)
    elif width / height > wide:
        w = max(round(height * wide), 1)
    return (height - h) // 2, (width - w) // 2, h, w


@given(transforms, st.lists(st.tuples(sides, sides), min_size=1, max_size=20), seeds)
def test_crops_equal_the_usual_ones(transform: Transform, sizes: list[tuple[int, int]], seed: int) -> None:
    numbers = random_numbers(seed, 3, np.arange(len(sizes)))
    ours = np.concatenate(random_crops(transform, numbers, np.array(sizes)), axis=1)
    theirs = [usual_crop(transform, row, *size) for row, size in zip(numbers.tolist(), sizes, strict=True)]
    assert ours.dtype == np.int32 and ours.tolist() == [list(window) for window in theirs]


def many_crops(transform: Transform) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return random_crops(transform, random_numbers(5, 1, np.arange(4000)), np.array([[375, 500]] * 4000))


def test_half_of_the_images_are_mirrored() -> None:
    numbers = random_numbers(5, 1, np.arange(4000))
    mirror = random_mirrors(Transform(), numbers)
    assert set(mirror.tolist()) == {0, 1} and abs(mirror.mean() - 0.5) < 0.03
    assert not random_mirrors(Transform(flip=False), numbers).any()
    assert all(map(np.array_equal, many_crops(Transform()), many_crops(Transform(flip=False))))


@given(st.lists(st.integers(0, 2_000_000), max_size=30), seeds, st.integers(0, 1000))
def test_random_numbers_depend_only_on_their_index(indices: list[int], seed: int, epoch: int) -> None:
    together = random_numbers(seed, epoch, np.array(indices, dtype=np.int64))
    alone = [random_numbers(seed, epoch, np.array([index]))[0] for index in indices]
    assert together.tolist() == [row.tolist() for row in alone]


def test_random_numbers_are_uniform_and_differ() -> None:
    numbers = np.stack([random_numbers(seed, epoch, np.arange(2000)) for seed in (0, 1) for epoch in (0, 1)])
    assert len(np.unique(numbers)) == numbers.size
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.allclose(numbers.mean(axis=(0, 1)), 0.5, atol=0.02)


def test_random_numbers_are_pinned() -> None:
    """A change would make earlier runs irreproducible."""
    assert random_numbers(1, 2, np.array([7]))[0, :3].tolist() == [0.44639269526401415, 0.1868319057143616, 0.4119892057706497]


@given(st.integers(1, 9), st.integers(0, 9), seeds)
def test_shifted_images_are_crops_of_padded_ones(size: int, padding: int, seed: int) -> None:
    transform = Transform(size=size, resize=size, crop_padding=min(padding, size))
    numbers = random_numbers(seed, 0, np.arange(3))
    images_NCHW = torch.randn(3, 3, size, size)
    shifted_NCHW = shifted(images_NCHW, transform, numbers)
    for image_CHW, crop_CHW, row in zip(images_NCHW, shifted_NCHW, numbers, strict=True):
        side = size + 2 * min(padding, size)
        padded_CHW = (-torch.tensor(transform.mean) / torch.tensor(transform.std))[:, None, None].repeat(1, side, side)
        padded_CHW[:, side - size >> 1 :, side - size >> 1 :][:, :size, :size] = image_CHW
        top, left = (math.floor((side - size + 1) * row[at]) for at in (20, 21))
        assert torch.equal(crop_CHW, padded_CHW[:, top : top + size, left : left + size])
