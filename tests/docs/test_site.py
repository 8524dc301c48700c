"""The documentation: the strict build passes, and the generated reference is current."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_strict_build_makes_every_page_with_its_docstrings_and_formulas(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    variables = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT), "SAN_RUNS": str(tmp_path / "runs")}
    # Elsewhere, so that the notebook finds no images of CIFAR-10.
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sources = [page for kind in ("md", "ipynb") for page in (ROOT / "docs").rglob(f"*.{kind}")]
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in sources}
    built = {page.parent.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("index.html")}
    assert {"." if page.name == "index" else page.as_posix() for page in pages} == built
    api = (tmp_path / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="san.{name}"' in api for name in ("create_model", "PairwiseAttention", "ops.aggregation"))
    operators = (tmp_path / "explanation" / "operators" / "index.html").read_text(encoding="utf-8")
    assert operators.count('<div class="formula"><svg role="img" aria-label="') >= 5
    notebook = (tmp_path / "start" / "tutorial" / "index.html").read_text(encoding="utf-8")
    figures = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,', notebook)
    assert len(figures) == 4 and all(figures)
    assert "parameters (M)" in notebook and "patchwise_11" in notebook


def test_notebooks_are_committed_without_outputs() -> None:
    notebooks = list((ROOT / "docs").rglob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        assert cells and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), notebook


def test_links_lead_to_files() -> None:
    """Without anchors, which the strict build checks."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


def test_every_picture_is_shown_and_has_a_description() -> None:
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for words, file in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert words, f"{page}: {file}"
            shown.add((page.parent / file).resolve())
    assert shown >= {path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")}


@pytest.mark.slow
def test_generated_pages_are_current() -> None:
    """If not, run `make docs`."""
    done = subprocess.run([sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_model_field_is_explained() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `model\.\w+` .*\|$", text, re.MULTILINE)
    assert len(rows) > 10
    assert not [row for row in rows if row.endswith("|  |")]
