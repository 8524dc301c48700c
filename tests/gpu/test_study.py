"""Trials of the study on one device, without DALI, Ray and MLflow."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.errors import UserError
from experiments.evaluation.robustness import ROBUSTNESS_METRICS
from experiments.tracking.results_file import ResultsFile
from experiments.training.checkpoint import Checkpoint
from san.models.registry import VARIANTS
from tests.gpu.study import main, missing

GRID = """
question: Does it train?
imports: [mine.py]
seeds: [0, 1]
rows:
  - {id: resnet26, model: {name: resnet26}}
  - {id: dropped, model: {name: resnet26}, recipe: {drop_path: 0.9}}
  - {id: mine, model: {name: mine}}
  - {id: diverges, model: {name: resnet26}, recipe: {lr: 1e30}}
"""
MINE = """
import san
from torch import nn

@san.register_model("mine")
def mine(num_classes: int, in_channels: int = 3) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "val"), "abcdef", range(2)):
        file = tmp_path / "images" / split / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(file)
    return tmp_path / "images"


def options(images: Path, *more: str) -> argparse.Namespace:
    keys = [f"data.root={images}", "data.train_per_class=null", *more]
    off = dict.fromkeys(("robustness", "checkpoints"), False)
    return argparse.Namespace(known=[], only=None, profile="cifar10", seeds=None, overrides=keys, **off)


def test_trials_on_a_gpu_have_the_keys_of_those_on_a_cpu(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = missing(["position"], options(images))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu = missing(["position"], options(images))
    assert {trial.key for trial in on_gpu} == {trial.key for trial in on_cpu}
    assert all(trial.config.engine.cuda_graphs for trial in on_gpu)


@pytest.mark.parametrize("setting", ["recipe.patience=1", "recipe.class_weights=balanced", "data.flip=false"])
def test_refuses_what_only_san_run_can_do(images: Path, setting: str) -> None:
    with pytest.raises(UserError, match=setting.split("=")[0].rpartition(".")[2]):
        missing(["position"], options(images, setting))


def test_refuses_a_mistyped_row(images: Path) -> None:
    chosen = options(images)
    chosen.only = ["pairwise_none", "pairwise_nona"]
    with pytest.raises(UserError, match="--only pairwise_nona: not a row of position"):
        missing(["position"], chosen)


def test_refuses_checkpoints_that_would_replace_each_other(images: Path, tmp_path: Path) -> None:
    for name, model in (("a", "resnet26"), ("b", "resnet38")):
        text = f"question: q\nproduct: {{recipe.lr: [0.1]}}\nbase: {{model: {{name: {model}}}}}"
        (tmp_path / f"{name}.yaml").write_text(text)
    chosen = options(images)
    chosen.checkpoints = True
    with pytest.raises(UserError, match=r"--checkpoints: several grids have lr0\.1"):
        missing([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")], chosen)


@pytest.mark.slow
@patch.dict(VARIANTS)
def test_missing_trials_are_appended_and_continue(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, with few images in few steps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    grid, out = tmp_path / "small.yaml", tmp_path / "out"
    grid.write_text(GRID)
    (tmp_path / "mine.py").write_text(MINE)
    keys = [
        f"data.root={images}",
        "data.train_per_class=null",
        "recipe.epochs=1",
        "recipe.warmup_epochs=0",
        "recipe.batch_size=6",
    ]

    def study(*options: str) -> str:
        arguments = ["study", str(out), "--grid", str(grid), "--processes", "2", *options, *keys]
        monkeypatch.setattr(sys, "argv", arguments)
        main()
        return capsys.readouterr().out

    assert "4 trials are missing" in study("--budget", "600", "--seeds", "1", "--checkpoints")
    first = ResultsFile(out / "trials.csv").read()
    assert len(first) == 3 and len({result.metrics["val/loss"] for result in first.values()}) == 3
    checkpoint = Checkpoint.read(out / "resnet26.pt")
    assert checkpoint.key in first and checkpoint.model().num_classes == 6
    assert "5 trials are missing" in study("--budget", "0.001")  # ends before a process has started
    assert ResultsFile(out / "trials.csv").read() == first
    assert "5 trials are missing" in study("--budget", "600")
    assert len(ResultsFile(out / "trials.csv").read()) == 6
    last = (out / "trials.csv").read_text().splitlines()
    assert last[0].endswith("hardware,loader,revision") and [line.split(",")[10] for line in last[1:]] == ["CPU"] * 6

    assert "4 trials are missing" in study("--budget", "600", "--seeds", "1", "--robustness")
    measured = ResultsFile(out / "trials-robustness.csv", ROBUSTNESS_METRICS).read()
    assert measured.keys() == first.keys()
    for result in measured.values():
        assert result.metrics.keys() >= set(ROBUSTNESS_METRICS)
        assert result.metrics["robustness/none/top1"] == pytest.approx(result.metrics["val/top1"], abs=1e-3)
