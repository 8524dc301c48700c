"""`san data`: training reads what it writes."""

from __future__ import annotations

import functools
import json
import os
import pickle
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from experiments.cli.data import Size
from experiments.grids.config import DataConfig, TrialConfig
from experiments.grids.expand import GRIDS_DIR
from experiments.training.images import data_digest, loaders, open_data
from pipelines import DataError, Dataset, Loader, Transform
from pipelines.datasets.manifest import list_path, read_list, write_list
from tests.experiments.conftest import San
from tests.experiments.drivers import PATIENCE
from tests.experiments.grids.test_grid import expand


@pytest.fixture
def san_data(run_san: San) -> San:
    """Runs `san data`."""
    return functools.partial(run_san, "data")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """7 images of cat, 5 of dog in train, one of each in val."""
    root = tmp_path / "images"
    for split, name, count in (("train", "cat", 7), ("train", "dog", 5), ("val", "cat", 1), ("val", "dog", 1)):
        (root / split / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (20, 15), (30 * index, 90, 20)).save(root / split / name / f"{index}.jpg")
    return root


def config(folder: Path, **fields: Any) -> DataConfig:
    defaults = {"source": "folder", "root": str(folder), "size": 8, "resize": 8, "crop_area": (0.5, 1), "crop_ratio": (1, 1)}
    return DataConfig.model_validate(defaults | {"flip": True, "mean": (0, 0, 0), "std": (1, 1, 1)} | fields)


def test_check_of_intact_images(images: Path, san_data: San) -> None:
    digests = [Dataset.scan(images, split).digest() for split in ("train", "val")]
    assert san_data("check", images) == (
        0,
        f"train: 12 images, none broken; valid images are listed in {images}/train.txt; digest {digests[0]}\n"
        f"val: 2 images, none broken; valid images are listed in {images}/val.txt; digest {digests[1]}\n",
        "",
    )
    assert read_list(images / "train.txt").paths == Dataset.scan(images, "train").paths


def test_check_lists_no_broken_images(images: Path, san_data: San, tmp_path: Path) -> None:
    (images / "train/dog/3.jpg").write_bytes(b"")
    (images / "train/cat/notes.txt").write_text("hello")
    (images / "train/loose.jpg").write_bytes(b"")
    arguments = ("check", images, "--split", "train", "--lists", tmp_path / "lists")
    code, out, _ = san_data(*arguments)
    assert code == 1
    first, last = out.splitlines()
    assert first == f"{images}/train/dog/3.jpg: empty file"
    assert last.startswith("train: 12 images, 1 broken; skipped 2 non-image files, for example train/loose.jpg; ")

    code, out, _ = san_data(*arguments, "--json", "--workers", "1")
    assert code == 1
    train, val = open_data(config(images, lists=str(tmp_path / "lists")))
    assert json.loads(out) == [
        {
            "split": "train",
            "packed": False,
            "images": 12,
            "broken": [{"path": f"{images}/train/dog/3.jpg", "reason": "empty file"}],
            "skipped_files": ["train/loose.jpg", "train/cat/notes.txt"],
            "list": str(tmp_path / "lists/train.txt"),
            "digest": train.digest(),
            "stale": [],
        }
    ]
    assert train == Dataset.scan(images, "train").without([10])
    assert val == Dataset.scan(images, "val")
    assert not list(images.glob("*.txt"))


def test_check_reports_split_lists_with_broken_images(images: Path, san_data: San) -> None:
    san_data("split", images, "--per-class", "1")
    train, _ = (Dataset.open(images, name) for name in ("train-split", "val-split"))
    broken = images / train.paths[0]
    broken.write_bytes(bytes(len(broken.read_bytes())))
    _, out, _ = san_data("check", images, "--split", "train")
    assert out.endswith(f"; run `san data split` again: {images}/train-split.txt lists broken images\n")
    with pytest.raises(DataError, match=rf"{train.paths[0]}: cannot use this image: .* and `san data split {images}` again"):
        list(Loader(train, Transform(), train=False, batch_size=1).epoch(0))
    san_data("split", images, "--per-class", "1")
    _, out, _ = san_data("check", images, "--split", "train")
    assert "again" not in out


def test_unusual_file_names_are_escaped(images: Path, san_data: San) -> None:
    (images / "train/cat/6.jpg").rename(images / "train/cat/a\n\x1b\udce9é.jpg")
    shown = r"train/cat/a\n\x1b\udce9é.jpg"
    (images / "train/dog/x\n").touch()
    code, out, _ = san_data("check", images, "--split", "train")
    first, last = out.splitlines()
    assert code == 1
    assert first == f"{images}/{shown}: the file name contains a line break, which image lists cannot store; rename the file"
    assert r"; skipped 1 non-image file, for example train/dog/x\n; " in last


