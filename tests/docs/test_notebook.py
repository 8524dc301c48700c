"""The notebook: it runs anywhere, and is committed without outputs. The build of the site runs it, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import pytest

from docs.notebook import as_markdown

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_without_data_and_results(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)  # no images of CIFAR-10
    monkeypatch.setenv("SAN_RUNS", str(tmp_path / "runs"))
    text = as_markdown(notebook)
    figures = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,', text)
    assert len(figures) == 4 and all(figures)
    assert "parameters (M)" in text and "patchwise_11" in text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
