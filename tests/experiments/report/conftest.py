"""Grids with invented results for the tests of reports."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from experiments.config.grid import GridRequest, Trial
from experiments.report.data import TableRow, table_rows
from experiments.runner.grid_run import GridRun, open_grid_run
from experiments.tracking import Result
from experiments.training.checkpoint import Checkpoint, Origin
from experiments.training.metrics import RunningEpoch
from san import Complexity
from tests.experiments.conftest import OpenGrid, WriteGrid
from tests.experiments.samples import EPOCH

QUESTION = "Is 5 < 7 & 'so' <script>document.title = 'hacked'</script><b>on</b>?"

GRID = f"""
    question: "{QUESTION}"
    table: footprint
    plot: {{x: model.footprint, series: model.name, label: "side of the footprint, pixels"}}
    base: {{recipe: {{epochs: 3}}}}
    rows:
      - {{id: resnet26_3, model: {{name: resnet26, footprint: 3}}}}
      - {{id: pairwise_3, model: {{name: san10_pairwise, footprint: 3}}}}
      - {{id: pairwise_5, model: {{name: san10_pairwise, footprint: 5}}}}
      - {{id: patchwise_3, model: {{name: san10_patchwise, footprint: 3}}}}
      - {{id: patchwise_5, model: {{name: san10_patchwise, footprint: 5}}}}
"""
TOPS = {"resnet26_3": 90.0, "pairwise_3": 92.0, "pairwise_5": 94.0, "patchwise_3": 95.0}
TOPS |= {"resnet26": 90.0, "san10_pairwise": 92.0}


class _Reader(HTMLParser):
    """Builds a tree; fails if an element is closed at the wrong place or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.builder, self.open = ElementTree.TreeBuilder(), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        self.open.append(tag)
        if tag in ("meta", "link", "br", "img"):
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop(), f"line {self.getpos()[0]}"
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        self.builder.data(data)


def read_page(path: Path) -> ElementTree.Element:
    """The elements of a well-formed page, which loads nothing from elsewhere."""
    reader = _Reader()
    reader.feed(path.read_text())
    assert not reader.open
    root = reader.builder.close()
    assert not [element for element in root.iter() if element.get("src", "").startswith("http")]
    assert not [link for link in root.iter("link") if not link.get("href", "").startswith("data:")]
    return root


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def rows_of_table(page: ElementTree.Element, section: str) -> list[list[str]]:
    """The texts of the cells of the tables in a section, without headings of columns."""
    rows = page.iterfind(f".//section[@id='{section}']//tbody/tr")
    return [[text_of(cell) for cell in row] for row in rows]


@pytest.fixture
def finished_grid(write_grid: WriteGrid, runs: Path) -> OpenGrid:
    """Makes a grid run of five rows and two seeds. One row is unfinished, and another one lacks a seed."""

    def make(grid: str = GRID) -> GridRun:
        grid_run = open_grid_run(GridRequest(write_grid(grid, "invented.yaml"), "digits", (), runs, seeds=2))
        grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
        for trial in grid_run.trials:
            if trial.row not in TOPS or (trial.row, trial.seed) == ("pairwise_5", 1):
                continue
            tracked = grid_run.tracker.open(trial)
            tracked.describe(trial, Complexity(1, 2, 3, ()))
            top1 = TOPS[trial.row] + trial.seed
            epochs = [replace(EPOCH, epoch=i, top1=top1 - 10 * (2 - i), train_loss=2.0 - 0.5 * i) for i in range(3)]
            tracked.log(epochs)
            tracked.summarise(epochs, images=100)
            tracked.finish()
        return grid_run

    return make


def save_untrained(grid_run: GridRun, trial: Trial) -> Path:
    """Writes a final checkpoint with random weights."""
    torch.manual_seed(0)
    config = trial.config
    engine = {"model": config.model.spec().build(10).state_dict(), "average": None, "workers": [{"buffers": [{}]}]}
    digits = tuple(map(str, range(10)))
    origin = Origin(trial.grid, trial.profile, trial.row, trial.seed, trial.record, trial.data_digest, digits)
    history = tuple(replace(EPOCH, epoch=number) for number in range(config.recipe.epochs))
    checkpoint = Checkpoint(trial.key, origin, history, RunningEpoch(len(history), 0.1), engine)
    path = grid_run.workspace.checkpoints(trial) / checkpoint.name
    path.parent.mkdir(parents=True)
    path.write_bytes(checkpoint.as_bytes())
    return path


def finished(grid_run: GridRun, tops: dict[str, float]) -> dict[str, Result]:
    """Results of a grid run whose named rows are finished with this top-1."""
    return {
        trial.key: Result("run", True, {"val/top1": tops[trial.row], "val/top5": 99.0, "summary/training_hours": 0.1})
        for trial in grid_run.trials
        if trial.row in tops
    }


def tabled(grid_run: GridRun, tops: dict[str, float]) -> list[TableRow]:
    """The table of such a grid run."""
    return table_rows(grid_run, finished(grid_run, tops))
