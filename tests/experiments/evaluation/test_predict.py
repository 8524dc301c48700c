"""`san predict`: classes of images by any checkpoint, in the given order, and the reasons for images that cannot be used."""

import csv
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import san
from experiments.evaluation import predict
from experiments.evaluation.evaluate import evaluation_loader, open_checkpoint, open_images
from experiments.evaluation.predict import Prediction
from experiments.grids.transform import transform
from san.models.pretrained import save_folder
from tests.experiments.conftest import Printed, Rejected, San, Trained


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """70 pictures of noise in a folder and two subfolders, of which the third and the last one are broken."""
    root, numbers = tmp_path / "my photos", np.random.default_rng(0)
    for index in range(70):
        path = root / ("", "b", "b/c")[index // 30] / f"{index:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 255, (30, 40, 3), dtype=np.uint8)).save(path)
    for name in ("02.jpg", "b/c/69.jpg"):
        (root / name).write_bytes(b"no image")
    (root / "notes.txt").touch()
    return root


def test_probabilities_are_those_of_the_validation(trained: Trained, printed: Printed) -> None:
    opened = open_checkpoint(trained.folder)
    images = open_images(opened).only(range(20))
    (batch,) = evaluation_loader(opened, images, transform(opened.config.data), 20).epoch(0)
    with torch.no_grad():
        expected = opened.model(batch.images_NCHW).softmax(1).topk(3, dim=1)
    files = [images.root / path for path in reversed(images.paths)]  # any order
    out = printed("predict", trained.folder, *files, "--top", "3", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["image"] for one in found] == list(map(str, files))
    assert [one["classes"] for one in reversed(found)] == [[str(label) for label in row] for row in expected.indices.tolist()]
    probabilities = torch.tensor([one["probabilities"] for one in reversed(found)])
    torch.testing.assert_close(probabilities, expected.values, rtol=1e-4, atol=1e-6)


def test_table_has_every_image_of_a_folder_in_order(
    photos: Path, run_san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader meets a broken image up to seven batches ahead."""
    monkeypatch.setattr(predict, "AT_ONCE", 1)
    table = tmp_path / "table.csv"
    code, out, err = run_san("predict", "san10_patchwise_cifar10", photos, "recipe.batch_size=8", "--top", "2", "--csv", table)
    assert (code, out) == (1, f"{table}: 70 images, of which 2 cannot be used\n") and "skipped 1 .txt" in err
    rows = list(csv.DictReader(table.open()))
    assert [row["image"] for row in rows] == sorted(str(path) for path in photos.rglob("*.jpg"))
    broken = {Path(row["image"]).name: row["error"] for row in rows if row["error"]}
    assert broken.keys() == {"02.jpg", "69.jpg"} and all("not an image" in reason for reason in broken.values())
    for row in rows:
        if not row["error"]:
            assert 1 > float(row["probability_1"]) >= float(row["probability_2"]) > 0
            assert row["class_1"] in san.create_model("san10_patchwise_cifar10", pretrained=True).pretrained_cfg["label_names"]


def test_names_of_classes_travel_with_every_copy(trained: Trained, photos: Path, printed: Printed, tmp_path: Path) -> None:
    """A converted file and a shared folder give the predictions of the trial, in words."""
    runs, ours, shared = trained.grid_run.workspace.runs, tmp_path / "ours.pt", tmp_path / "shared"
    printed("convert", trained.trial.key, ours, "--runs", runs)
    save_folder(san.load_checkpoint(ours), shared, data="digits", accuracy="?", license="mit")
    images = photos / "b"
    (images / "c/69.jpg").unlink()
    first, *others = (
        printed("predict", checkpoint, images, "--runs", runs) for checkpoint in (trained.trial.key, ours, shared)
    )
    assert [first, first] == others
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in sorted(images.rglob("*.jpg"))))
    assert printed("predict", ours, "--list", tmp_path / "list.txt") == first

    model = san.load_checkpoint(ours)
    model.reset_classifier(10)
    san.save_checkpoint(model, ours)
    assert "label_names" not in san.load_checkpoint(ours).pretrained_cfg, "they are those of another classifier"


def test_says_what_is_no_file(tmp_path: Path, run_san: San) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "list.txt").write_bytes(b"none.jpg\r\n\r\n")
    code, out, _ = run_san("predict", "san10_patchwise_cifar10", tmp_path / "pipe.jpg", "--list", tmp_path / "list.txt")
    assert (code, out) == (1, f"{tmp_path}/pipe.jpg: not a file, but a pipe or a device\nnone.jpg: no such file\n")


def test_table_is_complete_or_called_part(
    photos: Path, printed: Printed, run_san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, part = tmp_path / "table.csv", tmp_path / "table.csv.part"
    table.write_text("an earlier table")
    images = sorted((photos / "b/c").glob("6?.jpg"))[:9]
    arguments = "predict", "san10_patchwise_cifar10", *images, "recipe.batch_size=3", "--csv"
    written = predict.write_csv

    def interrupted(*given: Any) -> Iterator[Prediction]:
        yield from itertools.islice(written(*given), 4)
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "write_csv", interrupted)
    code, out, err = run_san(*arguments, table)
    assert (code, out) == (1, "") and str(part) in err
    assert table.read_text() == "an earlier table"
    assert len(list(csv.DictReader(part.open()))) == 4

    monkeypatch.setattr(predict, "write_csv", written)
    printed(*arguments, table)
    assert len(list(csv.DictReader(table.open()))) == 9
    assert not part.exists()
    assert printed(*arguments, "-") == table.read_text()


def test_rejects(tmp_path: Path, rejected: Rejected) -> None:
    for arguments, words in (
        ([], "no images given"),
        ([tmp_path], f"no images in {tmp_path}"),
        ([tmp_path / "1.jpg", "--csv", tmp_path / "none/x.csv"], "cannot write this file"),
        ([tmp_path / "1.jpg", "model.footprint=3"], "already stores its model"),
    ):
        assert words in rejected("predict", "san10_patchwise_cifar10", *arguments)
