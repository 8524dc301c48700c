"""Attention weights as pictures: PNG files for `san attention`, and the interactive page of `san attention-page`."""

from __future__ import annotations

import base64
import math
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import UserError
from experiments.evaluation.attention import Attention, Floats, attention_in_words, variance_in_words
from experiments.report.page import templates
from experiments.report.plots import GROUND, INK, QUIET

# In points, as the sizes of letters.
WIDTH, GAP, HEADING, BAR = 576, 12, 20, 42
LETTERS = 8
PIXEL = "#e69f00"
MOST_CHANNELS = 64
"""A picture shows at most this many channels; the numbers cover all."""
# Perceptually uniform color maps that color-blind readers can tell apart; signed weights are white at zero.
WEIGHTS, SIGNED, SPREAD = "viridis", "RdBu_r", "cividis"


def save(attention: Attention, path: Path) -> None:
    """Writes the picture as PNG, with `attention_in_words` as its description.

    Raises:
        UserError: the file cannot be written.
    """
    shown = min(len(attention.weight_GKn), MOST_CHANNELS)
    columns = 4 if shown <= 8 else 6 if shown <= 18 else 8
    H, W = attention.map
    n, k = len(attention.pixels), attention.footprint
    whose = "the footprint of one pixel" if n == 1 else f"the footprints of {n} pixels"
    title = f"{attention.model}: {attention.kind} attention over {whose}, {k} × {k}"  # noqa: RUF001
    where = f"{attention.layer}, map of {H} × {W}, {attention.channels}"  # noqa: RUF001
    name = attention.picture if len(attention.picture) <= 70 else f"\N{HORIZONTAL ELLIPSIS}{attention.picture[-69:]}"
    below = textwrap.fill(f"{_legend(attention, shown)} {variance_in_words(attention)}", 125)
    figure = _draw(attention, shown, columns, above=58, below=12 * (1 + below.count("\n")) + 12)
    height = figure.get_figheight() * 72
    lines = (title, 11, INK), (f"{name}, predicted {attention.prediction}", 9, QUIET), (where, 9, QUIET)
    for y, (text, size, color) in zip((height - 12, height - 30, height - 43), lines, strict=True):
        figure.text(GAP / WIDTH, y / height, text, fontsize=size, color=color, va="top", parse_math=False)
    figure.text(GAP / WIDTH, 10 / height, below, fontsize=LETTERS, color=INK, va="bottom", linespacing=1.3)
    try:
        figure.savefig(path, format="png", dpi=150, metadata={"Title": title, "Description": attention_in_words(attention)})
    except OSError as error:
        raise UserError(f"{path}: cannot write this file ({error.strerror}); choose another file with --out") from None


def color_tables() -> dict[str, str]:
    """256 colors as hexadecimal digits for weights, signed weights and the spread."""
    from matplotlib import colormaps

    names = {"weights": WEIGHTS, "signed": SIGNED, "spread": SPREAD}
    return {use: colormaps[name](np.arange(256), bytes=True)[:, :3].tobytes().hex() for use, name in names.items()}


