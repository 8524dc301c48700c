"""Shared fixtures: the `san` command, small grids, an MLflow database, a process group and a trained trial."""

import functools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from experiments.cli.commands import main
from experiments.config.config import DataConfig
from experiments.config.grid import GridRequest, Trial
from experiments.runner.grid_run import GridRun, open_grid_run
from experiments.runs.store import LocalStore
from experiments.runs.workspace import Workspace
from experiments.tracking import Result
from experiments.tracking.tracker import Tracker
from experiments.training.checkpoint import Checkpoint, best_in
from experiments.training.engine import join_process_group
from experiments.training.trainer import run_trial

HELD_OUT = ("data.split=val-split", "data.val_split_per_class=12", "recipe.batch_size=64")
SMALL_GRID = Path(__file__).parent / "small.yaml"
San = Callable[..., tuple[int, str, str]]
Printed = Callable[..., str]
Rejected = Callable[..., str]
OpenGrid = Callable[..., GridRun]
WriteGrid = Callable[..., Path]
Place = Callable[[str], Workspace]


def captured_san(
    monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Runs `san` in this process; returns the exit code, the output and the errors."""
    monkeypatch.setattr(sys, "argv", ["san", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capture.readouterr()
    assert "Traceback" not in err
    return code, out, err


@pytest.fixture
def run_san(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> San:
    """As `captured_san`."""
    return functools.partial(captured_san, monkeypatch, capsys)


@pytest.fixture
def printed(run_san: San) -> Printed:
    """Runs `san` without an error; returns the output."""

    def run(*arguments: object) -> str:
        code, out, err = run_san(*arguments)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def rejected(run_san: San) -> Rejected:
    """Runs `san` with a mistake of the user; returns the message, after which nothing else was printed."""

    def run(*arguments: object) -> str:
        code, out, err = run_san(*arguments)
        assert (code, out) == (2, "")
        return err

    return run


@pytest.fixture
def write_grid(tmp_path: Path) -> WriteGrid:
    """Writes a grid's text to a file."""

    def write(text: str, name: str = "small.yaml") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database with its tables: making one takes seconds, copying it does not."""
    folder = tmp_path_factory.mktemp("mlflow")
    tracker = Tracker(f"sqlite:///{folder / 'mlflow.db'}", "none", "none")
    tracker.results()
    return folder / "mlflow.db"


@pytest.fixture
def runs(tmp_path: Path, empty_database: Path) -> Path:
    """A folder of runs with an MLflow database."""
    folder = tmp_path / "runs"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture
def open_small_grid(runs: Path) -> OpenGrid:
    """Opens a grid run on the small grid with a prepared tracker."""

    def open_it(*overrides: str) -> GridRun:
        grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", overrides, runs, serial=True))
        grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
        return grid_run

    return open_it


@pytest.fixture
def place(open_small_grid: OpenGrid, tmp_path: Path) -> Place:
    """A folder of runs with a tracker that knows the small grid."""

    def make(name: str) -> Workspace:
        grid_run = open_small_grid()
        runs = tmp_path / name
        runs.mkdir()
        shutil.copy(grid_run.workspace.runs / "mlflow.db", runs / "mlflow.db")
        return Workspace(LocalStore(runs), f"sqlite:///{runs / 'mlflow.db'}")

    return make


@pytest.fixture
def process_group() -> None:
    """A torch.distributed group of only this process, the same in all tests, because DeepSpeed cannot use a second one."""
    join_process_group(torch.device("cpu"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """7 images of cat, 5 of dog in train, one of each in val."""
    root = tmp_path / "images"
    for split, name, count in (("train", "cat", 7), ("train", "dog", 5), ("val", "cat", 1), ("val", "dog", 1)):
        (root / split / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (20, 15), (30 * index, 90, 20)).save(root / split / name / f"{index}.jpg")
    return root


def image_data(folder: Path, **fields: Any) -> DataConfig:
    """Settings of images in a folder, whose side is 8 pixels in the model's input."""
    defaults = {"source": "folder", "root": str(folder), "size": 8, "resize": 8, "crop_area": (0.5, 1), "crop_ratio": (1, 1)}
    return DataConfig.model_validate(defaults | {"flip": True, "mean": (0, 0, 0), "std": (1, 1, 1)} | fields)


@pytest.fixture(scope="session")
def folder_of_1000_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with as many classes as ImageNet; its files are not images."""
    root = tmp_path_factory.mktemp("imagenet")
    for split in ("train", "val"):
        for number in range(1000):
            (root / split / f"n{number:04d}").mkdir(parents=True)
            (root / split / f"n{number:04d}" / "0.jpg").write_bytes(b"x")
    return root


@dataclass(frozen=True)
class Trained:
    """A trial of two epochs, validated on 120 images of val-split."""

    grid_run: GridRun
    trial: Trial
    folder: Path

    @property
    def result(self) -> Result:
        return self.grid_run.tracker.results()[self.trial.key]

    @property
    def best(self) -> Checkpoint:
        found = best_in(LocalStore(self.folder))
        assert found is not None
        return found


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Trained:
    runs = tmp_path_factory.mktemp("trained") / "runs"
    runs.mkdir()
    shutil.copy(empty_database, runs / "mlflow.db")
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", ("recipe.epochs=2", *HELD_OUT), runs))
    grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
    trial = grid_run.trials[0]
    with patch.dict(os.environ):  # DeepSpeed's variables end with the training
        run_trial(grid_run.workspace, trial, lambda metrics: None)
    return Trained(grid_run, trial, grid_run.workspace.checkpoints(trial))
