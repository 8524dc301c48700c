"""The resampler: the same result as torch's resize, limited to the visible region, with reused memory."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuda_ext.build import load
from pipelines import Transform
from pipelines.resample import _by_torch, resampler, visible_region
from pipelines.transform import CropParams, random_numbers, training_crops, validation_crops

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
"""Normalization that keeps the pixel values."""

sides = st.integers(1, 30) | st.integers(1, 400)


def pictures(sizes: list[tuple[int, int]], seed: int) -> list[NDArray[np.uint8]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def crops_of(transform: Transform, sizes: list[tuple[int, int]], train: bool) -> CropParams:
    sizes_N2 = np.array(sizes)
    if not train:
        return validation_crops(transform, sizes_N2)
    return training_crops(transform, random_numbers(7, 1, np.arange(len(sizes))), sizes_N2)


def cut(images: list[NDArray[np.uint8]], start_N2: NDArray[np.int32], extent_N2: NDArray[np.int32]) -> list[torch.Tensor]:
    """The regions that the decoder would return."""
    return [
        torch.from_numpy(image[top : top + height, left : left + width].copy())
        for image, (top, left), (height, width) in zip(images, start_N2.tolist(), extent_N2.tolist(), strict=True)
    ]


def run(operator: Callable[..., None], images: list[torch.Tensor], rows_N9: torch.Tensor, size: int) -> torch.Tensor:
    out_NCHW = torch.full((len(images), 3, size, size), torch.nan)
    operator(images, rows_N9, torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, -3.0, 7.0]), out_NCHW)
    return out_NCHW


@settings(max_examples=60)
@given(
    st.lists(st.tuples(sides, sides), min_size=1, max_size=3),
    st.integers(1, 40) | st.sampled_from([64, 65, 224]),
    st.integers(0, 40),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_matches_reference(sizes: list[tuple[int, int]], size: int, margin: int, train: bool, seed: int) -> None:
    """torch resizes the whole crop; the operator gets only the visible region."""
    transform = Transform(size=size, resize=size + margin)
    images, crops = pictures(sizes, seed), crops_of(transform, sizes, train)
    assert "resample" not in load(), "the kernels are built for tests"
    start_N2, extent_N2, settings_N9 = visible_region(crops, size)
    rows_N9 = torch.from_numpy(settings_N9)
    ours = run(torch.ops.san.resample, cut(images, start_N2, extent_N2), rows_N9, size)

    rows_N9[:, 2:4] = 0
    whole = run(_by_torch, cut(images, crops.start_N2, crops.extent_N2), rows_N9, size)
    # Both round to integers twice, and torch uses 16-bit weights, so values near one half may be rounded either way.
    # test_loader.py compares photographs with Pillow.
    difference = (ours - whole).abs() / torch.tensor([1.0, 2.0, 0.5])[:, None, None]
    assert difference.max() <= 2 and (difference == 2).sum() <= 0.1 * difference.numel()
    if size >= 16:
        assert (difference > 0).double().mean() < 0.5, "so many differences are not due to rounding"


@pytest.mark.parametrize("train", [True, False])
def test_visible_region_lies_in_crop(train: bool) -> None:
    transform, sizes = Transform(), [(375, 500), (500, 375), (3000, 4000)]
    crops = crops_of(transform, sizes, train)
    start_N2, extent_N2, _ = visible_region(crops, transform.size)
    assert (start_N2 >= crops.start_N2).all()
    assert (start_N2 + extent_N2 <= crops.start_N2 + crops.extent_N2).all()
    visible = extent_N2.prod(axis=1) / np.prod(sizes, axis=1)
    assert (visible < 0.62).all() if not train else (extent_N2 == crops.extent_N2).all()


def test_noncontiguous_image() -> None:
    transform = Transform(size=16, resize=20)
    start_N2, extent_N2, settings_N9 = visible_region(crops_of(transform, [(40, 60)], train=False), 16)
    (part,) = cut(pictures([(40, 60)], 0), start_N2, extent_N2)
    wide = torch.stack([part, part + 1], dim=-1).flatten(2)
    assert not wide[:, :, ::2].is_contiguous()
    rows_N9 = torch.from_numpy(settings_N9)
    assert torch.equal(*(run(torch.ops.san.resample, [image], rows_N9, 16) for image in (part, wide[:, :, ::2])))


IMAGE, ROW, OUT = (
    torch.zeros(30, 40, 3, dtype=torch.uint8),
    torch.tensor([[30, 40, 0, 0, 20, 26, 2, 5, 0]]),
    torch.empty(1, 3, 16, 16),
)


@pytest.mark.parametrize(
    ("image", "row", "out", "complaint"),
    [
        pytest.param(IMAGE[:20], ROW, OUT, "needs pixels 2 to 28, but the image holds 0 to 20", id="part"),
        pytest.param(IMAGE, ROW + 11 * (torch.arange(9) == 7), OUT, "does not show a square of 16", id="square"),
        pytest.param(IMAGE.short(), ROW, OUT, "images must be uint8", id="dtype"),
        pytest.param(IMAGE[:, :, :2], ROW, OUT, "images must be uint8", id="channels"),
        pytest.param(IMAGE, ROW, OUT.double(), "out must be float32", id="out"),
        pytest.param(IMAGE, ROW.int(), OUT, "windows must be int64", id="rows"),
    ],
)
def test_invalid_arguments_are_rejected(image: torch.Tensor, row: torch.Tensor, out: torch.Tensor, complaint: str) -> None:
    """Users cannot cause these errors, but a bug must not read invalid memory."""
    with pytest.raises(RuntimeError, match=complaint):
        torch.ops.san.resample([image], row, torch.ones(3), torch.zeros(3), out)


def test_result_does_not_depend_on_number_of_threads() -> None:
    sizes = [(30 + 7 * k, 90 - 5 * k) for k in range(11)]
    transform = Transform(size=24, resize=28, **PLAIN)
    start_N2, extent_N2, settings_N9 = visible_region(crops_of(transform, sizes, train=True), 24)
    regions = cut(pictures(sizes, 3), start_N2, extent_N2)
    found = []
    for threads in (1, 2, 3, 16):
        with resampler(transform, threads, max_batch=16) as squares:
            found.append(squares.begin(regions, settings_N9)().clone())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_memory_is_reused_only_after_all_views_are_gone() -> None:
    transform = Transform(size=8, resize=8)
    start_N2, extent_N2, settings_N9 = visible_region(crops_of(transform, [(20, 30)] * 4, train=True), 8)
    regions = cut(pictures([(20, 30)] * 4, 0), start_N2, extent_N2)
    with resampler(transform, 1, max_batch=4) as squares:
        first = squares.begin(regions, settings_N9)()
        place, view = first.data_ptr(), first[1:, :2].numpy()
        kept = view.copy()
        del first
        second = squares.begin([255 - region for region in regions], settings_N9)()
        assert np.array_equal(view, kept), "a view of a view still uses this memory"
        del view
        assert squares.begin(regions, settings_N9)().data_ptr() == place and second.data_ptr() != place


def test_error_in_thread_is_raised() -> None:
    transform = Transform(size=8, resize=8)
    region = visible_region(crops_of(transform, [(20, 20)], train=True), 8)
    with resampler(transform, 1, max_batch=1) as squares:
        finish = squares.begin([torch.zeros(2, 2, 3, dtype=torch.uint8)], region.settings_N9)
        with pytest.raises(RuntimeError, match="a square needs pixels"):
            finish()


def test_torch_replaces_the_operator_without_a_compiler(tmp_path: Path) -> None:
    code = """
import numpy as np, sys
from pipelines import Transform
from pipelines.transform import validation_crops
from pipelines.resample import resampler, visible_region
import torch
image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
transform = Transform(size=24, resize=28)
region = visible_region(validation_crops(transform, np.array([[50, 70]])), 24)
(top, left), (height, width) = region.start_N2[0].tolist(), region.extent_N2[0].tolist()
part = torch.from_numpy(image[top : top + height, left : left + width].copy())
with resampler(transform, 1, 1) as squares:
    np.save(sys.argv[1], squares.begin([part], region.settings_N9)().numpy())
"""
    found = []
    for name, environment in (("with", {}), ("without", {"PATH": "", "SAN_CACHE": str(tmp_path), "CXX": "none"})):
        out = tmp_path / f"{name}.npy"
        done = subprocess.run(
            [sys.executable, "-c", code, str(out)], env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("slower torch operators: none was not found; install g++" in done.stderr) == (name == "without")
        found.append(np.load(out))
    assert found[0].shape == (1, 3, 24, 24) and np.abs(found[0] - found[1]).mean() < 0.01
