"""What is read from an image folder, and what is refused."""

import hashlib
import os
import pickle
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import DataError, Dataset
from pipelines.datasets.dataset import _images, skipped_files


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
    assert list(data.labels) == [0, 1, 2, 2]
    assert len(data) == 4


def test_digest_follows_names_and_sizes(tmp_path: Path) -> None:
    put(tmp_path / "one", "val/a/1.jpg", "val/b/2.jpg")
    put(tmp_path / "two", "val/a/1.jpg", "val/b/2.jpg")
    one, two = (Dataset.scan(tmp_path / name, "val") for name in ("one", "two"))
    assert one.digest() == two.digest()
    assert len(one.digest()) == 16 and int(one.digest(), 16) >= 0
    (two.root / "val/a/1.jpg").write_bytes(b"longer than before")
    assert Dataset.scan(tmp_path / "two", "val").digest() != one.digest()
    assert one.digest() == two.digest()  # as it was listed
    (two.root / "val/a/1.jpg").unlink()
    assert one.digest() == two.digest()  # and the disk is not asked again
    put(tmp_path / "three", "val/a/3.jpg", "val/b/2.jpg")
    assert Dataset.scan(tmp_path / "three", "val").digest() != one.digest()


def test_names_and_sizes_give_the_digest_that_they_always_gave(tmp_path: Path) -> None:
    put(tmp_path, "val/a/1.jpg", "val/b/2.jpg")
    expected = hashlib.sha256(b"val/a/1.jpg\x0011\nval/b/2.jpg\x0011\n").hexdigest()[:16]
    assert Dataset.scan(tmp_path, "val").digest() == expected


def test_scan_takes_files_alone(tmp_path: Path) -> None:
    put(tmp_path, "val/a/1.jpg", "val/a/2.txt", "val/a/Thumbs.db", "val/a/.DS_Store", "elsewhere/3.jpg")
    (tmp_path / "val/a/folder.jpg").mkdir()
    os.mkfifo(tmp_path / "val/a/pipe.jpg")  # to read it would take forever
    (tmp_path / "val/a/link.jpg").symlink_to(tmp_path / "elsewhere/3.jpg")
    (tmp_path / "val/a/nowhere.jpg").symlink_to(tmp_path / "nothing")
    (tmp_path / "val/a/circle.jpg").symlink_to("circle.jpg")
    (tmp_path / "val/circle").symlink_to("circle")
    (tmp_path / "val/b").symlink_to(tmp_path / "elsewhere")
    data = Dataset.scan(tmp_path, "val")
    assert dict(zip(data.paths, data.sizes, strict=True)) == {
        "val/a/1.jpg": len("val/a/1.jpg"),
        "val/a/circle.jpg": 0,
        "val/a/link.jpg": len("elsewhere/3.jpg"),
        "val/a/nowhere.jpg": 0,
        "val/b/3.jpg": len("elsewhere/3.jpg"),
    }
    put(tmp_path, "val/4.jpg")
    assert skipped_files(tmp_path, "val") == [
        *("val/4.jpg", "val/circle"),  # beside the classes
        *("val/a/.DS_Store", "val/a/2.txt", "val/a/Thumbs.db"),
    ]