def test_check_writes_no_list_if_all_images_of_a_class_are_broken(images: Path, san_data: San) -> None:
    (images / "val/dog/0.jpg").write_bytes(b"no image")
    code, out, _ = san_data("check", images)
    assert code == 1
    assert "no list written: " in out and "val: no readable image left in dog" in out
    assert sorted(path.name for path in images.glob("*.txt")) == ["train.txt"]
    data = Dataset.scan(images, "val")
    write_list(images / "val.txt", data.paths, data.sizes)
    assert f"the existing {images}/val.txt stays in use" in san_data("check", images, "--split", "val")[1]


def test_split_writes_the_images_that_training_holds_out(images: Path, san_data: San, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    code, out, _ = san_data("split", images, "--per-class", "2", "--seed", "3", "--lists", lists, "--json")
    assert code == 0
    train, val = json.loads(out)
    assert (train["split"], train["images"], val["split"], val["images"]) == ("train-split", 8, "val-split", 4)
    held_out = config(images, split="val-split", val_split_per_class=2, val_split_seed=3)
    from_lists = config(images, split="val-split", lists=str(lists))
    for one in (held_out, from_lists):
        opened = open_data(one)
        assert [part.paths for part in opened] == [read_list(Path(item["list"])).paths for item in (train, val)]
        assert data_digest(one) == f"{train['digest']}-{val['digest']}"
        assert not set(opened[0].paths) & set(opened[1].paths)
    assert data_digest(config(images, split="val-split", val_split_per_class=2)) != data_digest(held_out)
    assert open_data(config(images, split="val-split"))[1] == Dataset.scan(images, "val")  # no lists there
    code, out, _ = san_data("split", images, "--per-class", "2", "--seed", "3", "--lists", lists)
    assert out.splitlines()[1] == f"val-split: 4 images, {lists}/val-split.txt, digest {val['digest']}"


@pytest.mark.parametrize("missing", ["train-split", "val-split"])
def test_rejects_one_split_list_without_the_other(images: Path, san_data: San, tmp_path: Path, missing: str) -> None:
    other = "val-split" if missing == "train-split" else "train-split"
    assert san_data("split", images, "--per-class", "2")[0] == 0
    assert san_data("pack", images, tmp_path / "shards", "--split", "train", "--split", "val", "--split", other)[0] == 0
    (images / f"{missing}.txt").unlink()
    with pytest.raises(DataError, match=rf"^data.split: {images} has {other}\.txt but not {missing}\.txt; create both with"):
        open_data(config(images, split="val-split"))
    with pytest.raises(DataError, match=rf"has {other}\.index but not {missing}\.index; create both with `san data pack`"):
        open_data(config(tmp_path / "shards", source="shards", split="val-split"))


def test_rejects_split_lists_that_overlap(images: Path, san_data: San) -> None:
    assert san_data("split", images, "--per-class", "2")[0] == 0
    first = (images / "train-split.txt").read_bytes()
    assert san_data("split", images, "--per-class", "2", "--seed", "1")[0] == 0
    (images / "train-split.txt").write_bytes(first)
    with pytest.raises(DataError, match=r"splits train-split and val-split share \d images?, such as train/"):
        open_data(config(images, split="val-split"))


def test_split_writes_nothing_after_an_error(images: Path, san_data: San) -> None:
    code, _, err = san_data("split", images / "nowhere")
    assert code == 2 and f"{images}/nowhere: no such data folder; expected " in err
    assert san_data("split", images / "nowhere", "--lists", images / "lists")[0] == 2
    assert not (images / "nowhere").exists() and not (images / "lists").exists()
    (images / "train/dog/4.jpg").rename(images / "train/dog/4\n.jpg")
    code, _, err = san_data("split", images, "--per-class", "2", "--lists", images / "lists")
    assert code == 2 and r"'train/dog/4\n.jpg': this file name contains a line break" in err
    assert not (images / "lists").exists() and not list(images.glob("*.txt"))


def test_split_leaves_out_broken_images(images: Path, san_data: San) -> None:
    (images / "train/cat/0.jpg").write_bytes(b"")
    san_data("check", images)
    assert san_data("split", images, "--per-class", "4")[0] == 0
    both = [read_list(list_path(images, name)).paths for name in ("train-split", "val-split")]
    assert sorted([*both[0], *both[1]]) == list(Dataset.scan(images, "train").paths[1:])


def test_shards_have_the_images_of_the_folder(images: Path, san_data: San, tmp_path: Path) -> None:
    out_folder = tmp_path / "shards"
    code, out, _ = san_data("pack", images, out_folder, "--shard-size", "4KiB", "--json")
    assert code == 0
    train, val = json.loads(out)
    assert (train["images"], val["images"], train["kept"]) == (12, 2, 0)
    assert train["bytes"] == sum(path.stat().st_size for path in out_folder.glob("train-*.tar")) and len(train["shards"]) > 1
    assert train["digest"] == Dataset.scan(images, "train").digest()
    for fields in ({}, {"split": "val-split", "val_split_per_class": 2, "val_split_seed": 1}, {"train_per_class": 3}):
        packed, folder = config(out_folder, source="shards", **fields), config(images, **fields)
        assert data_digest(packed) == data_digest(folder)
        assert all(part.packed for part in open_data(packed))
    code, out, _ = san_data("pack", images, out_folder, "--shard-size", "4KiB", "--workers", "3")
    assert f"train: 12 images in {len(train['shards'])} shards ({len(train['shards'])} already existed), " in out

    code, out, _ = san_data("check", out_folder)
    assert (code, out.splitlines()[0]) == (0, f"train: 12 images in shards, none broken; digest {train['digest']}")
    damaged = out_folder / train["shards"][1]["name"]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    code, out, _ = san_data("check", out_folder, "--split", "train")
    assert code == 1
    assert out.startswith(f"{damaged.name}: checksum ")


def test_split_lists_can_be_packed(images: Path, san_data: San, tmp_path: Path) -> None:
    lists, shards = tmp_path / "lists", tmp_path / "shards"
    san_data("split", images, "--per-class", "1", "--lists", lists)
    both = ("--split", "train-split", "--split", "val-split")
    assert san_data("pack", images, shards, *both, "--lists", lists)[0] == 0
    packed = config(shards, source="shards", split="val-split")
    assert data_digest(packed) == data_digest(config(images, split="val-split", lists=str(lists)))
    assert [part.packed for part in open_data(packed)] == [True, True]


def test_missing_cifar_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar10: no such folder; write it with `san data prepare cifar10`"):
        open_data(config(tmp_path / "cifar10"))


def test_synthetic_images_need_no_folder() -> None:
    fields = {"source": "synthetic", "root": None, "synthetic_classes": 4, "synthetic_per_class": 3}
    train, val = open_data(config(Path(), **fields, split="val-split", val_split_per_class=50))
    assert train.is_synthetic and val.is_synthetic
    assert (len(train), len(val), train.classes) == (12, 12, val.classes)
    assert data_digest(config(Path(), **fields)) != data_digest(config(Path(), **fields | {"synthetic_classes": 3}))


def test_digits_are_written_to_the_default_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a fresh clone: it has no data/.
    monkeypatch.setattr("experiments.training.images.base_folder", lambda: tmp_path / "project")
    assert len(open_data(config(Path("data/digits"), source="digits"))[1]) == 360
    assert (tmp_path / "project/data/digits/val").exists()
    assert capsys.readouterr().err == ""


def test_digits_are_written_to_a_given_folder_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "mine"
    assert len(open_data(config(root, source="digits"))[1]) == 360
    assert capsys.readouterr().err == f"wrote dataset digits to {root}\n"
    open_data(config(root, source="digits", train_per_class=3))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("root", ["{tmp}/typo/digits", "dataa/digits"])
def test_rejects_a_folder_for_digits_without_a_parent(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.training.images.base_folder", lambda: tmp_path)
    meant = tmp_path / root.format(tmp=tmp_path)
    with pytest.raises(DataError) as error:
        open_data(config(Path(root.format(tmp=tmp_path)), source="digits"))
    assert str(error.value) == (
        f"data.root={meant}: no such folder, and its parent {meant.parent} does not exist either; correct the path, or "
        f"write the dataset there with `san data prepare digits {meant}`"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"root": None}, "data.root: missing; data.source=folder requires the folder of the images"),
        (
            {"source": "digits", "lists": "lists"},
            "data.lists: used only with data.source=folder, not digits; leave out data.lists",
        ),
        ({"source": "shards"}, "no shards of 'train'; expected "),
        (
            {"source": "synthetic", "lists": "lists"},
            "data.lists: used only with data.source=folder, not synthetic; leave out data.lists",
        ),
        (
            {"source": "synthetic", "train_per_class": 3},
            "data.train_per_class: not used with data.source=synthetic; set",
        ),
        ({"source": "synthetic", "synthetic_classes": 10**9}, "1000000000 classes with 50 synthetic images each make "),
        ({"lists": "/no/such/lists"}, "/no/such/lists: no such folder of image lists; create it with `san data check"),
        ({"split": "val-split", "val_split_per_class": 6}, "data.val_split_per_class: "),
    ],
)
def test_rejects_invalid_data_settings(images: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        open_data(config(images, **fields))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["check", "{root}/nowhere"], ["{root}/nowhere: no such data folder; expected "]),
        (["check", "{root}", "--split", "test"], ["{root}: this data folder has no folder test/; expected "]),
        (["check", "{root}", "--lists", "{root}/val/cat/0.jpg"], ["{root}/val/cat/0.jpg: cannot create this folder"]),
        (["split", "{root}", "--per-class", "5"], ["too few images for 5 per class plus 1 to keep: dog has 5"]),
        (
            ["pack", "{root}", "{root}/out", "--shard-size", "3 pages"],
            ["'3 pages' is not a size; give a positive number and a unit"],
        ),
        (["pack", "{root}", "{root}/val/cat/0.jpg"], ["{root}/val/cat/0.jpg: cannot write to this folder (File exists)"]),
        (["pack", "{root}", "{root}/out", "--split", "test"], ["has no folder test/; expected "]),
        (["check", "{root}", "--split", ""], ["'' is not a valid split; expected"]),
        (["pack", "{root}", "{root}/out", "--split", "../x"], ["'../x' is not a valid split; expected"]),
    ],
)  # fmt: skip
def test_rejects(arguments: list[str], messages: list[str], images: Path, san_data: San) -> None:
    before = sorted(images.rglob("*"))
    code, out, err = san_data(*(argument.format(root=images) for argument in arguments))
    assert (code, out) == (2, "")
    for message in messages:
        assert message.format(root=images) in err
    assert sorted(images.rglob("*")) == before


