"""The parts that sections are made of, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"
Columns = Sequence[tuple[str, str, str]]
"""Heading, field, form of a number."""


def section(heading: str, *parts: str) -> str:
    name = heading.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(heading)}</h2>\n{"".join(parts)}\n</section>'


def scroll(table: str, name: str, kind: str = "scroll") -> str:
    """A table that scrolls in its own box where the window is narrow; the keyboard reaches it."""
    return f'<div class="{kind}" role="region" aria-label="{escape(name)}" tabindex="0">{table}</div>'


def shell(commands: str) -> str:
    """What is typed; the keyboard scrolls long lines."""
    return f'<pre role="group" aria-label="Shell commands" tabindex="0"><code>{escape(commands)}</code></pre>'


def heads(groups: Mapping[str, Columns]) -> str:
    """The two lines above a table: groups of columns by their headings, after a first column `row`."""
    wide = "".join(f'<th class="start" scope="colgroup" colspan="{len(group)}">{name}</th>' for name, group in groups.items())
    firsts = [(heading, place) for group in groups.values() for place, (heading, _, _) in enumerate(group)]
    narrow = "".join(f'<th{start(place)} scope="col">{heading}</th>' for heading, place in firsts)
    return f'<thead><tr><th scope="col" rowspan="2">row</th>{wide}</tr><tr>{narrow}</tr></thead>'


def start(place: int) -> str:
    """Marks the first column of a group."""
    return ' class="start"' if place == 0 else ""


def number(value: float, form: str) -> str:
    return format(round(value, 1) + 0.0, form).replace("-", MINUS)  # there is no -0.0


def missing(words: str) -> str:
    return f'<span class="missing">{words}</span>'


def spread(half_width: float | None) -> str:
    """Half of an interval, behind its mean; nothing where there is none."""
    return "" if half_width is None else f' <span class="spread">± {half_width:.1f}</span>'


def ours(value: float, by_seed: Sequence[float], half_width: float | None, asked: int) -> str:
    """A mean over seeds with its interval, or with both values where there are two, and whether seeds are missing."""
    lacking = f" {missing(f'{len(by_seed)} of {asked} seeds')}" if len(by_seed) < asked else ""
    both = f' <span class="spread">({", ".join(number(one, ".1f") for one in by_seed)})</span>' if len(by_seed) == 2 else ""
    return f"<strong>{number(value, '.1f')}</strong>{spread(half_width)}{both}{lacking}"


def panel(heading: str, chart: str) -> str:
    return f'<div class="panel"><h3>{escape(heading)}</h3>{chart}</div>'


def figure(panels: Sequence[str], key: str, note: str = "") -> str:
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    kind = "panels" if len(panels) % 3 == 0 else "panels two"
    return f'<div class="figure">{key}<div class="{kind}">{"".join(panels)}</div>{told}</div>'
