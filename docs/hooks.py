"""What `mkdocs build` does besides its plugins: it draws formulas, so that pages need no scripts from other sites."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image


def on_config(config: Any) -> Any:
    """Renders fences marked `math`, which GitHub renders too."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "formula", "format": formula})
    return config


def formula(source: str, language: str, css_class: str, *args: object, **kwargs: object) -> str:
    """Returns a TeX formula as an inline SVG in the colour of the text."""
    tex = " ".join(source.split())
    settings: Any = {"svg.fonttype": "path", "svg.hashsalt": "san", "mathtext.fontset": "stix"}
    drawn = io.StringIO()
    with matplotlib.rc_context(settings):
        math_to_image(f"${tex}$", drawn, prop=FontProperties(size=13), format="svg")
    svg = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(tex, quote=True)}" fill="currentColor" ', 1)
    return f'<div class="{css_class}">{svg}</div>'
