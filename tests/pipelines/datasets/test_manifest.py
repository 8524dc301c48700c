"""Image lists, which replace scans of folders: contents, damage, error messages."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import DataError, Dataset
from pipelines.datasets.manifest import list_path, read_list, write_list
from tests.pipelines.datasets.test_dataset import put

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n/"), min_size=1, max_size=8)
ROWS = st.lists(st.tuples(st.builds("train/{}/{}".format, NAMES, NAMES), st.integers(0, 10**12)), min_size=1, max_size=6)
# All examples can share a folder, because each one overwrites the file.
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def listed(root: Path, split: str, folder: Path | None = None) -> Dataset:
    """Scans a split and writes its list."""
    data = Dataset.scan(root, split)
    write_list(list_path(folder or root, split), data.paths, data.sizes)
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, *(f"train/{name}/{index}.jpg" for name in "abc" for index in range(3)), "val/a/1.jpg")
    return tmp_path


@shared_folder
@given(rows=ROWS)
def test_round_trip(tmp_path: Path, rows: list[tuple[str, int]]) -> None:
    paths, sizes = map(list, zip(*rows, strict=True))
    write_list(tmp_path / "train.txt", paths, sizes)
    assert list(map(list, read_list(tmp_path / "train.txt"))) == [paths, sizes]
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.txt"]


def test_rejects_any_changed_byte(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    write_list(path, ["train/a/1.jpg", "train/b/20.jpg"], [17, 2048])
    written = path.read_bytes()
    for place, right in enumerate(written):
        for wrong in {right ^ 1, right ^ 128, *b" \t\n\r\v_09#x"} - {right}:
            path.write_bytes(written[:place] + bytes([wrong]) + written[place + 1 :])
            with pytest.raises(DataError, match=r"train\.txt: (not an image list|damaged or edited by hand)"):
                read_list(path)


@pytest.mark.parametrize("text", ["", "n01440764/1.JPEG 0\nn01440764/2.JPEG 0\n"])
def test_never_overwrites_other_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.txt"
    path.write_text(text)
    for call in (lambda: read_list(path), lambda: write_list(path, ["train/a/1.jpg"], [1])):
        with pytest.raises(DataError, match=r"train\.txt: .*not an image list"):
            call()
    assert path.read_text() == text


def test_overwrites_a_damaged_list(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("# digest e3b0c44298fc1c14\n")
    with pytest.raises(DataError, match="damaged"):
        read_list(path)
    write_list(path, ["train/a/1.jpg"], [1])
    assert list(read_list(path)[1]) == [1]


def test_rejects_names_with_line_breaks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line break"):
        write_list(tmp_path / "train.txt", ["train/a/1\n.jpg"], [1])
    assert not list(tmp_path.iterdir())


def test_rejects_a_broken_link(folder: Path) -> None:
    (folder / "train.txt").symlink_to("lists/train.txt")
    with pytest.raises(DataError, match=r"train\.txt: .*No such file"):
        Dataset.open(folder, "train")


def test_rejects_the_list_of_another_split(folder: Path) -> None:
    data = Dataset.scan(folder, "val")
    write_list(list_path(folder, "train"), data.paths, data.sizes)
    with pytest.raises(DataError, match=r"train\.txt: .*val/.*train/"):
        Dataset.open(folder, "train")


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    name = b"caf\xe9.jpg".decode(errors="surrogateescape")
    (tmp_path / "train/a").mkdir(parents=True)
    (tmp_path / "train/a" / name).write_bytes(b"image")
    assert listed(tmp_path, "train") == Dataset.open(tmp_path, "train")
    assert Dataset.open(tmp_path, "train").paths == (f"train/a/{name}",)


def test_open_scans_only_without_a_list(folder: Path) -> None:
    scanned = listed(folder, "train")
    shutil.move(folder / "train/b/1.jpg", folder / "train/b/9.jpg")
    assert Dataset.open(folder, "train") == scanned
    assert Dataset.open(folder, "val") == Dataset.scan(folder, "val")


def test_list_in_the_folder_of_lists_has_priority(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    lists = tmp_path_factory.mktemp("lists")
    scanned = listed(folder, "train")
    assert Dataset.open(folder, "train", lists) == scanned
    few = scanned.first(1)
    write_list(list_path(lists, "train"), few.paths, few.sizes)
    assert Dataset.open(folder, "train", lists) == few
    assert Dataset.open(folder, "train") == scanned
    with pytest.raises(DataError, match="/nowhere: no such folder"):
        Dataset.open(folder, "train", lists / "nowhere")


def test_rejects_a_list_of_other_classes(folder: Path) -> None:
    listed(folder, "train")
    shutil.move(folder / "train/b", folder / "train/d")
    with pytest.raises(DataError, match=r"has no d and .*has no b"):
        Dataset.open(folder, "train")


@pytest.mark.parametrize("path", ["train/1.jpg", "val/a/1.jpg"])
def test_rejects_paths_of_another_layout(folder: Path, path: str) -> None:
    write_list(folder / "train.txt", ["train/a/1.jpg", path], [1, 1])
    with pytest.raises(DataError, match=r"train\.txt: .*<folder>/<class>/<image>"):
        Dataset.open(folder, "train")
