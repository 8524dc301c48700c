"""Decoded images to squares on the CPU: torch's own resize, but only of what is seen, and in memory that is used again."""

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
from pipelines.resample import _by_torch, _Memory, _rows, parts, resampler
from pipelines.transform import Windows, draws, training_windows, validation_windows

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
"""Squares then hold the pixels' own values."""

sides = st.integers(1, 30) | st.integers(1, 400)


def pictures(sizes: list[tuple[int, int]], seed: int) -> list[NDArray[np.uint8]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def windows_of(transform: Transform, sizes: list[tuple[int, int]], train: bool) -> Windows:
    sizes_N2 = np.array(sizes)
    if not train:
        return validation_windows(transform, sizes_N2)
    return training_windows(transform, draws(7, 1, np.arange(len(sizes))), sizes_N2)


def cut(images: list[NDArray[np.uint8]], start_N2: NDArray[np.int32], extent_N2: NDArray[np.int32]) -> list[torch.Tensor]:
    """What the decoder would hand over."""
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
    """Torch resizes the whole crop; the operator gets only the part that the square shows."""
    transform = Transform(size=size, resize=size + margin)
    images, windows = pictures(sizes, seed), windows_of(transform, sizes, train)
    assert "resample" not in load(), "the kernels are built for tests"
    rows_N9 = _rows(windows, size)
    ours = run(torch.ops.san.resample, cut(images, *parts(windows, size)), rows_N9, size)

    rows_N9[:, 2:4] = 0
    whole = run(_by_torch, cut(images, windows.start_N2, windows.extent_N2), rows_N9, size)
    # Both round to whole pixel values twice, torch with weights of 16 bits: a half, which some ratios have often, may fall to
    # either side. How well photographs agree with Pillow stands in test_loader.py.
    difference = (ours - whole).abs() / torch.tensor([1.0, 2.0, 0.5])[:, None, None]
    assert difference.max() <= 2 and (difference == 2).sum() <= 0.1 * difference.numel()
    if size >= 16:
        assert (difference > 0).double().mean() < 0.5, "as many by one level as not: that is no rounding"


@pytest.mark.parametrize("train", [True, False])
def test_only_what_is_seen_is_decoded(train: bool) -> None:
    transform, sizes = Transform(), [(375, 500), (500, 375), (3000, 4000)]
    windows = windows_of(transform, sizes, train)
    start_N2, extent_N2 = parts(windows, transform.size)
    assert (start_N2 >= windows.start_N2).all()
    assert (start_N2 + extent_N2 <= windows.start_N2 + windows.extent_N2).all()
    seen = extent_N2.prod(axis=1) / np.prod(sizes, axis=1)
    assert (seen < 0.62).all() if not train else (extent_N2 == windows.extent_N2).all()


def test_noncontiguous() -> None:
    transform = Transform(size=16, resize=20)
    windows = windows_of(transform, [(40, 60)], train=False)
    (part,) = cut(pictures([(40, 60)], 0), *parts(windows, 16))
    wide = torch.stack([part, part + 1], dim=-1).flatten(2)
    assert not wide[:, :, ::2].is_contiguous()
    rows_N9 = _rows(windows, 16)
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
def test_rejects_impossible_windows(image: torch.Tensor, row: torch.Tensor, out: torch.Tensor, complaint: str) -> None:
    """Users never get here; a mistake of ours must not read foreign memory."""
    with pytest.raises(RuntimeError, match=complaint):
        torch.ops.san.resample([image], row, torch.ones(3), torch.zeros(3), out)


def test_batch_is_the_same_for_any_number_of_threads() -> None:
    sizes = [(30 + 7 * k, 90 - 5 * k) for k in range(11)]
    transform = Transform(size=24, resize=28, **PLAIN)
    images, windows = pictures(sizes, 3), windows_of(transform, sizes, train=True)
    found = []
    for threads in (1, 2, 3, 16):
        with resampler(transform, threads, max_batch=16) as squares:
            found.append(squares.begin(cut(images, *parts(windows, 24)), windows)().clone())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    memory = _Memory((4, 3, 8, 8))
    first, second = memory.take(4), memory.take(3)
    assert first.data_ptr() != second.data_ptr() and second.shape == (3, 3, 8, 8)
    place, view = first.data_ptr(), first[1:, :2].numpy()
    del first
    assert memory.take(4).data_ptr() != place, "a view of a view still shows it"
    del view
    assert memory.take(4).data_ptr() == place


def test_memory_that_is_kept_has_an_end() -> None:
    memory = _Memory((1, 3, 8, 8))
    held = [memory.take(1) for _ in range(20)]
    assert len({tensor.data_ptr() for tensor in held}) == 20 and len(memory._arrays) < 20


def test_failure_in_a_thread_reaches_the_caller() -> None:
    transform = Transform(size=8, resize=8)
    windows = windows_of(transform, [(20, 20)], train=True)
    with resampler(transform, 1, max_batch=1) as squares:
        finished = squares.begin([torch.zeros(2, 2, 3, dtype=torch.uint8)], windows)
        with pytest.raises(RuntimeError, match="a square needs pixels"):
            finished()


def test_without_a_compiler_torch_does_the_same(tmp_path: Path) -> None:
    code = """
import numpy as np, sys
from pipelines import Transform
from pipelines.transform import validation_windows
from pipelines.resample import parts, resampler
import torch
image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
transform = Transform(size=24, resize=28)
windows = validation_windows(transform, np.array([[50, 70]]))
(top, left), (height, width) = (pair[0].tolist() for pair in parts(windows, 24))
part = torch.from_numpy(image[top : top + height, left : left + width].copy())
with resampler(transform, 1, 1) as squares:
    np.save(sys.argv[1], squares.begin([part], windows)().numpy())
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
