"""The images of a trial: sources, splits, errors, and two workers of which one lists the images."""

import os
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.config.config import PROJECT_DIR, TrialConfig
from experiments.errors import UserError
from experiments.training import images as images_module
from experiments.training.images import data_digest, loaders, notes_on, open_data, open_split
from pipelines import DataError, Dataset
from pipelines.datasets.manifest import list_path, write_list
from pipelines.datasets.pack import pack
from tests.experiments.config.test_grid import expand
from tests.experiments.conftest import SMALL_GRID, OpenGrid, San, image_data
from tests.experiments.processes import together


def test_images_held_out_of_train_need_no_folder_val(images: Path, tmp_path: Path) -> None:
    shutil.rmtree(images / "val")
    list(pack(Dataset.open(images, "train"), tmp_path / "shards", 2**20, 1))
    for root, source in ((images, "folder"), (tmp_path / "shards", "shards")):
        train, val = open_data(image_data(root, source=source, split="val-split", val_split_per_class=2))
        assert (len(train), len(val)) == (8, 4)


def test_rejects_a_single_class_and_names_the_folders_in_it(images: Path, run_san: San) -> None:
    for split in ("train", "val"):
        (images / split).rename(images / "moved")
        (images / split).mkdir()
        (images / "moved").rename(images / split / "photos")
    with pytest.raises(DataError, match=r"a single class, photos, .* \(cat, dog\), move them to .*train"):
        open_data(image_data(images))
    code, _, said = run_san("data", "check", images)
    assert code == 2 and "a single class, photos, " in said and not list(images.glob("*.txt"))


def test_says_that_classes_have_other_unicode_characters(images: Path) -> None:
    for split, form in (("train", "NFC"), ("val", "NFD")):
        (images / split / "cat").rename(images / split / unicodedata.normalize(form, "café"))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"spell café with different characters"):
        open_data(image_data(images))


def test_notes_name_the_list_in_use_and_skipped_files(images: Path, tmp_path: Path) -> None:
    def notes_on_copy(name: str, change: Callable[[Path], None]) -> list[str]:
        root = Path(shutil.copytree(images, tmp_path / name))
        change(root)
        return [note.replace(str(root), "ROOT") for note in notes_on(image_data(root))]

    def add(root: Path) -> None:
        (root / "train/cat/notes.txt").touch()

    def check(root: Path) -> None:
        train = Dataset.scan(root, "train")
        write_list(list_path(root, "train"), train.paths, train.sizes)

    assert notes_on_copy("unchanged", lambda root: None) == []
    assert notes_on_copy("added", add) == ["train: skipped 1 .txt"]
    assert notes_on_copy("listed", check) == ["images listed in ROOT/train.txt; list new ones with `san data check`"]


@pytest.mark.parametrize("how", ["folder", "class folder", "image", "hard link", "from training"])
def test_no_file_is_a_training_and_a_validation_image(how: str, images: Path, run_san: San) -> None:
    here, there = min((images / "train/cat").iterdir()), images / "val/cat/again.jpg"
    if how == "folder":
        shutil.rmtree(images / "val")
        (images / "val").symlink_to("train")
    elif how == "class folder":
        shutil.rmtree(images / "val/cat")
        (images / "val/cat").symlink_to("../train/cat")
    elif how == "image":
        there.symlink_to(here)
    elif how == "hard link":
        os.link(here, there)
    else:
        (images / "train/dog/more").symlink_to("../../val/cat")
    with pytest.raises(DataError, match="train and val share"):
        open_data(image_data(images))
    for command in (("check", images), ("pack", images, images / "shards")):
        code, _, said = run_san("data", *command)
        assert code == 2 and "train and val share" in said
    assert not (images / "train.txt").exists() and not (images / "shards").exists()


