"""The command `san`: bad input is one clear sentence, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.cli import main
from tests.experiments.conftest import SMALL_GRID

San = Callable[..., tuple[int, str, str]]


@pytest.fixture
def san(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> San:
    """Runs the command in this process, with its runs in a fresh folder; returns exit code, stdout, stderr."""
    monkeypatch.setenv("SAN_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["san", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("command", [[], ["models"], ["data"], ["data", "prepare"], ["run"], ["report"], ["ui"], ["plan"]])
def test_help(command: list[str], san: San) -> None:
    code, out, _ = san(*command, "--help")
    assert code == 0
    assert out.startswith("Usage: san")


def test_models_as_json(san: San) -> None:
    code, out, _ = san("models", "san*_pairwise", "--json")
    assert code == 0
    assert [model["name"] for model in json.loads(out)] == ["san10_pairwise", "san15_pairwise", "san19_pairwise"]


def test_plan_runs_nothing(san: San, tmp_path: Path) -> None:
    code, out, _ = san("plan", str(SMALL_GRID), "--json")
    assert code == 0
    assert [(cell["row"], cell["finished"]) for cell in json.loads(out)] == [
        ("pairwise_3", False),
        ("resnet26_3", False),
        ("patchwise_3", False),
    ]
    assert not (tmp_path / "runs").exists()


def test_report_as_json(san: San) -> None:
    code, out, _ = san("report", str(SMALL_GRID), "--json")
    assert code == 0
    assert [(line["id"], line["paper_top1"], line["top1"]) for line in json.loads(out)] == [
        ("pairwise_3", 75.3, None),
        ("resnet26_3", 76.0, None),
        ("patchwise_3", 77.4, None),
    ]


def bad_grid(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "question: q\ntable: footprint\nrows: [{id: a, model: {name: resnet26, footprnt: 3}, recipe: {epoch: 1}}]\n"
    )
    return str(path)


def image_folder(root: Path, classes: tuple[str, ...], empty: tuple[str, ...] = ()) -> str:
    for split in ("train", "val"):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            if name not in empty:
                (folder / "1.jpg").write_bytes(b"never decoded here")
    return f"data.root={root}"


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "unknown keys and values, all at once": (
        lambda tmp: ["run", bad_grid(tmp)],
        [
            "row a: recipe.epoch: unknown key; did you mean 'epochs'?",
            "row a: model.footprnt: unknown key; did you mean 'footprint'?",
        ],
    ),
    "missing grid": (lambda tmp: ["run", "no-such.yaml"], ["no-such.yaml: cannot be read", "give the path of a grid"]),
    "unknown profile": (
        lambda tmp: ["run", str(SMALL_GRID), "--profile", "laptop"],
        ["unknown profile 'laptop'; known: digits, imagenet"],
    ),
    "missing data folder": (
        lambda tmp: ["run", str(SMALL_GRID), "data.source=folder", f"data.root={tmp / 'nowhere'}"],
        ["nowhere"],
    ),
    "empty class folders": (
        lambda tmp: [
            "run", str(SMALL_GRID), "data.source=folder", image_folder(tmp / "images", ("cat", "dog", "owl"), ("dog", "owl"))
        ],
        ["dog", "owl"],
    ),
    "more workers than CPUs": (
        lambda tmp: ["run", str(SMALL_GRID), "placement.workers=20"],
        ["a cell needs 20 workers with 1 CPU each", "ask for less per cell or join a larger cluster"],
    ),
    "more workers than images in a batch": (
        lambda tmp: ["run", str(SMALL_GRID), "placement.workers=2", "recipe.batch=1"],
        ["batch"],
    ),
    "footprint larger than a map": (
        lambda tmp: ["run", str(SMALL_GRID), "model.footprint=13"],
        [
            "row pairwise_3: model: stage 2 of san10_pairwise at input size 24: a 13x13 footprint needs a map of at least 7x7",
            "row patchwise_3: model: stage 2 of san10_patchwise at input size 24: a 13x13 footprint",
        ],
    ),
    "crop that is not one": (lambda tmp: ["run", str(SMALL_GRID), "data.resize=8"], ["resize must be at least size"]),
    "runs in a file": (lambda tmp: ["run", str(SMALL_GRID), "--runs", bad_grid(tmp)], ["bad.yaml", "cannot be"]),
    "data in a file": (
        lambda tmp: ["plan", str(SMALL_GRID), f"data.root={bad_grid(tmp)}/x"],
        ["bad.yaml/x: no images", "give another data.root"],
    ),
    "digits in a file": (
        lambda tmp: ["data", "prepare", "digits", bad_grid(tmp) + "/x"],
        ["cannot be written", "another folder"],
    ),
    "unknown option": (lambda tmp: ["run", str(SMALL_GRID), "--speed", "9"], ["No such option"]),
    "no cluster there": (
        lambda tmp: ["run", str(SMALL_GRID), "--address", "127.0.0.1:9"],
        ["no Ray cluster answers at '127.0.0.1:9'"],
    ),
    "nothing to browse": (lambda tmp: ["ui"], ["no runs yet; train a grid with `san run` first"]),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_rejects(what: str, san: San, tmp_path: Path) -> None:
    arguments, sentences = MISTAKES[what]
    code, out, err = san(*arguments(tmp_path))
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for sentence in sentences:
        assert sentence in err
    assert not (tmp_path / "runs").exists()
