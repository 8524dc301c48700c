"""What is read from an image folder, and what is refused."""

from itertools import pairwise
from pathlib import Path

import pytest

from pipelines import DataError, Dataset


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_scan_sorts_classes_and_files(tmp_path: Path) -> None:
    put(
        tmp_path,
        "val/b/2.jpg",
        "val/b/1.JPEG",
        "val/a-x/3.png",
        "val/a/4.jpeg",
        "val/a/note.txt",
        "val/a/._4.jpeg",
    )
    put(tmp_path, "val/.cache/5.jpg", "val/readme.txt")
    data = Dataset.scan(tmp_path, "val")
    assert data.classes == ("a", "a-x", "b")
    assert data.paths == ("val/a/4.jpeg", "val/a-x/3.png", "val/b/1.JPEG", "val/b/2.jpg")
    assert data.labels == (0, 1, 2, 2)
    assert len(data) == 4


def test_digest_follows_names_and_sizes(tmp_path: Path) -> None:
    put(tmp_path / "one", "val/a/1.jpg", "val/b/2.jpg")
    put(tmp_path / "two", "val/a/1.jpg", "val/b/2.jpg")
    one, two = (Dataset.scan(tmp_path / name, "val") for name in ("one", "two"))
    assert one.digest() == two.digest()
    assert len(one.digest()) == 16 and int(one.digest(), 16) >= 0
    (two.root / "val/a/1.jpg").write_bytes(b"longer than before")
    assert one.digest() != two.digest()


def test_rejects_missing_root(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data folder .*absent: expected .*absent/train/<class>"):
        Dataset.scan(tmp_path / "absent", "train")


def test_rejects_missing_split(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg")
    with pytest.raises(DataError, match="has no folder val/"):
        Dataset.scan(tmp_path, "val")


def test_rejects_split_without_class_folders(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg")
    with pytest.raises(DataError, match="train has no class folders"):
        Dataset.scan(tmp_path, "train")


def test_rejects_empty_classes_and_names_all(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.jpg", "train/dog/notes.txt")
    (tmp_path / "train/eel").mkdir()
    with pytest.raises(DataError, match=r"2 class folder\(s\) without an image .*: dog, eel\."):
        Dataset.scan(tmp_path, "train")


def test_rejects_splits_with_other_classes(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/b/1.jpg", "val/c/1.jpg")
    train, val = Dataset.scan(tmp_path, "train"), Dataset.scan(tmp_path, "val")
    with pytest.raises(DataError, match=r"val lacks a and .*train lacks c:"):
        train.require_same_classes(val)
    train.require_same_classes(train)


@pytest.fixture
def many(tmp_path: Path) -> Dataset:
    """20 images of class a, 12 of b, 5 of c."""
    put(tmp_path, *(f"train/{name}/{i:02d}.jpg" for name, count in (("a", 20), ("b", 12), ("c", 5)) for i in range(count)))
    return Dataset.scan(tmp_path, "train")


def test_first_takes_as_many_of_each_class(many: Dataset) -> None:
    few = many.first(4)
    assert few.labels == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert few.classes == many.classes
    assert list(few.paths) == sorted(few.paths)  # the order of the whole
    assert all(path.split("/")[1] == few.classes[label] for path, label in zip(few.paths, few.labels, strict=True))
    assert len(few.digest()) == 16 and few.digest() != many.digest()


def test_first_is_always_the_same_and_grows(many: Dataset) -> None:
    choices = [set(many.first(count).paths) for count in range(1, 6)]
    assert all(small < large for small, large in pairwise(choices))
    # Pinned, so that results stay comparable over the years.
    assert [path[6:10] for path in many.first(2).paths] == ["a/04", "a/19", "b/00", "b/07", "c/02", "c/04"]


def test_hold_out_parts_the_images(many: Dataset) -> None:
    train, val = many.hold_out(2)
    assert val == many.first(2)
    assert sorted(train.paths + val.paths) == list(many.paths)
    assert train.classes == val.classes == many.classes
    with pytest.raises(DataError, match="too few images for 5 of each class and 1 to be left: c has 5; ask for at most 4"):
        many.hold_out(5)  # nothing would be left to train on


def test_first_rejects_small_classes_and_names_all(many: Dataset) -> None:
    assert len(many.first(5)) == 15
    with pytest.raises(DataError, match=r"train has too few images for 13 of each class: b has 12, c has 5; ask for at most 5"):
        many.first(13)


def test_data_error_is_a_value_error() -> None:
    assert issubclass(DataError, ValueError)
