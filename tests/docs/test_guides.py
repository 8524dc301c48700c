"""The README, `docs/start` and `docs/guides`: every command and every Python block runs, and every grid is valid.

Each page runs in order in a folder of its own. Commands use grids with one row each and train for one epoch on few images.
`KEY`, and a key after `san attention`, `san attention-page` or `--compare`, become that of a trial that was trained before. A
block after `<!-- not run: REASON -->` is only checked: its Python compiles, and the options of its `san` commands exist.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import mlflow
import pytest
import yaml

from experiments.cli.commands import cli, main
from experiments.config.config import TrialConfig, keys_at
from experiments.config.expand import expand, read_grid
from experiments.config.grid import GridRequest
from experiments.paper.tables import table_names
from experiments.runner.grid_run import open_grid_run

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", ROOT / "docs/index.md", *ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/guides/*.md"))
)
BLOCK = re.compile(r"^(?:<!-- (not run|not a grid): [^\n]* -->\n)?```(sh|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = {"recipe.epochs": "1", "recipe.batch_size": "8", "data.train_per_class": "4"}
KEY = re.compile(r"\bKEY\b|(?:(?<=san attention )|(?<=san attention-page )|(?<=--compare ))[0-9a-f]{12}\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    note: str | None
    before: str
    """The page's text between the block before and this one."""

    @property
    def file(self) -> str | None:
        """The name of the file as which the page says to save the block."""
        named = re.findall(r"[Ss]ave this as `([\w.-]+)`", self.before)
        return named[-1] if named else None

    @property
    def commands(self) -> list[list[str]]:
        """The command lines of a shell block, split; a quoted argument may have several lines."""
        found, rest = list[list[str]](), ""
        for line in self.text.splitlines():
            rest += line + "\n"
            try:
                found.append(shlex.split(rest.replace("\\\n", " "), comments=True))
            except ValueError:  # an open quotation
                continue
            rest = ""
        return [command for command in found if command]


