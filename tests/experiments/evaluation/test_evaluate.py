"""`san evaluate` and `san convert`: the exact accuracy of every kind of checkpoint on every split.

`san predict`: classes of images in any folders, in the given order, and the reasons for images that cannot be used.
"""

import csv
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import san
from experiments.cli import weights
from experiments.config.config import PROJECT_DIR, merged
from experiments.evaluation import evaluate
from experiments.evaluation.evaluate import (
    Evaluation,
    Prediction,
    evaluate_checkpoint,
    evaluation_loader,
    open_checkpoint,
    open_images,
)
from experiments.runner import progress
from experiments.runs.store import LocalStore
from experiments.runs.workspace import open_store
from experiments.training.checkpoint import Checkpoint, best_in, resolve_checkpoint
from experiments.training.engine import validated_weights
from experiments.training.images import transform
from experiments.training.trainer import run_trial
from san.models import pretrained
from san.models.pretrained import save_folder
from tests.experiments.conftest import HELD_OUT, SMALL_GRID, OpenGrid, Printed, Rejected, San, Trained
from tests.experiments.samples import flip_a_bit, of_step, opened_checkpoints

DIGITS = PROJECT_DIR / "data" / "digits"
MODEL = "small-digits-pairwise_3"
PAIRWISE = ("model.name=san10_pairwise", "model.footprint=3")


def evaluated(path: Path, *overrides: str, profile: str | None = None, split: str | None = None) -> Evaluation:
    opened = open_checkpoint(path, overrides, profile)
    return evaluate_checkpoint(opened, open_images(opened, split))


def measured(found: Evaluation) -> tuple[float, float, float, int]:
    return found.top1, found.top5, found.loss, found.images


def test_checkpoint_gives_the_accuracy_of_its_validation(trained: Trained) -> None:
    history = Checkpoint.read(trained.folder / "epoch-0002-step-0000000.pt").history
    for epoch, validated in enumerate(history, 1):
        found = evaluated(trained.folder / f"epoch-{epoch:04d}-step-0000000.pt")
        assert measured(found) == (validated.top1, validated.top5, validated.val_loss, 120), epoch
        assert (found.model, found.epoch, found.split, found.classes) == ("san10_pairwise", epoch, "train", 10)
        assert found.own_images, epoch