def test_a_folder_that_vanishes_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read this data folder \(No such file or directory: .*/val"):
        skipped_files(tmp_path, "val")


def test_a_link_to_the_folder_above_ends(tmp_path: Path) -> None:
    put(tmp_path, "val/a/1.jpg")
    (tmp_path / "val/b").symlink_to(tmp_path / "val")
    with pytest.raises(DataError, match=r"1 class folder without an image .*: b;"):
        Dataset.scan(tmp_path, "val")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("folder", ["", "val", "val/a"])
def test_rejects_what_may_not_be_read(tmp_path: Path, folder: str) -> None:
    put(tmp_path, "val/a/1.jpg")
    (tmp_path / folder).chmod(0)
    try:
        with pytest.raises(DataError, match=f"cannot read this data folder \\(Permission denied: {tmp_path / folder}"):
            Dataset.scan(tmp_path, "val")
    finally:
        (tmp_path / folder).chmod(0o700)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The class folders that are scanned; scans of any size are kept."""
    scanned: list[Path] = []
    monkeypatch.setattr("pipelines.datasets.dataset.KEPT_FROM", 1)
    monkeypatch.setattr("pipelines.datasets.dataset._images", lambda folder: scanned.append(folder) or _images(folder))
    return scanned


def settled(*folders: Path) -> None:
    """As if nothing had changed in these folders for some minutes."""
    for folder in folders:
        os.utime(folder, (0, folder.stat().st_mtime - 200))


def test_scan_is_kept_until_a_folder_changes(tmp_path: Path, scans: list[Path]) -> None:
    root, listings = tmp_path / "images", tmp_path / "listings"
    put(root, "train/a/1.jpg", "train/a/2.jpg", "train/b/1.jpg", "val/a/1.jpg")
    expected = Dataset.scan(root, "train")
    assert Dataset.open(root, "train", None, listings) == expected and not listings.exists(), "it may change again unseen"
    settled(root / "train/a", root / "train/b")
    assert Dataset.open(root, "train", None, listings) == expected
    scans.clear()
    assert Dataset.open(root, "train", None, listings) == expected and not scans
    assert Dataset.open(root, "val", None, listings) == Dataset.scan(root, "val") and scans, "another split is another scan"
    (listed,) = listings.iterdir()
    listed.write_bytes(b"damaged")
    assert Dataset.open(root, "train", None, listings) == expected

    (root / "train/b/1.jpg").write_bytes(b"another image")
    assert Dataset.open(root, "train", None, listings).sizes[-1] == len(b"another image"), "overwritten in place"
    put(root, "train/b/2.jpg")
    settled(root / "train/b")
    more = Dataset.open(root, "train", None, listings)
    assert more.paths[-1] == "train/b/2.jpg"
    assert [file.exists() for file in (listed, *listings.iterdir())] == [False, True], "the outdated one is removed"
    shutil.move(root / "train/b", root / "train/c")
    assert Dataset.open(root, "train", None, listings).classes == ("a", "c")


def test_small_sets_are_scanned_each_time(tmp_path: Path) -> None:
    put(tmp_path, "images/train/a/1.jpg")
    settled(tmp_path / "images/train/a")
    Dataset.open(tmp_path / "images", "train", None, tmp_path / "listings")
    assert not (tmp_path / "listings").exists()


def test_rejects_missing_root(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: no such data folder; expected .*absent/train/<class>"):
        Dataset.scan(tmp_path / "absent", "train")


@pytest.mark.parametrize("split", ["", ".", "..", "../x", "train/a", "two\nlines"])
def test_rejects_what_is_no_name_of_a_split(tmp_path: Path, split: str) -> None:
    for opened in (Dataset.scan, Dataset.open, Dataset.open_shards):
        with pytest.raises(DataError, match=rf"^{re.escape(repr(split))} is not a valid split; expected"):
            opened(tmp_path, split)


def test_rejects_missing_split(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg")
    with pytest.raises(DataError, match="has no folder val/"):
        Dataset.scan(tmp_path, "val")


def test_rejects_split_without_class_folders(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg")
    with pytest.raises(DataError, match="train: no class folders"):
        Dataset.scan(tmp_path, "train")


def test_rejects_empty_classes_and_names_all(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.jpg", "train/dog/notes.txt")
    (tmp_path / "train/eel").mkdir()
    with pytest.raises(DataError, match=r"2 class folders without an image .*: dog, eel; add"):
        Dataset.scan(tmp_path, "train")


def test_many_empty_classes_are_counted(tmp_path: Path) -> None:
    for name in range(14):
        (tmp_path / f"train/{name:02d}").mkdir(parents=True)
    with pytest.raises(DataError, match=r"14 class folders without an image .*: 00, .*, 09 and 4 more; add"):
        Dataset.scan(tmp_path, "train")


def test_rejects_splits_with_other_classes(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/b/1.jpg", "val/c/1.jpg")
    train, val = Dataset.scan(tmp_path, "train"), Dataset.scan(tmp_path, "val")
    with pytest.raises(DataError, match=r"val has no a and .*train has no c;"):
        train.require_same_classes(val)
    train.require_same_classes(train)


@pytest.fixture
def many(tmp_path: Path) -> Dataset:
    """20 images of class a, 12 of b, 5 of c."""
    put(tmp_path, *(f"train/{name}/{i:02d}.jpg" for name, count in (("a", 20), ("b", 12), ("c", 5)) for i in range(count)))
    return Dataset.scan(tmp_path, "train")


def test_first_takes_as_many_of_each_class(many: Dataset) -> None:
    few = many.first(4)
    assert list(few.labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert few.classes == many.classes
    assert list(few.paths) == sorted(few.paths)  # the order of the whole
    assert all(path.split("/")[1] == few.classes[label] for path, label in zip(few.paths, few.labels, strict=True))
    assert len(few.digest()) == 16 and few.digest() != many.digest()


def test_first_is_always_the_same_and_grows(many: Dataset) -> None:
    choices = [set(many.first(count).paths) for count in range(1, 6)]
    assert all(small < large for small, large in pairwise(choices))
    # Pinned, so that results stay comparable over the years.
    assert [path[6:10] for path in many.first(2).paths] == ["a/03", "a/07", "b/07", "b/10", "c/00", "c/01"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 36), max_size=8), st.integers(1, 5), st.integers(0, 2**70))
def test_an_image_that_goes_changes_its_own_pick_alone(many: Dataset, gone: set[int], per_class: int, seed: int) -> None:
    """Whatever its class, its place in the list, or what else is there."""
    gone = {index for index in gone if index < 32 and many.labels[:32].count(many.labels[index]) - len(gone) >= per_class}
    lost = {many.paths[index] for index in gone}
    before, after = (set(data.first(per_class, seed).paths) for data in (many, many.without(gone)))
    assert before - lost <= after and not after & lost
    assert len(after - before) == len(before & lost)


def test_the_choice_hangs_on_classes_and_names_alone(many: Dataset, tmp_path: Path) -> None:
    """Not on the name of the split's folder, nor on which classes there are besides."""
    names = [path.removeprefix("train/") for path in many.first(3, 7).paths]
    shutil.copytree(tmp_path / "train", tmp_path / "other")
    assert [path.removeprefix("other/") for path in Dataset.scan(tmp_path, "other").first(3, 7).paths] == names
    shutil.rmtree(tmp_path / "other/a")
    assert [path.removeprefix("other/") for path in Dataset.scan(tmp_path, "other").first(3, 7).paths] == names[3:]


def test_requires_the_sizes_that_were_listed(many: Dataset) -> None:
    many.require_sizes([], [])
    many.require_sizes(np.array([3, 20]), (14, 14))
    sentence = rf"{many.root}/train/b/00\.jpg: 12 bytes, but 14 when the file was listed; .*`san data check {many.root}`"
    with pytest.raises(DataError, match=sentence):
        many.require_sizes([3, 20], [14, 12])


def test_hold_out_parts_the_images(many: Dataset) -> None:
    train, val = many.hold_out(2)
    assert val == many.first(2)
    assert sorted([*train.paths, *val.paths]) == list(many.paths)
    assert train.classes == val.classes == many.classes
    with pytest.raises(DataError, match="too few images for 5 per class plus 1 to keep: c has 5; use at most 4"):
        many.hold_out(5)  # nothing would be left to train on
    (many.root / "train/c/00.jpg").rename(many.root / "train/a/20.jpg")
    for index in range(1, 4):
        (many.root / f"train/c/{index:02d}.jpg").unlink()
    with pytest.raises(DataError, match="1 to keep: c has 1; add images, or remove the class from all splits"):
        Dataset.scan(many.root, "train").hold_out(1)


def test_seeds_hold_out_other_images(many: Dataset) -> None:
    parts = [many.hold_out(2, seed) for seed in range(4)]
    assert parts[0] == many.hold_out(2)
    assert len({tuple(val.paths) for _, val in parts}) == 4
    for train, val in parts:
        assert not set(train.paths) & set(val.paths)
        assert sorted([*train.paths, *val.paths]) == list(many.paths)
        assert list(val.labels) == [0, 0, 1, 1, 2, 2]


def test_without_keeps_the_rest_in_order(many: Dataset) -> None:
    left = many.without([0, 21, 36])
    assert left.paths == tuple(path for index, path in enumerate(many.paths) if index not in (0, 21, 36))
    assert [left.labels.count(label) for label in range(3)] == [19, 11, 4]
    assert many.without([]) == many
    with pytest.raises(DataError, match=r"train: no readable image left in c; "):
        many.without(range(32, 37))


def test_images_reach_another_process_whole(many: Dataset) -> None:
    train, val = pickle.loads(pickle.dumps(many.hold_out(2)))
    assert (train, val) == many.hold_out(2)
    assert train != val and many.paths[2:] == tuple(many.paths)[2:] and many.paths[-1] == "train/c/04.jpg"


def test_images_tell_where_they_are(many: Dataset) -> None:
    assert not many.packed and not many.is_synthetic
    assert many.name_of(20) == many.source(20).file == str(many.root / "train/b/00.jpg")
    assert many.source(20).read() == b"train/b/00.jpg"


def test_synthetic_images_have_names_alone() -> None:
    data = Dataset.synthetic("train", classes=3, per_class=4)
    assert data.is_synthetic and not data.packed
    assert len(data) == len(set(data.paths)) == 12
    assert list(data.labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert len(data.classes) == 3 and list(data.classes) == sorted(data.classes)
    data.require_same_classes(Dataset.synthetic("val", classes=3, per_class=2))
    assert data.digest() != Dataset.synthetic("train", classes=4, per_class=3).digest()


def test_rejects_more_synthetic_images_than_fit_into_memory() -> None:
    with pytest.raises(
        DataError, match="1000000000 classes with 50 synthetic images each make 50000000000 images; the maximum is 5000000"
    ):
        Dataset.synthetic("train", classes=10**9, per_class=50)


def test_first_rejects_small_classes_and_names_all(many: Dataset) -> None:
    assert len(many.first(5)) == 15
    with pytest.raises(DataError, match=r"train: too few images for 13 per class: b has 12, c has 5; use at most 5"):
        many.first(13)


def test_data_error_is_a_value_error() -> None:
    assert issubclass(DataError, ValueError)