class Reader:
    """Somebody who follows a page in an empty folder."""

    def __init__(self, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, key: str = "KEY") -> None:
        self.folder, self.runs, self.key = folder, runs, key
        (folder / "runs").symlink_to(runs)
        self.seen = set(runs.glob("checkpoints/*"))
        self.names: dict[str, Any] = {}
        self.monkeypatch = monkeypatch
        for path in (*ROOT.glob("experiments/grids/*.yaml"), ROOT / "docs/gallery.yaml"):
            grid = read_grid(path)
            # The first pairwise row, else the first.
            row = next((row for row in grid["rows"] if "pairwise" in row["id"]), grid["rows"][0])
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(yaml.safe_dump(grid | {"rows": [row]}))

    def follow(self, block: Block) -> None:
        """Does what a block says."""
        if block.language == "yaml":
            self.read_yaml(block)
        elif block.note is not None:
            self.check(block)
        elif block.language == "python" and (name := block.file) and f"`python {name}`" not in block.before:
            (self.folder / name).write_text(block.text)
        elif block.language == "python":
            exec(compile(self.with_key(block.text), "<guide>", "exec"), self.names)
        else:
            for command in block.commands:
                assert command[0] == "san", f"mark the block with {command} as not run"
                self.run(self.arguments(command))

    def with_key(self, text: str) -> str:
        """The text with the key of a trial of the page's latest command that trained, else of the first of all, in place of the
        guide's."""
        if new := set(self.runs.glob("checkpoints/*")) - self.seen:
            self.key = max(new).name
            self.seen |= new
        return KEY.sub(self.key, text)

    def arguments(self, command: list[str]) -> list[str]:
        """A `san` command's arguments, with the small settings where it takes a grid."""
        _, name, *rest = shlex.split(self.with_key(shlex.join(os.path.expandvars(part) for part in command)))
        if name in ("plan", "run", "report"):
            rest = [part for part in rest if part.partition("=")[0] not in SMALL] + [f"{key}={SMALL[key]}" for key in SMALL]
        for option in (part for before, part in pairwise(rest) if before == "--out"):
            Path(option).parent.mkdir(parents=True, exist_ok=True)
        return [name, *rest]

    def run(self, arguments: list[str]) -> None:
        """Runs `san` in this process; an exit code other than 0 fails. `test_end_to_end.py` runs a grid with Ray."""
        command = f"san {shlex.join(arguments)}"
        if arguments[0] == "run" and "--serial" not in arguments:
            arguments = [*arguments, "--serial"]
        self.monkeypatch.setattr(sys, "argv", ["san", *arguments])
        try:
            main()
        except SystemExit as stop:
            found_broken_images = arguments[:2] == ["data", "check"] and stop.code == 1
            assert not stop.code or found_broken_images, f"exit code {stop.code} of {command}"

    def read_yaml(self, block: Block) -> None:
        """Validates a grid, and saves it where the page says so."""
        if block.note is not None:
            yaml.safe_load(block.text)
            return
        path = self.folder / (block.file or "grid.yaml")
        path.write_text(block.text)
        expand(GridRequest(path, overrides=("data.root=images",)), table_names())

    def check(self, block: Block) -> None:
        """Checks a block that is not run: Python compiles, and `san` has the commands and options."""
        if block.language == "python":
            compile(block.text, "<guide>", "exec")
            return
        for _, *arguments in (command for command in block.commands if command[0] == "san"):
            command: click.Command = cli
            while isinstance(command, click.Group):
                command = command.commands[arguments.pop(0)]
            options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
            assert {part.partition("=")[0] for part in arguments if part.startswith("-")} <= options, block.text


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page in order."""
    end = 0
    for match in BLOCK.finditer(text):
        yield Block(match[2], match[3], match[1], text[end : match.start()])
        end = match.end()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder of runs for all pages, with one trial of the footprint grid, and the key of this trial."""
    with pytest.MonkeyPatch.context() as patch:
        runs = tmp_path_factory.mktemp("runs")
        patch.setenv("SAN_RUNS", str(runs))
        first = Reader(tmp_path_factory.mktemp("first"), runs, patch)
        patch.chdir(first.folder)
        first.run(first.arguments(["san", "run", "experiments/grids/footprint.yaml"]))
        (checkpoints,) = runs.glob("checkpoints/*")
        yield runs, checkpoints.name


@pytest.fixture
def reader(tmp_path: Path, runs: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    folder, first = runs
    yield Reader(tmp_path, folder, monkeypatch, first)
    mlflow.set_tracking_uri(None)  # a guide sets it for the process


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.compiles] if page.endswith("export.md") else []) for page in PAGES]
)
def test_a_page_does_what_it_says(page: str, reader: Reader) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(blocks(text))
    assert len(found) == len(re.findall(r"^```(?:sh|python|yaml)", text, re.MULTILINE))
    assert text.count("<!--") == sum(block.note is not None for block in found)
    for block in found:
        reader.follow(block)


@pytest.mark.parametrize("page", PAGES)
def test_settings_in_the_text_exist(page: str) -> None:
    text = re.sub(r"\bdata\.val_split_\*|`data\.\*`", "", (ROOT / page).read_text(encoding="utf-8"))
    for section, key in re.findall(r"[`\s](data|recipe|engine|resources|checkpointing)\.(\w+)", text):
        assert key in keys_at(TrialConfig, (section,)), f"{section}.{key}"


def test_keys_of_the_gallery_are_those_of_its_trials(tmp_path: Path) -> None:
    """`make gallery` runs the guide's commands as they are."""
    trials = open_grid_run(GridRequest(ROOT / "docs/gallery.yaml", runs=tmp_path)).trials
    text = (ROOT / "docs/guides/attention.md").read_text()
    assert {trial.key for trial in trials} == set(re.findall(r"\b[0-9a-f]{12}\b", text))
