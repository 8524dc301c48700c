"""Data sets: scans of image folders, subsets, digests, error messages."""

import hashlib
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import DataError, Dataset
from pipelines.datasets.manifest import list_path, write_list
from pipelines.datasets.pack import pack


def put(root: Path, *names: str) -> None:
    """Writes files that contain their own names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_scan_sorts_classes_and_files(tmp_path: Path) -> None:
    put(tmp_path, "val/b/2.jpg", "val/b/1.JPEG", "val/a-x/3.png", "val/a/4.jpeg")
    put(tmp_path, "val/a/note.txt", "val/a/._4.jpeg", "val/.cache/5.jpg", "val/readme.txt")
    data = Dataset.scan(tmp_path, "val")
    assert data.classes == ("a", "a-x", "b")
    assert data.paths == ("val/a/4.jpeg", "val/a-x/3.png", "val/b/1.JPEG", "val/b/2.jpg")
    assert list(data.labels) == [0, 1, 2, 2]
    assert len(data) == 4


def test_digest_depends_on_names_and_sizes(tmp_path: Path) -> None:
    put(tmp_path / "one", "val/a/1.jpg", "val/b/2.jpg")
    put(tmp_path / "two", "val/a/1.jpg", "val/b/2.jpg")
    one, two = (Dataset.scan(tmp_path / name, "val") for name in ("one", "two"))
    assert one.digest() == two.digest()
    (two.root / "val/a/1.jpg").write_bytes(b"longer than before")
    assert Dataset.scan(tmp_path / "two", "val").digest() != one.digest()
    (two.root / "val/b/2.jpg").unlink()
    assert one.digest() == two.digest(), "the digest must use the sizes of the scan"
    put(tmp_path / "three", "val/a/3.jpg", "val/b/2.jpg")
    assert Dataset.scan(tmp_path / "three", "val").digest() != one.digest()
    # Recorded runs contain this digest.
    assert one.digest() == hashlib.sha256(b"val/a/1.jpg\x0011\nval/b/2.jpg\x0011\n").hexdigest()[:16]


def test_scan_skips_other_files(tmp_path: Path) -> None:
    put(tmp_path, "val/a/1.jpg", "val/a/2.txt", "val/a/Thumbs.db", "val/a/.DS_Store", "elsewhere/3.jpg")
    (tmp_path / "val/a/folder.jpg").mkdir()
    (tmp_path / "val/a/link.jpg").symlink_to(tmp_path / "elsewhere/3.jpg")
    put(tmp_path, "outside/4.JPEG", "outside/deep/5.tiff")
    (tmp_path / "val/b").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "val/a/pipe.png")
    data = Dataset.scan(tmp_path, "val")
    assert dict(zip(data.paths, data.sizes, strict=True)) == {
        "val/a/1.jpg": len("val/a/1.jpg"),
        "val/a/link.jpg": len("elsewhere/3.jpg"),
        "val/b/4.JPEG": len("outside/4.JPEG"),
        "val/b/deep/5.tiff": len("outside/deep/5.tiff"),
    }
    assert data.skipped == "1 .db, 1 .txt, 1 special files"
    (tmp_path / "val/a/nowhere.jpg").symlink_to(tmp_path / "nothing")
    (tmp_path / "val/a/itself.jpg").symlink_to("itself.jpg")
    put(tmp_path, "val/loose.jpg", "val/.hidden")
    assert (
        Dataset.scan(tmp_path, "val").skipped
        == "2 broken links, 1 .db, 1 .txt, 1 files beside the class folders, 1 special files"
    )
    (tmp_path / "val/c").symlink_to("not mounted")
    with pytest.raises(DataError, match="broken links: c; "):
        Dataset.scan(tmp_path, "val")


def test_each_file_counts_once(tmp_path: Path) -> None:
    put(tmp_path, "val/a/1.jpg", "val/a/sub/2.jpg", "val/b/3.jpg", "outside/4.jpg")
    for link, target in {
        "val/a/loop": ".",
        "val/a/up": "..",
        "val/a/sub/back": "../../a",
        "val/a/again": "sub",
        "val/b/0.jpg": "3.jpg",
        "val/b/5.jpg": "../a/1.jpg",
        "val/b/6.jpg": "../../outside/4.jpg",
        "val/c": "../outside",
    }.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "outside/7.jpg").write_text("another file")
    os.link(tmp_path / "val/a/1.jpg", tmp_path / "val/b/hard.jpg")
    data = Dataset.scan(tmp_path, "val")
    assert data.paths == ("val/a/1.jpg", "val/a/sub/2.jpg", "val/b/3.jpg", "val/b/6.jpg", "val/c/7.jpg")
    assert data.skipped == "1 links to folders above, 4 further names of the same files (links)"
    (tmp_path / "val/all").symlink_to(".")
    with pytest.raises(DataError, match=r"links lead to those of other classes.*: all;"):
        Dataset.scan(tmp_path, "val")


def test_subfolders_belong_to_their_class(tmp_path: Path) -> None:
    """In folders, lists and shards alike."""
    put(tmp_path, "train/a/1.jpg", "elsewhere/1.jpg", "train/a/x/y/2.png", "train/a/.hidden/3.jpg", "train/b/z/1.jpg")
    put(tmp_path, "further/2.png")
    (tmp_path / "elsewhere/y").symlink_to(tmp_path / "further")
    (tmp_path / "train/a/w").symlink_to(tmp_path / "elsewhere")
    data = Dataset.scan(tmp_path, "train")
    in_a = [f"train/a/{name}" for name in ("1.jpg", "w/1.jpg", "w/y/2.png", "x/y/2.png")]
    assert list(data.paths) == [*in_a, "train/b/z/1.jpg"]
    assert (data.classes, list(data.labels)) == (("a", "b"), [0, 0, 0, 0, 1])
    write_list(list_path(tmp_path, "train"), data.paths, data.sizes)
    listed = Dataset.open(tmp_path, "train")
    list(pack(data, tmp_path / "shards", 2**20, workers=1))
    packed = Dataset.open_shards(tmp_path / "shards", "train")
    for other in (listed, packed):
        assert (other.classes, list(other.labels), other.digest()) == (data.classes, list(data.labels), data.digest())


@pytest.mark.parametrize("split", ["", ".", "..", "../x", "train/a", "two\nlines"])
def test_rejects_invalid_names_of_splits(tmp_path: Path, split: str) -> None:
    for opened in (Dataset.scan, Dataset.open, Dataset.open_shards):
        with pytest.raises(DataError, match=re.escape(repr(split))):
            opened(tmp_path, split)


@pytest.mark.parametrize(
    ("files", "folders", "message"),
    [
        ([], [], "no such data folder"),
        (["val/a/1.jpg"], [], "no folder train/"),
        (["train.index"], [], "contains shards of train; set data.source=shards"),
        (["train/1.jpg"], [], "no class folders"),
        (["train/cat/1.jpg", "train/dog/notes.txt"], ["eel"], "2 class folders .*: dog, eel"),
    ],
    ids=["no folder", "no split", "shards", "no classes", "empty classes"],
)
def test_rejects_incomplete_folders(tmp_path: Path, files: list[str], folders: list[str], message: str) -> None:
    put(tmp_path / "images", *files)
    for folder in folders:
        (tmp_path / "images/train" / folder).mkdir(parents=True)
    with pytest.raises(DataError, match=message):
        Dataset.scan(tmp_path / "images", "train")


def test_rejects_splits_with_other_classes(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/b/1.jpg", "val/c/1.jpg")
    train, val = Dataset.scan(tmp_path, "train"), Dataset.scan(tmp_path, "val")
    with pytest.raises(DataError, match=r"val has no a and .*train has no c"):
        train.require_same_classes(val)
    train.require_same_classes(train)


@pytest.fixture
def many(tmp_path: Path) -> Dataset:
    """20 images of class a, 12 of b, 5 of c."""
    put(tmp_path, *(f"train/{name}/{i:02d}.jpg" for name, count in (("a", 20), ("b", 12), ("c", 5)) for i in range(count)))
    return Dataset.scan(tmp_path, "train")


def test_first_chooses_equally_many_images_of_each_class(many: Dataset) -> None:
    few = many.first(4)
    assert list(few.labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert few.classes == many.classes and few.digest() != many.digest()
    assert list(few.paths) == sorted(few.paths)
    assert all(path.split("/")[1] == few.classes[label] for path, label in zip(few.paths, few.labels, strict=True))
    choices = [set(many.first(count).paths) for count in range(1, 6)]
    assert all(small < large for small, large in pairwise(choices))
    # A change would make earlier results incomparable.
    assert [path[6:10] for path in many.first(2).paths] == ["a/03", "a/07", "b/07", "b/10", "c/00", "c/01"]
    with pytest.raises(DataError, match="b has 12, c has 5"):
        many.first(13)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 36), max_size=8), st.integers(1, 5), st.integers(0, 2**70))
def test_removed_images_do_not_change_the_choice_of_others(many: Dataset, gone: set[int], per_class: int, seed: int) -> None:
    gone = {index for index in gone if index < 32 and many.labels[:32].count(many.labels[index]) - len(gone) >= per_class}
    lost = {many.paths[index] for index in gone}
    before, after = (set(data.first(per_class, seed).paths) for data in (many, many.without(gone)))
    assert before - lost <= after and not after & lost
    assert len(after - before) == len(before & lost)


def test_choice_is_independent_of_split_and_other_classes(many: Dataset, tmp_path: Path) -> None:
    names = [path.removeprefix("train/") for path in many.first(3, 7).paths]
    shutil.copytree(tmp_path / "train", tmp_path / "other")
    assert [path.removeprefix("other/") for path in Dataset.scan(tmp_path, "other").first(3, 7).paths] == names
    shutil.rmtree(tmp_path / "other/a")
    assert [path.removeprefix("other/") for path in Dataset.scan(tmp_path, "other").first(3, 7).paths] == names[3:]


def test_hold_out_splits_the_images(many: Dataset) -> None:
    parts = [many.hold_out(2, seed) for seed in range(4)]
    assert parts[0] == many.hold_out(2) and parts[0][1] == many.first(2)
    assert len({tuple(val.paths) for _, val in parts}) == 4
    for train, val in parts:
        assert sorted([*train.paths, *val.paths]) == list(many.paths)
        assert list(val.labels) == [0, 0, 1, 1, 2, 2]
        assert train.classes == val.classes == many.classes


def test_hold_out_rejects_small_classes(many: Dataset) -> None:
    with pytest.raises(DataError, match="c has 5"):
        many.hold_out(5)  # would leave no training image of class c
    with pytest.raises(DataError, match="c has 1"):
        many.without(range(33, 37)).hold_out(1)


def test_without_keeps_the_rest_in_order(many: Dataset) -> None:
    left = many.without([0, 21, 36])
    assert left.paths == tuple(path for index, path in enumerate(many.paths) if index not in (0, 21, 36))
    assert [left.labels.count(label) for label in range(3)] == [19, 11, 4]
    assert many.without([]) == many
    with pytest.raises(DataError, match="left in c"):
        many.without(range(32, 37))


def test_synthetic_data_sets() -> None:
    data = Dataset.synthetic("train", classes=3, per_class=4)
    assert data.is_synthetic and not data.packed
    assert len(data) == len(set(data.paths)) == 12
    assert list(data.labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert len(data.classes) == 3 and list(data.classes) == sorted(data.classes)
    data.require_same_classes(Dataset.synthetic("val", classes=3, per_class=2))
    assert data.digest() != Dataset.synthetic("train", classes=4, per_class=3).digest()
