"""The parts that sections are made of, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MINUS = "\N{MINUS SIGN}"


def section(heading: str, *parts: str) -> str:
    name = heading.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(heading)}</h2>\n{"".join(parts)}\n</section>'


def scroll(table: str, name: str, kind: str = "scroll") -> str:
    """A table that scrolls in its own box where the window is narrow; the keyboard reaches it."""
    return f'<div class="{kind}" role="region" aria-label="{escape(name)}" tabindex="0">{table}</div>'


def panel(heading: str, chart: str) -> str:
    return f'<div class="panel"><h3>{escape(heading)}</h3>{chart}</div>'


def figure(panels: Sequence[str], key: str, note: str = "") -> str:
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    kind = "panels" if len(panels) % 3 == 0 else "panels two"
    return f'<div class="figure">{key}<div class="{kind}">{"".join(panels)}</div>{told}</div>'
