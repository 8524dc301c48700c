"""A model of timm, a relation and a model of the user are trained on three nodes. One node fails."""

from pathlib import Path

import pytest

pytest.importorskip("timm", reason="timm is missing: run `make test-clients`")

from tests.clients import conftest
from tests.experiments.cli.test_nodes import MINE, lose_a_node

GRID = """
question: Does a model of timm survive a lost node?
imports: [operators.py, mine.py]
rows:
  - {id: timm, model: {name: timm/test_resnet}}
  - {id: maximum, model: {name: san10_pairwise, footprint: 3, relation: maximum}}
  - {id: cnn, model: {name: plain_cnn}}
"""


def test_models_of_all_kinds_survive_a_lost_node(tmp_path: Path) -> None:
    (tmp_path / "operators.py").write_text(Path(conftest.__file__).read_text())  # timm imports torchvision on every node
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "all.yaml").write_text(GRID)
    lose_a_node(tmp_path / "all.yaml", tmp_path / "runs")