def _draw(attention: Attention, shown: int, columns: int, above: float, below: float) -> Any:
    """Draws the image, the pixels in the footprints, mean and spread over channels, the weights by channel and their scale."""
    from matplotlib import colors
    from matplotlib.figure import Figure

    rows, side = -(-(4 + shown) // columns), (WIDTH - GAP) / columns - GAP
    height = above + rows * (side + HEADING) + BAR + below
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    edges = {
        "left": GAP / WIDTH,
        "right": 1 - GAP / WIDTH,
        "bottom": (below + BAR) / height,
        "top": 1 - (above + HEADING) / height,
    }
    spaces = {"wspace": GAP / side, "hspace": HEADING / side}
    all_axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=edges | spaces).ravel()
    channels = [f"{attention.channel} {number}" for number in range(shown)]
    headings = ["image", f"footprint{'s' * (len(attention.pixels) > 1)}", "mean", "spread", *channels]
    for axes in all_axes:
        axes.set(xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
    for axes, heading in zip(all_axes, headings, strict=False):
        axes.set_title(heading, pad=5, fontsize=LETTERS, color=QUIET)

    limit = attention.limit
    # Most weights after a softmax are small, so their colors follow the square root.
    norm = colors.Normalize(-limit, limit) if attention.is_signed else colors.PowerNorm(0.5, 0.0, limit)
    scale = {"cmap": SIGNED if attention.is_signed else WEIGHTS, "norm": norm}
    weight_GKn, spread_Kn = attention.weight_GKn, attention.weight_GKn.std(0)
    _draw_image(all_axes[0], attention)
    seen = np.stack([_picture(*footprint) for footprint in zip(*attention.footprints(), strict=True)])
    _draw_tiles(all_axes[1], attention, seen, {})
    drawn = _draw_weights(all_axes[2], attention, weight_GKn.mean(0), scale)
    _draw_weights(all_axes[3], attention, spread_Kn, {"cmap": SPREAD, "vmin": 0, "vmax": spread_Kn.max() or 1})
    for axes, weight_Kn in zip(all_axes[4:], weight_GKn[:shown], strict=False):
        _draw_weights(axes, attention, weight_Kn, scale)
    bar = figure.add_axes((GAP / WIDTH, (below + BAR - 22) / height, 0.45, 8 / height))
    figure.colorbar(drawn, cax=bar, orientation="horizontal").outline.set_visible(False)
    _mark_scale(bar, attention)
    words = f"spread up to {spread_Kn.max():.2g}"
    figure.text(1 - GAP / WIDTH, (below + BAR - 20) / height, words, ha="right", fontsize=LETTERS, color=QUIET)
    return figure


def _mark_scale(bar: Any, attention: Attention) -> None:
    limit, K = attention.limit, attention.weight_GKn.shape[1]
    # Uniform weights are marked where the labels of both ends leave room.
    uniform = {1 / K: f"1/{K}"} if 4 / K < limit < 36 / K and not attention.is_signed else {}
    ticks = {-limit: f"\N{MINUS SIGN}{limit:.2g}"} if attention.is_signed else {}
    ticks |= {0.0: "0", **uniform, limit: f"{limit:.2g}"}
    bar.set_xticks(list(ticks), labels=list(ticks.values()), fontsize=LETTERS, color=QUIET)
    bar.set_xticks([], minor=True)
    bar.tick_params(length=0)
    first, *_, last = bar.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")


def _legend(attention: Attention, shown: int) -> str:
    scale = "one scale" if attention.is_signed else "one square-root scale"
    mean = "over all heads" if attention.kind == "scalar" else "what scalar attention could express"
    parts = [f"Weights on {scale}", "orange: the pixel itself", f"mean: {mean}"]
    is_mirrored = bool(attention.footprints()[1].any())
    if len(attention.pixels) > 1:
        parts.append(f"white: the footprint of the first pixel{', pale: reflected' * is_mirrored}")
    elif is_mirrored:
        parts.append("dashed: border of the image; pixels beyond it are reflected")
    if shown < len(attention.weight_GKn):
        parts.append(f"{attention.channel}s 0 to {shown - 1} of {len(attention.weight_GKn)}")
    return f"{'; '.join(parts)}."


def _picture(blocks: Floats, outside: NDArray[np.bool_]) -> Floats:
    """Blocks [h, w, r, r, 3] as one image; reflected blocks are pale."""
    pale = np.where(outside[:, :, None, None, None], 0.6 + 0.4 * blocks, blocks)
    h, w, r, _, _ = blocks.shape
    return pale.transpose(0, 2, 1, 3, 4).reshape(h * r, w * r, 3)


def _draw_image(axes: Any, attention: Attention) -> None:
    """Draws the image with all pixels, the footprint of the first one, and the reflected border that it reaches."""
    (H, W), k, reach, (row, column) = attention.map, attention.footprint, attention.reach, attention.pixels[0]
    image = _picture(*attention.mirrored(reach))
    axes.imshow(image, extent=(-reach, W + reach, H + reach, -reach), interpolation="none")
    if reach:
        _outline(axes, 0, 0, W, H, GROUND, dashed=True)
    _outline(axes, column - k // 2, row - k // 2, k, k, GROUND)
    for row, column in attention.pixels:
        _outline(axes, column, row, 1, 1, PIXEL)


def _outline(axes: Any, left: float, top: float, width: float, height: float, color: str, dashed: bool = False) -> None:
    """Draws a rectangle with an edge of another color, which is visible on any background."""
    from matplotlib.patches import Rectangle

    for edge, line, style in ((INK, 2.4, "-"), (color, 1.2, (0, (1.7, 1.7)) if dashed else "-")):
        axes.add_patch(Rectangle((left, top), width, height, fill=False, ec=edge, lw=line, ls=style, clip_on=False))


def _draw_weights(axes: Any, attention: Attention, weight_Kn: Floats, scale: dict[str, Any]) -> Any:
    k = attention.footprint
    return _draw_tiles(axes, attention, weight_Kn.T.reshape(-1, k, k), scale)


def _draw_tiles(axes: Any, attention: Attention, tiles: Floats, scale: dict[str, Any]) -> Any:
    """Draws a tile [n, ...] for each pixel in a square grid, one map pixel apart, and marks the pixel in its middle."""
    k, side = attention.footprint, math.isqrt(len(tiles))
    step = k + 1
    for number, tile in enumerate(tiles):
        top, left = step * (number // side), step * (number % side)
        drawn = axes.imshow(tile, extent=(left, left + k, top + k, top), interpolation="none", **scale)
        _outline(axes, left + k // 2, top + k // 2, 1, 1, PIXEL)
    part = attention.image_part()
    if side == 1 and part != (0, 0, k, k):
        _outline(axes, *part, GROUND, dashed=True)
    axes.set(xlim=(0, side * step - 1), ylim=(side * step - 1, 0))
    return drawn


def save_page(networks: Sequence[Mapping[str, Attention]], layer: str, path: Path) -> None:
    """Writes the page, which shows the networks next to each other and starts with one layer.

    Args:
        networks: attention of all pixels, by name of the layer.

    Raises:
        UserError: the file cannot be written.
    """
    first = networks[0][layer]
    data = {
        "size": len(first.image_HW3),
        "image": base64.b64encode((255 * first.image_HW3).round().astype(np.uint8).tobytes()).decode(),
        "colors": color_tables(),
        "networks": [_network(list(layers.values())) for layers in networks],
    }
    title = " and ".join(layers[next(iter(layers))].model for layers in networks)
    page = templates().get_template("attention.html")
    try:
        text = page.render(title=title, picture=first.picture, layer=layer, data=data)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write this file ({error.strerror}); choose another file with --out") from None


def _network(layers: Sequence[Attention]) -> dict[str, Any]:
    return {"model": layers[0].model, "prediction": layers[0].prediction, "layers": [_layer(layer) for layer in layers]}


def _layer(attention: Attention) -> dict[str, Any]:
    """Weights are stored as [pixel, channel, position], one byte each."""
    codes = _codes(attention).transpose(2, 0, 1)
    return {
        "name": attention.layer,
        "kind": attention.kind,
        "channel": attention.channel,
        "channels": len(attention.weight_GKn),
        "footprint": attention.footprint,
        "reduction": attention.reduction,
        "side": attention.map[0],
        "limit": attention.limit,
        "signed": attention.is_signed,
        "weights": base64.b64encode(zlib.compress(np.ascontiguousarray(codes).tobytes(), 6)).decode(),
    }


def _codes(attention: Attention) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Signed weights as 0 to 254 in steps of equal size; others as 0 to 255 on a square-root scale, like their colors."""
    share: Floats = attention.weight_GKn / attention.limit
    scaled = 127 + 127 * share if attention.is_signed else 255 * np.sqrt(share)
    return scaled.round().astype(np.uint8)