def test_batches_have_the_size_of_validation(
    open_small_grid: OpenGrid, process_group: None, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the progress of commands."""
    counts = list[tuple[int | None, int]]()

    @contextmanager
    def counting(what: str, total: int | None, unit: str) -> Iterator[Callable[[], None]]:
        ended: list[None] = []
        yield lambda: ended.append(None)
        counts.append((total, len(ended)))

    grid_run = open_small_grid("recipe.epochs=1", "data.train_per_class=7", *HELD_OUT, "recipe.grad_accum_steps=3")
    (trial, *_), workspace = grid_run.trials, grid_run.workspace
    run_trial(workspace, trial, lambda metrics: None)
    file = workspace.checkpoints(trial) / "epoch-0001-step-0000000.pt"
    assert evaluated(file).loss == Checkpoint.read(file).history[-1].val_loss
    monkeypatch.setattr(progress, "counting", counting)
    printed("evaluate", file)
    printed("predict", file, DIGITS / "val" / "7")
    images = len(list((DIGITS / "val" / "7").iterdir()))
    assert counts == [(batches, batches) for batches in (math.ceil(120 / 22), math.ceil(images / 22))]


def test_every_name_of_a_trial_gives_its_best_epoch(trained: Trained, run_san: San, printed: Printed) -> None:
    metrics = trained.result.metrics
    best = (metrics["summary/best_top1"], metrics["summary/best_top5"], metrics["summary/best_epoch"])
    trained.grid_run.tracker.client.set_registered_model_alias(MODEL, "champion", "1")
    models = f"models:/{MODEL}/1", f"models:/{MODEL}@champion"
    for name in (str(trained.folder), trained.trial.key, trained.result.run_id, *models):
        found = json.loads(printed("evaluate", name, "--runs", trained.grid_run.workspace.runs, "--json"))
        assert (found["top1"], found["top5"], found["epoch"]) == best
    _, out, err = run_san("evaluate", trained.folder)
    assert err == ""
    assert f"after epoch {found['epoch']}\ntop-1 {found['top1']:.4f} %" in out


def test_converted_checkpoint_gives_the_same_accuracy(trained: Trained, tmp_path: Path, run_san: San) -> None:
    ours, theirs = tmp_path / "weights.pt", tmp_path / "released.pth"
    _, out, _ = run_san("convert", trained.trial.key, ours, "--runs", trained.grid_run.workspace.runs)
    assert out.startswith(f"{ours}: san10_pairwise ")
    san.save_released_checkpoint(san.load_checkpoint(ours), theirs)
    for file, model in ((ours, ()), (theirs, PAIRWISE)):
        found = evaluated(file, *HELD_OUT, *model, profile="digits")
        assert measured(found) == measured(evaluated(trained.folder))
        assert (found.epoch, found.own_images) == (None, None)
    opened = open_checkpoint(ours, HELD_OUT)  # our file stores the preprocessing and the names of the classes
    assert (opened.config.data.size, opened.classes) == (24, trained.best.origin.classes)
    assert opened.config.data.mean == trained.trial.config.data.mean


def test_folder_of_weights_gives_the_same_accuracy(
    trained: Trained, tmp_path: Path, run_san: San, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "WEIGHTS_DIR", tmp_path)
    monkeypatch.setattr(weights, "PROFILE", "digits")
    opened = open_checkpoint(trained.folder)
    images = open_images(opened)
    validated = evaluate_checkpoint(opened, images)
    weights.save("small_digits", opened, validated, images, usage="")
    found = json.loads(run_san("evaluate", "small_digits", *HELD_OUT, "--json")[1])
    assert (found["top1"], found["loss"], found["own_images"]) == (validated.top1, validated.loss, True)
    assert f"top-1 {found['top1']:.4f} %" in (tmp_path / "small_digits/README.md").read_text()


def test_evaluates_every_split(trained: Trained, tmp_path: Path) -> None:
    """A folder needs only the evaluated split."""
    for split, images, own in (("train", 1317, True), ("val-split", 120, True), ("val", 360, False)):
        found = evaluated(trained.folder, split=split)
        assert (found.images, found.own_images) == (images, own), split
    (tmp_path / "test").symlink_to(DIGITS / "val")
    same = evaluated(trained.folder, "data.source=folder", f"data.root={tmp_path}", split="test")
    assert measured(same) == measured(found)


def test_notes_that_images_differ_from_training(trained: Trained, tmp_path: Path, run_san: San) -> None:
    (tmp_path / "train").symlink_to(DIGITS / "val")
    (tmp_path / "val").symlink_to(DIGITS / "val")
    _, _, err = run_san("evaluate", trained.folder, "data.source=folder", f"data.root={tmp_path}")
    assert err.startswith(f"note: the images of train in {tmp_path} differ")


def test_images_of_a_network_whose_preprocessing_is_known_in_part(tmp_path: Path) -> None:
    model = san.create_model("resnet26", 10, num_stages=2, width_mult=0.25)
    model.pretrained_cfg = {"input_size": [3, 64, 64]}
    san.save_checkpoint(model, tmp_path / "a.pt")
    data = open_checkpoint(tmp_path / "a.pt").config.data
    assert (data.size, data.mean) == (64, (0.485, 0.456, 0.406))  # as for ImageNet


def test_finds_the_best_checkpoint_of_a_folder(tmp_path: Path) -> None:
    checkpoints = opened_checkpoints(tmp_path, keep=1)
    for number in range(1, 4):  # the first is the best
        checkpoints.save(of_step(number))
    checkpoints.save(of_step(3, step=5))
    best = best_in(checkpoints.store, checkpoints.folder)
    assert best is not None and best.name == of_step(1).name
    checkpoints.save(of_step(4))
    Path(checkpoints.uri(best.name)).write_bytes(b"damaged")
    best = best_in(checkpoints.store, checkpoints.folder)
    assert best is not None and best.name == of_step(4).name
    assert best_in(LocalStore(tmp_path)) is None


def test_validation_averages_batchnorm_statistics_of_workers() -> None:
    """The statistics belong to the averaged weights if the recipe averages them, otherwise to the trained weights."""
    third, means = torch.tensor([1 / 3]), [torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([5.0])]
    validated = [{"mean": mean, "var": third, "count": torch.tensor(7)} for mean in means]
    kept = {"w": third, "mean": means[0], "var": third}
    expected = {"w": third, "mean": torch.tensor([2.0]), "var": third, "count": torch.tensor(7)}
    for averaged in (False, True):
        trained = [{"mean": torch.tensor([-9.0])}] * averaged
        state = {"model": {"w": -third} if averaged else kept, "average": kept if averaged else None}
        weights = validated_weights(state | {"workers": [{"buffers": [*trained, buffers]} for buffers in validated]})
        torch.testing.assert_close(weights, expected, msg=f"averaged: {averaged}")


@pytest.fixture(scope="module")
def files(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that cannot be evaluated, the weights of the trial, and images of 3 and of 10 classes."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({"engine": {}}, folder / "old.pt")
    torch.save({"layer0.0.sam.conv_p.weight": torch.zeros(2, 2, 1, 1)}, folder / "released.pt")
    (folder / "flipped_bit.pt").write_bytes(flip_a_bit(of_step(1, value=1.0).as_bytes()))
    san.save_checkpoint(san.create_model("san10_pairwise", 10, in_channels=1, num_stages=1), folder / "grey.pt")
    san.save_checkpoint(trained.best.model(), folder / "ours.pt")
    origin = trained.best.origin
    record = merged(origin.record, {"model": {"relation": "maximum"}})
    (folder / "registered.pt").write_bytes(replace(trained.best, origin=replace(origin, record=record)).as_bytes())
    for count in (3, 10):
        for label in range(count):
            images = folder / f"{count}_classes" / "val" / f"class{label}"
            images.mkdir(parents=True)
            (images / "1.png").write_bytes(b"never decoded here")
    return folder


NO_RUN = 32 * "0"


def test_rejects(trained: Trained, files: Path, tmp_path: Path, rejected: Rejected) -> None:
    runs = trained.grid_run.workspace.runs
    for arguments, words in (
        ("{empty}/none.pt", ["none.pt", "No such file"]),
        ("ac2f", ["ac2f: no such file or name"]),
        ("0123456789ab --runs {empty}", ["0123456789ab: no such file, and no checkpoints"]),
        (f"{NO_RUN} --runs {{runs}}", [f"{NO_RUN}: MLflow"]),
        (f"{NO_RUN} --runs {{empty}}", [f"{NO_RUN}: no runs"]),
        ("models:/none/1 --runs {runs}", ["models:/none/1", "no such registered"]),
        (f"models:/{MODEL}@loser --runs {{runs}}", ["@loser"]),
        (f"models:/{MODEL} --runs {{runs}}", [f"models:/{MODEL}", "/VERSION"]),
        ("{empty}", ["no readable checkpoint of a complete epoch"]),
        ("{grid}", ["small.yaml", "torch.save"]),
        ("{files}/flipped_bit.pt", ["flipped_bit.pt: "]),
        ("{files}/model.safetensors", ["model.safetensors: weights alone", "config.json"]),
        ("{files}/old.pt", ["old.pt", "older version"]),
        ("{files}/registered.pt", ["unknown relation 'maximum'", "add --import FILE"]),
        ("{files}/released.pt model.path=x", ["san10_pairwise has no field path"]),
        ("{files}/grey.pt", ["grey.pt", "1-channel"]),
        ("{files}/ours.pt data.size=2 data.resize=2 --profile digits", ["stage 1 of san10_pairwise", "2 x 2"]),
        ("{files}/ours.pt data.root={files}/3_classes", ["ours.pt", "10 classes"]),
        ("{trial} model.footprint=5", ["model.footprint"]),
        ("{trial} --profile digits", ["--profile"]),
        ("{trial} recipe.lr=1", ["recipe.lr", "data.*"]),
        ("{trial} data.source=folder data.split=val-original data.root={files}/10_classes", ["class0", "instead of 0, 1"]),
    ):
        names = {"empty": tmp_path, "runs": runs, "files": files, "grid": SMALL_GRID, "trial": trained.folder}
        message = rejected("evaluate", *(argument.format(**names) for argument in arguments.split()))
        assert message.startswith("san: ") and len(message.splitlines()) == 1, message
        assert all(word in message for word in words), message


def test_rejects_runs_whose_checkpoints_are_elsewhere(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: Rejected
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", trained.grid_run.workspace.tracking_uri)
    for name in (trained.result.run_id, f"models:/{MODEL}/1"):
        message = rejected("evaluate", name, "--runs", tmp_path)
        assert message.startswith(f"san: {name}: ")
        assert trained.trial.key in message and str(tmp_path) in message


def test_existing_file_takes_precedence_over_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0123456789ab").write_text("")
    with resolve_checkpoint("0123456789ab", open_store(tmp_path)) as (path, _):
        assert path == Path("0123456789ab")


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
    monkeypatch.setattr(evaluate, "AT_ONCE", 1)
    table = tmp_path / "table.csv"
    table.symlink_to("elsewhere.csv")
    code, out, err = run_san("predict", "san10_patchwise_cifar10", photos, "recipe.batch_size=8", "--top", "2", "--csv", table)
    assert (code, out) == (1, f"{table}: 70 images, of which 2 cannot be used\n") and "skipped 1 .txt" in err
    rows = list(csv.DictReader((tmp_path / "elsewhere.csv").open()))
    assert table.is_symlink()
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
    (tmp_path / "list.txt").write_bytes(b"caf\xe9.jpg\r\n\r\n")
    code, out, _ = run_san("predict", "san10_patchwise_cifar10", tmp_path / "pipe.jpg", "--list", tmp_path / "list.txt")
    assert (code, out) == (1, f"{tmp_path}/pipe.jpg: not a file, but a pipe or a device\ncaf\\udce9.jpg: no such file\n")


def test_table_is_complete_or_called_part(
    photos: Path, printed: Printed, run_san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, part = tmp_path / "table.csv", tmp_path / "table.csv.part"
    table.write_text("an earlier table")
    images = sorted((photos / "b/c").glob("6?.jpg"))[:9]
    arguments = "predict", "san10_patchwise_cifar10", *images, "recipe.batch_size=3", "--csv"
    written = evaluate.write_csv

    def interrupted(*given: Any) -> Iterator[Prediction]:
        yield from itertools.islice(written(*given), 4)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "write_csv", interrupted)
    code, out, err = run_san(*arguments, table)
    assert (code, out) == (1, "") and str(part) in err
    assert table.read_text() == "an earlier table"
    assert len(list(csv.DictReader(part.open()))) == 4

    monkeypatch.setattr(evaluate, "write_csv", written)
    printed(*arguments, table)
    assert len(list(csv.DictReader(table.open()))) == 9
    assert not part.exists()
    assert printed(*arguments, "-") == table.read_text()


def test_predict_rejects(tmp_path: Path, rejected: Rejected) -> None:
    for arguments, words in (
        ([], "no images given"),
        ([tmp_path], f"no images in {tmp_path}"),
        ([tmp_path / "1.jpg", "--csv", tmp_path / "none/x.csv"], "cannot write this file"),
    ):
        assert words in rejected("predict", "san10_patchwise_cifar10", *arguments)
