"""What the attention looks at."""

from __future__ import annotations

import shlex
from html import escape

from experiments.report.attention import between_in_words
from experiments.report.page.content import Answer, Look
from experiments.report.page.elements import figure, section, shell
from experiments.report.tiles import MOST_CHANNELS, tiles

MOST_LOOKS = 4
"""Cells of which a page shows the attention: each takes a second, large networks several."""


def attention(answer: Answer) -> str:
    """What `san show` draws, of a few cells."""
    if not answer.looks:
        return ""
    what = (
        "The attention weights that each network assigns to the footprint of one pixel: the center of the middle validation "
        "image. For each kind of attention and each relation, the page shows the cell with the best top-1, after "
        f"its last epoch, but at most {MOST_LOOKS} cells in total, starting with the best of each kind."
    )
    key = (
        "Each square is a pixel of the footprint; the framed one is the pixel itself. Stronger colors mean larger weights; "
        "orange with a hole is negative. Spread is the standard deviation over channels. Dashed lines mark the border of the "
        "image; pixels beyond it are reflected."
    )
    panels = figure([*map(_look, answer.looks)], f'<p>{what}</p><p class="note key">{key}</p>')
    return section("Attention weights", panels)


def _look(look: Look) -> str:
    name, seen = escape(look.trial.name), look.seen
    if isinstance(seen, str):
        return f'<div class="panel"><h3>{name}</h3><p class="missing">No picture: {escape(seen)}</p></div>'
    relation = getattr(look.trial.config.model.spec(), "relation", None)
    heading = f"<h3>{name}: {seen.kind} attention{f', {relation}' if relation else ''}</h3>"
    (H, W), k = seen.map, seen.footprint
    some = f" ({MOST_CHANNELS} shown)" if len(seen.weight_GKn) > MOST_CHANNELS else ""
    facts = (
        f"{seen.model} predicts {seen.answer} for {seen.picture}. {seen.layer}, footprint {k} x {k}, map {H} x {W}, "
        f"{seen.channels}{some}."
    )
    picture = tiles(seen, f"seen-{look.trial.key}")
    told = f'<p class="note">{escape(facts)}</p>{picture}<p class="note">{between_in_words(seen)}</p>'
    command = shell(shlex.join(["san", "show", look.checkpoint, str(look.image)]))
    asked = f"<details><summary>Show all channels or other pixels</summary>{command}</details>"
    return f'<div class="panel">{heading}{told}{asked}</div>'
