"""Attention weights as SVG inside a page, whose colours they take, so that one picture serves light and dark.

A weight is a square, the less transparent the larger it is. Negative ones have another colour, and a hole.
"""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from html import escape

import numpy as np

from experiments.report.attention import Attention, Floats, in_words, reach_of, surroundings

LEVELS = 16
"""Of transparency."""
MOST_CHANNELS = 8
"""That are drawn: all of a SAN's first wide stage."""
LOSSLESS = 96
"""Largest side, in pixels, of an image that is kept as it is."""
POSITIVE, NEGATIVE, SPREAD = "c0", "c1", "c2"
"""The page's classes for their colours."""


def tiles(attention: Attention, name: str) -> str:
    """The image, the footprint of the first pixel, what it weighs on average and by channel, and the scale. `name` is unique
    on the page; `in_words` is the text alternative."""
    weight_GK = attention.weight_GKn[:, :, 0]
    limit = float(np.abs(weight_GK).max()) or 1.0
    spread_K = weight_GK.std(0)
    shown = weight_GK[:MOST_CHANNELS]
    drawn = [
        _tile("image", _image(attention, name), "seen"),
        _tile("footprint", _footprint(attention, name), "seen"),
        _tile("mean", _weights(attention, weight_GK.mean(0), limit)),
        _tile(f"spread, up to {spread_K.max():.2g}", _spread(attention, spread_K)),
        *(_tile(f"{attention.channel} {number}", _weights(attention, row_K, limit)) for number, row_K in enumerate(shown)),
    ]
    alternative = escape(in_words(attention))
    return f'<div class="tiles" role="img" aria-label="{alternative}">{"".join(drawn)}</div>{_scale(attention, limit)}'


def _tile(caption: str, picture: str, kind: str = "") -> str:
    return f'<div class="tile {kind}">{picture}<span>{escape(caption)}</span></div>'


def _svg(left: float, top: float, width: float, height: float, content: str) -> str:
    return f'<svg viewBox="{left:g} {top:g} {width:g} {height:g}">{content}</svg>'


def _frame(left: float, top: float, width: float, height: float, kind: str) -> str:
    """An outline that is seen on any ground."""
    where = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="around" {where}/><rect class="{kind}" {where}/>'


def _image(attention: Attention, name: str) -> str:
    """What the network sees with the pixel and its footprint, and as much of the mirrored border as that needs."""
    (H, W), k, reach, (row, column) = attention.map, attention.footprint, reach_of(attention), attention.pixels[0]
    place = f'x="{-reach}" y="{-reach}" width="{W + 2 * reach}" height="{H + 2 * reach}"'
    picture = f'<image id="{name}" {place} href="{_as_uri(surroundings(attention))}"/>'
    edge = _frame(0, 0, W, H, "edge") if reach else ""
    whole = _frame(column - k // 2, row - k // 2, k, k, "reach")
    return _svg(-reach, -reach, W + 2 * reach, H + 2 * reach, f"{picture}{edge}{whole}{_frame(column, row, 1, 1, 'self')}")


def _footprint(attention: Attention, name: str) -> str:
    k, (row, column) = attention.footprint, attention.pixels[0]
    corner = column - k // 2, row - k // 2
    return _svg(*corner, k, k, f'<use href="#{name}"/>{_frame(column, row, 1, 1, "self")}')


def _weights(attention: Attention, weight_K: Floats, limit: float) -> str:
    """On the scale of `_scale`; a frame is around the pixel itself, dashes are where the image ends."""
    part_K = weight_K / limit
    level_K = LEVELS * (part_K if attention.is_signed else np.sqrt(part_K))
    k, (H, W), (row, column) = attention.footprint, attention.map, attention.pixels[0]
    left, top = k // 2 - column, k // 2 - row  # of the image, in the footprint
    first, last = (max(left, 0), max(top, 0)), (min(left + W, k), min(top + H, k))
    ends = (first, last) != ((0, 0), (k, k))
    edge = _frame(*first, last[0] - first[0], last[1] - first[1], "edge") if ends else ""
    return _svg(0, 0, k, k, f"{_squares(level_K.reshape(k, k), POSITIVE)}{edge}{_frame(k // 2, k // 2, 1, 1, 'self')}")


def _spread(attention: Attention, spread_K: Floats) -> str:
    k = attention.footprint
    level_K = LEVELS * spread_K / (spread_K.max() or 1.0)
    return _svg(0, 0, k, k, f"{_squares(level_K.reshape(k, k), SPREAD)}{_frame(k // 2, k // 2, 1, 1, 'self')}")


def _squares(level_hw: Floats, colour: str) -> str:
    """A path for all squares of one level, from -LEVELS to LEVELS."""
    paths: dict[int, str] = defaultdict(str)
    for (y, x), level in np.ndenumerate(np.rint(level_hw).astype(int)):
        hole = "m.35.35v.3h.3v-.3z" if level < 0 else ""
        paths[int(level)] += f"M{x} {y}h1v1h-1z{hole}"
    return "".join(
        f'<path class="{colour if level > 0 else NEGATIVE}" fill-opacity="{abs(level) / LEVELS:.3g}" d="{path}"/>'
        for level, path in sorted(paths.items())
        if level
    )


def _scale(attention: Attention, limit: float) -> str:
    K = attention.weight_GKn.shape[1]
    levels = np.arange(-LEVELS if attention.is_signed else 0, LEVELS + 1, dtype=np.float32)
    least = f"\N{MINUS SIGN}{limit:.2g}" if attention.is_signed else "0"
    told = "one scale for all maps" if attention.is_signed else f"square-root scale; uniform weights would be 1/{K}"
    bar = f'<svg viewBox="0 0 {len(levels)} 1" preserveAspectRatio="none">{_squares(levels[None], POSITIVE)}</svg>'
    return f'<p class="scale" aria-hidden="true"><span>{least} {bar} {limit:.2g}</span> {told}</p>'


def _as_uri(picture_HW3: Floats) -> str:
    """PNG, or JPEG where that would be large."""
    from PIL import Image

    form = "png" if max(picture_HW3.shape[:2]) <= LOSSLESS else "jpeg"
    content = io.BytesIO()
    Image.fromarray(np.rint(255 * picture_HW3).astype(np.uint8)).save(content, form, quality=88, optimize=True)
    return f"data:image/{form};base64,{base64.b64encode(content.getvalue()).decode()}"
