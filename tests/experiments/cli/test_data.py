"""`san data`: training reads what it writes."""

import functools
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.cli.data import Size
from experiments.training.images import data_digest, open_data
from pipelines import CIFAR, Dataset
from pipelines.datasets import check
from pipelines.datasets.manifest import write_list
from tests.experiments.conftest import Printed, Rejected, San, image_data
from tests.pipelines.datasets.test_cifar import packed


@pytest.fixture(autouse=True)
def decode_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a process takes seconds; `test_check_shows_a_bar_and_can_be_interrupted` does so."""
    monkeypatch.setattr(check, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))


@pytest.fixture
def san_data(run_san: San) -> San:
    """Runs `san data`."""
    return functools.partial(run_san, "data")


def test_check_lists_no_broken_images(images: Path, san_data: San, tmp_path: Path) -> None:
    unusual = "a\x1b\udce9é.jpg"
    (images / "train/cat" / unusual).touch()
    (images / "train/dog/3.jpg").write_bytes(b"")
    arguments = ("check", images, "--lists", tmp_path / "lists")
    code, out, _ = san_data(*arguments)
    assert code == 1
    first, second, train, val = out.splitlines()
    assert first == rf"{images}/train/cat/a\x1b\udce9é.jpg: empty file"
    assert second == f"{images}/train/dog/3.jpg: empty file"
    assert train.startswith("train: 13 images; 2 classes: cat, dog; 2 broken; ")
    assert val.startswith("val: 2 images; 2 classes: cat, dog; none broken; ")

    code, out, _ = san_data(*arguments, "--split", "train", "--json", "--workers", "1")
    assert code == 1
    opened = open_data(image_data(images, lists=str(tmp_path / "lists")))
    assert json.loads(out) == [
        {
            "split": "train",
            "packed": False,
            "images": 13,
            "classes": ["cat", "dog"],
            "skipped": "",
            "broken": [{"path": f"{images}/train/{file}", "reason": "empty file"} for file in (f"cat/{unusual}", "dog/3.jpg")],
            "list": str(tmp_path / "lists/train.txt"),
            "digest": opened[0].digest(),
        }
    ]
    assert opened == (Dataset.scan(images, "train").without([7, 11]), Dataset.scan(images, "val"))
    assert not list(images.glob("*.txt"))


def test_check_writes_no_list_if_all_images_of_a_class_are_broken(images: Path, san_data: San) -> None:
    (images / "val/dog/0.jpg").write_bytes(b"no image")
    code, out, _ = san_data("check", images)
    assert code == 1
    assert "no list written: " in out and "no readable image left in dog" in out
    assert sorted(path.name for path in images.glob("*.txt")) == ["train.txt"]
    data = Dataset.scan(images, "val")
    write_list(images / "val.txt", data.paths, data.sizes)
    assert f"the existing {images}/val.txt stays in use" in san_data("check", images, "--split", "val")[1]


def test_shards_have_the_images_of_the_folder(images: Path, san_data: San, printed: Printed, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    pack = ("data", "pack", images, shards, "--shard-size", "4KiB")
    train, val = json.loads(printed(*pack, "--json"))
    assert (train["images"], val["images"], train["kept"]) == (12, 2, 0)
    assert train["bytes"] == sum(path.stat().st_size for path in shards.glob("train-*.tar")) and len(train["shards"]) > 1
    assert train["digest"] == Dataset.scan(images, "train").digest()
    for fields in ({}, {"split": "val-split", "val_split_per_class": 2, "val_split_seed": 1}, {"train_per_class": 3}):
        packed = image_data(shards, source="shards", **fields)
        assert data_digest(packed) == data_digest(image_data(images, **fields))
        assert all(part.packed for part in open_data(packed))
    count = len(train["shards"])
    assert f"train: 12 images in {count} shards ({count} already existed), " in printed(*pack, "--workers", "3")

    checked = printed("data", "check", shards).splitlines()
    assert checked[0] == f"train: 12 images in shards; 2 classes: cat, dog; none broken; digest {train['digest']}"
    damaged = shards / train["shards"][1]["name"]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    code, out, _ = san_data("check", shards, "--split", "train")
    assert code == 1
    assert out.startswith(f"{damaged.name}: checksum ")


def test_rejects(images: Path, rejected: Rejected) -> None:
    (images / "foreign").mkdir()
    (images / "foreign" / "val.txt").write_text("ILSVRC2012_val_00000001.JPEG 65\n")
    before = sorted(images.rglob("*"))
    for arguments, words in (
        (["check", "{root}/nowhere"], ["{root}/nowhere"]),
        (["check", "{root}", "--split", "test"], ["{root}", "test/"]),
        (["check", "{root}", "--split", "../x"], ["'../x'"]),
        (["check", "{root}", "--lists", "{root}/val/cat/0.jpg"], ["{root}/val/cat/0.jpg"]),
        (["check", "{root}", "--lists", "{root}/foreign"], ["val.txt", "--lists"]),
        (["pack", "{root}", "{root}/out", "--shard-size", "3 pages"], ["'3 pages'"]),
        (["pack", "{root}", "{root}/val/cat/0.jpg"], ["{root}/val/cat/0.jpg"]),
    ):
        message = rejected("data", *(argument.format(root=images) for argument in arguments))
        assert all(word.format(root=images) in message for word in words), message
        assert sorted(images.rglob("*")) == before, arguments


def test_checks_names_and_classes_before_it_decodes(images: Path, rejected: Rejected) -> None:
    (images / "val/cat").rename(images / "val/kitten")
    assert "has no cat" in rejected("data", "check", images)
    (images / "train/dog").rename(images / "train/two\nlines")
    message = rejected("data", "check", images, "--split", "train")
    assert "two\\nlines" in message and "rename this file or folder" in message


def test_sizes() -> None:
    sizes = {"1": 1, "3kB": 3000, "256MiB": 2**28, "2 GiB": 2**31, "1GB": 10**9}
    assert [Size().convert(text, None, None) for text in sizes] == list(sizes.values())


@pytest.mark.slow
def test_check_shows_a_bar_and_can_be_interrupted(images: Path) -> None:
    """While a process decodes. Its processes end, too: they share its output, which is read until all have closed it."""
    for number in range(check.AT_ONCE):
        shutil.copy(images / "train/cat/0.jpg", images / f"train/cat/more{number}.jpg")
    terminal, end_of_process = pty.openpty()
    termios.tcsetwinsize(end_of_process, (24, 100))
    command = [sys.executable, "-m", "tests.experiments.cli.held_check", "data", "check", str(images)]
    variables = os.environ | {"TERM": "xterm"}  # a dumb terminal has no bar
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=end_of_process, text=True) as process:
        os.close(end_of_process)
        shown = _read_until(b"16 of 28 images", terminal)
        process.send_signal(signal.SIGINT)
        (images / "released").touch()
        shown += _read_until(b"interrupted", terminal)
        out, _ = process.communicate()
    os.close(terminal)
    assert (process.returncode, out) == (1, "")
    assert b"Traceback" not in shown
    assert not list(images.glob("*.txt")) and not list(images.glob(".*"))


def _read_until(word: bytes, terminal: int) -> bytes:
    shown = b""
    while word not in shown:
        shown += os.read(terminal, 1000)
    return shown


def test_prepare_writes_the_dataset_that_it_is_asked_for(tmp_path: Path, san_data: San) -> None:
    rows = b"".join(bytes([label]) + bytes(3 * 32 * 32) for label in (0, 1))
    files = dict.fromkeys(CIFAR["cifar10"].splits, rows) | {"batches.meta.txt": b"airplane\ncat\n"}
    archive = packed(tmp_path / "official.tar.gz", {f"cifar-10-batches-bin/{name}": content for name, content in files.items()})
    assert san_data("prepare", "cifar10", tmp_path / "cifar", "--from", archive)[0] == 0
    assert Dataset.scan(tmp_path / "cifar", "val").classes == ("airplane", "cat")
    assert san_data("prepare", "digits", tmp_path / "digits")[0] == 0
    assert len(Dataset.scan(tmp_path / "digits", "train").classes) == 10