def test_synthetic_images_need_no_folder() -> None:
    fields = {"source": "synthetic", "root": None, "synthetic_classes": 4, "synthetic_per_class": 3}
    train, val = open_data(image_data(Path(), **fields, split="val-split", val_split_per_class=50))
    assert train.is_synthetic and val.is_synthetic
    assert (len(train), len(val), train.classes) == (12, 12, val.classes)
    assert data_digest(image_data(Path(), **fields)) != data_digest(image_data(Path(), **fields | {"synthetic_classes": 3}))


def test_missing_digits_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.config.config.PROJECT_DIR", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "other disk").mkdir()
    (tmp_path / "data/digits").symlink_to("../other disk")
    assert len(open_data(image_data(tmp_path, root=None, source="digits"))[1]) == 360
    assert (tmp_path / "other disk/val").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"root": None}, "data.root: missing"),
        ({"root": "/no/cifar10"}, "cifar10: no such folder; write it with `san data prepare cifar10`"),
        ({"source": "digits"}, "no train/0; choose another folder; for your own images, use `--profile folder`"),
        ({"source": "digits", "lists": "lists"}, "data.lists: "),
        ({"source": "shards"}, "no shards of 'train'"),
        ({"source": "synthetic", "train_per_class": 3}, "data.train_per_class: "),
        ({"source": "synthetic", "synthetic_classes": 10**9}, "1000000000 classes"),
        ({"lists": "/no/such/lists"}, "/no/such/lists: no such folder"),
        ({"split": "val-split", "val_split_per_class": 6}, "data.val_split_per_class: "),
        ({"train_per_class": 6}, "data.train_per_class: "),
        ({"val_per_class": 600}, "data.val_per_class: "),
    ],
)
def test_rejects_invalid_data_settings(images: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        open_data(image_data(images, **fields))
    assert message in str(error.value)


Change = Callable[[Path], object]


def open_loaders(rank: int, config: TrialConfig, change: Change | None) -> list[tuple[Dataset, int]]:
    """The datasets and ranks of a worker's loaders. `change` happens after the first worker has listed the images."""

    def listed(data: Any) -> tuple[Dataset, Dataset]:
        assert rank == 0, "only the first worker lists images"
        found = open_data(data)
        if change is not None:
            change(Path(data.root))
        return found

    images_module.open_data = listed  # type: ignore[assignment]
    return [(loader.dataset, loader.rank) for loader in loaders(config, 0, rank, 2)]


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


@pytest.mark.parametrize(
    ("root", "change", "error"),
    [("images", None, None), ("absent", None, "absent: no such data folder"), ("images", move_away, "no such folder on node ")],
    ids=["present", "absent", "absent on a node"],
)
def test_first_worker_lists_the_images_for_all_workers(
    root: str, change: Change | None, error: str | None, images: Path, tmp_path: Path
) -> None:
    """And all workers raise the same error, so that none waits for another one."""
    data = image_data(images.with_name(root))
    config = expand(SMALL_GRID, "recipe.batch_size=4")["pairwise_3"].config.model_copy(update={"data": data})
    expected = open_data(data) if error is None else ()
    results = together(open_loaders, tmp_path, config, change)
    if error is None:
        assert results == [[(dataset, rank) for dataset in expected] for rank in range(2)]
    else:
        assert [result.startswith("DataError") and error in result for result in results] == [True, True], results


def test_rejects_a_batch_larger_than_the_dataset(open_small_grid: OpenGrid) -> None:
    with pytest.raises(UserError, match=r"recipe\.batch_size: must be at most the number of training images, 1437, not 100000"):
        open_small_grid("recipe.batch_size=100000")


def test_fewer_validation_images() -> None:
    """The same in training and in evaluation; another split is complete."""
    config = image_data(PROJECT_DIR / "data/digits", source="digits", val_per_class=3)
    train, val = open_data(config)
    assert (len(train), len(val)) == (1437, 30)
    assert open_split(config).digest() == val.digest()
    assert len(open_split(config, "val")) == 360
    with pytest.raises(DataError, match=r"data\.val_split_per_class: missing"):
        open_split(config, "val-split")
    complete = config.model_copy(update={"split": "val-split", "val_per_class": None})
    assert open_split(complete).digest() == open_data(complete)[1].digest()
