"""Files of the user in grids: they register rows, travel to workers as source, and are part of keys."""

import csv
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import pytest

import experiments
from experiments.config.config import PROJECT_DIR
from experiments.config.grid import GridRequest
from experiments.config.imports import import_sources
from experiments.runner.grid_run import open_grid_run
from san.models.registry import VARIANTS
from san.nn.relation import PAIRWISE
from tests.experiments.config.test_grid import error_message, expand, expanded

FILE = """\
import san
import torch
from torch import nn
from san import ops

@san.register_relation("maximum", lambda R, K: R)
def maximum(phi, psi, footprint):
    return torch.maximum(phi.flatten(2).unsqueeze(2), ops.unfold(psi, footprint))

@san.register_model("tiny")
def tiny(num_classes: int, in_channels: int = 3, width: int = 8, bias: bool = True,
         shift: bool | None = None, flags: tuple[bool, ...] = (), scale: int | float = 1) -> nn.Module:
    layers = nn.Linear(in_channels, width), nn.Linear(width, num_classes, bias)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)
"""
GRID = """\
question: Does mine work?
imports: [code/mine.py]
rows:
  - {id: relation, model: {name: san10_pairwise, relation: maximum}}
  - {id: model, model: {name: tiny, width: 4, bias: false}}
  - {id: ours, model: {name: resnet26}}
"""


@contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """At the end of the block, its imports are forgotten."""
    with patch.dict(VARIANTS), patch.dict(PAIRWISE):
        yield
    for name in [name for name in sys.modules if name.startswith("san_import_")]:
        del sys.modules[name]


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(FILE)
    path = tmp_path / "mine.yaml"
    path.write_text(GRID)
    with as_in_a_new_process():
        yield path


def test_rows_use_what_a_file_registers(grid: Path) -> None:
    """A model from elsewhere does not get the stages and the width that the profile gives to this project's networks."""
    made = expand(grid)
    assert made["relation"].config.model.spec().build(10).num_classes == 10
    assert made["model"].config.model.overrides == {"width": 4, "bias": False}
    assert made["ours"].config.model.overrides["width_mult"] == 0.5


def test_types_of_parameters_are_those_of_the_function(grid: Path) -> None:
    grid.write_text(GRID.replace("bias: false", "shift: true, flags: [true, false]"))
    spec = expand(grid)["model"].record["model"]
    assert spec["shift"] is True and spec["flags"] == (True, False)
    grid.write_text(GRID.replace("bias: false", "scale: true"))
    assert "model.scale: must be a number" in error_message(lambda: expand(grid))


def test_key_does_not_depend_on_other_rows(grid: Path) -> None:
    """1 and 1.0 are equal, but not the same text."""
    row = "  - {id: real, model: {name: tiny, scale: 1.0}}\n"
    grid.write_text(GRID + row.replace("real", "whole").replace("1.0", "1") + row)
    keys = {row: trial.key for row, trial in expand(grid).items()}
    with as_in_a_new_process():
        grid.write_text(GRID + row)
        assert expand(grid)["real"].key == keys["real"] != keys["whole"]


@pytest.mark.parametrize("path", sorted((PROJECT_DIR / "docs/results").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_grids_of_results_contain_every_row_of_their_results(path: Path) -> None:
    with as_in_a_new_process():
        rows = set(expand(path, profile="cifar10-full" if path.stem.startswith("search") else "cifar10"))
    results = path.with_suffix(".csv")
    if results.exists():
        with open(results, newline="") as file:
            assert {line.get("row") or line["trial"].split("/")[1].split("-")[0] for line in csv.DictReader(file)} <= rows


@pytest.mark.parametrize("value", ["1", "0.0", '"no"'])
def test_true_and_false_have_no_other_spellings(grid: Path, value: str) -> None:
    grid.write_text(GRID.replace("bias: false", f"bias: {value}"))
    assert "model.bias: should be a valid boolean" in error_message(lambda: expand(grid))


def test_grid_that_extends_another_finds_its_imports(grid: Path) -> None:
    (grid.parent / "below").mkdir()
    below = grid.parent / "below" / "other.yaml"
    below.write_text("extends: ../mine.yaml\nquestion: And here?\n")
    assert expand(below)["model"].imports == expand(grid)["model"].imports


def test_option_imports_a_file_besides_those_of_the_grid(grid: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(FILE.replace('"tiny"', '"other"'))
    grid.write_text(GRID.replace("name: tiny", "name: other"))
    mine = grid.parent / "code" / "mine.py"
    assert [file.name for file in expanded(grid, imports=[str(mine), str(other)]).imports] == ["mine", "other"]


def test_results_of_a_grid_are_read_with_the_same_option(grid: Path, tmp_path: Path) -> None:
    keys = [trial.key for trial in open_grid_run(GridRequest(grid, runs=tmp_path / "runs"), writes=False).trials]
    grid.write_text(GRID.replace("imports: [code/mine.py]\n", ""))
    table = experiments.load_results(grid, runs=tmp_path / "runs", imports=[str(grid.parent / "code" / "mine.py")])
    assert list(table["key"]) == keys


def test_key_does_not_depend_on_the_order_of_files(grid: Path) -> None:
    (grid.parent / "code" / "empty.py").touch()
    keys = []
    for imports in ("[code/mine.py, code/empty.py]", "[code/empty.py, code/mine.py]"):
        grid.write_text(GRID.replace("[code/mine.py]", imports))
        keys.append({row: trial.key for row, trial in expand(grid).items()})
    assert keys[0] == keys[1]


def test_key_depends_on_the_source_of_the_rows_that_use_it(grid: Path) -> None:
    before = {row: trial.key for row, trial in expand(grid).items()}
    (grid.parent / "code" / "mine.py").write_text(f"{FILE}\n# another version\n")
    after = {row: trial.key for row, trial in expand(grid).items()}
    assert {row for row in before if before[row] != after[row]} == {"relation", "model"}


def test_file_that_was_edited_and_restored_is_imported_again(grid: Path) -> None:
    def parameters(text: str) -> int:
        (grid.parent / "code" / "mine.py").write_text(text)
        return sum(weight.numel() for weight in expand(grid)["model"].config.model.spec().build(10).parameters())

    counts = [parameters(text) for text in (FILE, FILE.replace("nn.Flatten()", "nn.Flatten(), nn.Linear(3, 3)"), FILE)]
    assert counts[0] == counts[2] < counts[1]


def test_worker_needs_only_the_trial(grid: Path) -> None:
    """On another node, the file itself does not exist. The key is the same there."""
    with as_in_a_new_process():
        trial, twin = expand(grid)["model"], expand(grid)["model"]
        pickled = cloudpickle.dumps(trial)  # before it has computed its key
        key = twin.key
    (grid.parent / "code" / "mine.py").unlink()
    assert "tiny" not in VARIANTS
    arrived = pickle.loads(pickled)
    import_sources(arrived.imports)
    assert (arrived.key, arrived.config.model.spec().build(10).num_classes) == (key, 10)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def broken(", "SyntaxError: "),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_file_that_cannot_be_imported_is_named(content: str | None, reason: str, grid: Path) -> None:
    file = grid.parent / "code" / "mine.py"
    file.unlink()
    if content is not None:
        file.write_text(content)
    message = error_message(lambda: expand(grid))
    assert message.startswith(f"{file}: cannot be imported") and reason in message
