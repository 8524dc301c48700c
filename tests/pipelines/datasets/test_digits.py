"""The embedded digits: contents, reproducibility, concurrent preparation, error messages."""

import multiprocessing
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

from pipelines import DataError, Dataset, prepare_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_digits(tmp_path_factory.mktemp("data") / "new" / "digits")


@pytest.fixture
def copy(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "digits"))


def pixels(folder: Path, index: int) -> NDArray[np.float64]:
    with Image.open(next(folder.glob(f"*/*/{index:04d}.jpg"))) as image:
        assert image.mode == "L"
        return np.asarray(image, np.float64)


def test_counts(digits: Path) -> None:
    train, val = Dataset.scan(digits, "train"), Dataset.scan(digits, "val")
    assert train.classes == val.classes == tuple("0123456789")
    assert (len(train), len(val)) == (1437, 360)
    assert set(Counter(val.labels).values()) == {36}


def test_each_image_is_in_the_folder_of_its_digit(digits: Path) -> None:
    files = sorted(digits.glob("*/*/*.jpg"), key=lambda file: file.name)
    assert [int(file.stem) for file in files] == list(range(1797))
    assert [int(file.parent.name) for file in files] == load_digits().target.tolist()


def small(digit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reduces an image to the size and range of the originals: 8x8, 0 to 16."""
    image = Image.fromarray(digit.astype(np.uint8)).resize((8, 8), Image.Resampling.BOX)
    return np.asarray(image, np.float64) * (16 / 255)


def test_images_equal_the_originals(digits: Path) -> None:
    image = pixels(digits, 42)
    assert image.shape == (32, 32)
    assert np.abs(small(image) - load_digits().images[42]).mean() < 0.8


def test_preparation_is_reproducible(digits: Path, tmp_path: Path) -> None:
    again = prepare_digits(tmp_path / "digits")
    for split in ("train", "val"):
        assert Dataset.scan(again, split).digest() == Dataset.scan(digits, split).digest()
    assert all((again / file.relative_to(digits)).read_bytes() == file.read_bytes() for file in digits.glob("val/*/*.jpg"))
    # A change would make earlier results incomparable.
    first = [file.stem for file in sorted((digits / "val/0").iterdir())][:4]
    assert first == ["0048", "0079", "0335", "0386"]


def test_second_call_changes_nothing(copy: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in copy.rglob("*")}
    assert prepare_digits(copy) == copy
    assert {file: file.stat().st_mtime_ns for file in copy.rglob("*")} == before


@pytest.mark.slow
def test_concurrent_calls(tmp_path: Path) -> None:
    root = tmp_path / "digits"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(prepare_digits, [root] * 2) == [root] * 2
    assert len(Dataset.scan(root, "val")) == 360
    assert [entry.name for entry in tmp_path.iterdir()] == ["digits"]


def test_rejects_unrelated_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not lose this")
    with pytest.raises(DataError, match="no folders train and val"):
        prepare_digits(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