def test_check_does_not_overwrite_a_foreign_file(images: Path, san_data: San) -> None:
    (images / "val.txt").write_text("ILSVRC2012_val_00000001.JPEG 65\n")
    code, out, err = san_data("check", images)
    assert (code, out) == (2, "")
    assert "val.txt: already exists and is not an image list; keep lists in another folder (set --lists or data.lists)" in err
    assert [path.name for path in images.glob("*.txt")] == ["val.txt"]


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("3kB", 3000), ("256MiB", 2**28), ("2 GiB", 2**31), ("1GB", 10**9), ("5MB", 5_000_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


def test_check_shows_a_bar_and_can_be_interrupted(images: Path) -> None:
    for index in range(20_000):
        os.link(images / "train/cat/0.jpg", images / f"train/dog/more{index}.jpg")
    terminal, end_of_process = pty.openpty()
    termios.tcsetwinsize(end_of_process, (24, 100))
    command = [sys.executable, "-m", "experiments", "data", "check", str(images)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end_of_process, text=True) as process:
        os.close(end_of_process)
        shown = b""
        while b"image" not in shown:
            shown += os.read(terminal, 1000)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    while b"interrupted" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert (process.returncode, out) == (1, "")
    assert b"train  " in shown and b" of 20012 images, 0 broken" in shown
    assert b"interrupted; only fully checked splits have a new list" in shown and b"Traceback" not in shown
    assert not psutil.wait_procs(workers, timeout=PATIENCE)[1]
    assert not list(images.glob("*.txt")) and not list(images.glob(".*"))


def cell(data: DataConfig) -> TrialConfig:
    trials = expand(GRIDS_DIR / "footprint.yaml", "recipe.batch_size=4")
    return next(iter(trials.values())).config.model_copy(update={"data": data})


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces broadcasts: what the first worker sends reaches the second."""
    sent: list[bytes] = []

    def broadcast(objects: list[Any], device: torch.device) -> None:
        if objects[0] is None:
            objects[:] = pickle.loads(sent.pop())
        else:
            sent.append(pickle.dumps(objects))

    monkeypatch.setattr("experiments.training.images.dist.is_initialized", lambda: True)
    monkeypatch.setattr("experiments.training.images.dist.broadcast_object_list", broadcast)


def test_first_worker_lists_the_images_for_all_workers(
    images: Path, two_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = cell(config(images))
    first = loaders(trial, 0, 0, 2)
    monkeypatch.setattr("experiments.training.images.open_data", None)
    second = loaders(trial, 0, 1, 2)
    assert [one.dataset for one in second] == [one.dataset for one in first]
    assert [one.rank for one in second] == [1, 1]


def test_every_worker_reports_missing_images(images: Path, two_workers: None) -> None:
    for rank in range(2):
        with pytest.raises(DataError, match=r".*/absent: no such data folder"):
            loaders(cell(config(images / "absent")), 0, rank, 2)
    loaders(cell(config(images)), 0, 0, 2)
    images.rename(images.with_name("moved"))
    with pytest.raises(DataError, match=r"no such folder on node .*; make the images available at the same path on every node"):
        loaders(cell(config(images)), 0, 1, 2)
