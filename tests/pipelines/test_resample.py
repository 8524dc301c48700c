"""The resampler: the same result as torch's resize, limited to the visible region, with reused memory."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuda_ext.build import load
from pipelines import Transform, resample
from pipelines.resample import resample_by_torch, resampler, visible_region
from pipelines.transform import CropParams, random_numbers, training_crops, validation_crops

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


def regions_of(transform: Transform, sizes: list[tuple[int, int]], train: bool) -> tuple[list[torch.Tensor], NDArray[np.int64]]:
    """The regions of random pictures of these sizes, and the settings of the operator."""
    start_N2, extent_N2, settings_N9 = visible_region(crops_of(transform, sizes, train), transform.size)
    return cut(pictures(sizes, 0), start_N2, extent_N2), settings_N9


def run(operator: Callable[..., None], images: list[torch.Tensor], rows_N9: torch.Tensor, size: int) -> torch.Tensor:
    out_NCHW = torch.full((len(images), 3, size, size), torch.nan)
    operator(images, rows_N9, torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, -3.0, 7.0]), out_NCHW)
    return out_NCHW


@pytest.mark.every_isa
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
    whole = run(resample_by_torch, cut(images, crops.start_N2, crops.extent_N2), rows_N9, size)
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


def test_memory_is_reused_only_after_all_views_are_gone() -> None:
    transform = Transform(size=8, resize=8)
    regions, settings_N9 = regions_of(transform, [(20, 30)] * 4, train=True)
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


def test_torch_replaces_the_operator_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def square() -> torch.Tensor:
        transform = Transform(size=24, resize=28)
        regions, settings_N9 = regions_of(transform, [(50, 70)], train=False)
        with resampler(transform, threads=1, max_batch=1) as squares:
            return squares.begin(regions, settings_N9)()

    usual = square()
    monkeypatch.setattr(resample, "load_kernels", lambda: {"resample": "no compiler was found"})
    monkeypatch.setattr(resample, "_has_operator", functools.cache(resample._has_operator.__wrapped__))
    with pytest.warns(UserWarning, match="slower torch operators: no compiler was found"):
        assert (square() - usual).abs().mean() < 0.01
