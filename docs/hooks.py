"""What `mkdocs build` does besides its plugins: it draws formulas, so that pages need no scripts from other sites, and runs
notebooks, which become pages with their outputs.
"""

from __future__ import annotations

import functools
import html
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from mkdocs.structure.files import File

from docs.notebook import as_markdown

matplotlib.use("agg")
executed = functools.cache(lambda path, _changed: as_markdown(Path(path)))  # once, also if `mkdocs serve` builds again


def on_config(config: Any) -> Any:
    """Renders fences marked `math`, which GitHub renders too."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "formula", "format": formula})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each notebook, which stays as a file to download."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        content = executed(file.abs_src_path, Path(file.abs_src_path).stat().st_mtime)
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: object) -> str:
    """Makes links to notebooks, which GitHub shows, links to their pages."""
    return markdown if page.file.generated_by else re.sub(r"(\]\(\S+)\.ipynb\)", r"\1.md)", markdown)


def formula(source: str, language: str, css_class: str, *args: object, **kwargs: object) -> str:
    """Returns a TeX formula as an inline SVG in the color of the text."""
    tex = " ".join(source.split())
    settings: Any = {"svg.fonttype": "path", "svg.hashsalt": "san", "mathtext.fontset": "stix"}
    drawn = io.StringIO()
    with matplotlib.rc_context(settings):
        math_to_image(f"${tex}$", drawn, prop=FontProperties(size=13), format="svg")
    svg = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(tex, quote=True)}" fill="currentColor" ', 1)
    return f'<div class="{css_class}">{svg}</div>'
