"""The documentation: the strict build passes, fails on what readers would trip over, and the generated reference is current."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import browser

ROOT = Path(__file__).parent.parent.parent


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert {"." if page.name == "index" else page.as_posix() for page in pages} == built


def test_the_python_api_has_its_docstrings(site: Path) -> None:
    text = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    for name in ("create_model", "complexity.complexity", "PairwiseAttention", "load_checkpoint", "ops.aggregation"):
        assert f'id="san.{name}"' in text


def test_formulas_are_drawn(site: Path) -> None:
    text = (site / "explanation" / "operators" / "index.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<div class="formula"><svg role="img" aria-label="', text)) >= 5


def test_every_picture_is_shown() -> None:
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        found = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / path).resolve() for path in found}
    assert shown >= {path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")}


def add_broken_link(docs: Path) -> None:
    (docs / "index.md").write_text("# Home\n\n[Gone](gone.md) and [other](other.md)\n")


def add_broken_anchor(docs: Path) -> None:
    (docs / "index.md").write_text("# Home\n\n[Other](other.md#gone)\n")


def add_orphan(docs: Path) -> None:
    (docs / "orphan.md").write_text("# Not in the navigation\n")


def add_nothing(docs: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_nothing, None),
        (add_broken_link, "gone.md"),
        (add_broken_anchor, "does not contain an anchor '#gone'"),
        (add_orphan, "orphan.md"),
    ],
)
def test_strict_build_fails_on(change: Callable[[Path], None], message: str | None, tmp_path: Path) -> None:
    """A small project with our settings and two pages."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Home\n\n[Other](other.md#part)\n")
    (docs / "other.md").write_text("# Other\n\n## Part\n")
    shutil.copy(ROOT / "docs" / "hooks.py", docs)
    shutil.copy(ROOT / "docs" / "site.css", docs)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings, found = re.subn(r"^nav:\n(?:  .*\n)+", "nav: [index.md, other.md]\n", settings, flags=re.MULTILINE)
    assert found == 1
    (tmp_path / "mkdocs.yml").write_text(settings)
    change(docs)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == (0 if message is None else 1), done.stderr
    assert message is None or message in done.stderr


def test_generated_pages_are_current() -> None:
    """If not, run `make docs`."""
    done = subprocess.run([sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_model_field_is_explained() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `model\.\w+` .*\|$", text, re.MULTILINE)
    assert len(rows) > 10
    assert not [row for row in rows if row.endswith("|  |")]


@pytest.mark.slow
def test_pages_fit_narrow_screens_and_load_nothing_from_elsewhere(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        for path in sorted(site.rglob("index.html")):
            for width in (1280, 400):
                page.show(width, dark=width == 400)
                page.open(path.as_uri())
                overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert overflow <= 0, f"{path.relative_to(site)} at {width} pixels"
                assert page.requests == [], path
