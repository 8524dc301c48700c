"""The picture of `san show`: attention weights over footprints, channel by channel, with one scale."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import UserError

Floats = NDArray[np.float32]

# Inches, and points for letters: at 1000 pixels of width the smallest have 14.
WIDTH, MARGIN, GAP, HEADING, LINE = 8.0, 0.22, 0.24, 0.36, 0.17
SMALL, NORMAL, LARGE = 8.0, 9.0, 11.0
DPI = 150
INK, GREY, BETWEEN_TILES = "#222222", "#666666", "#BBBBBB"
PIXEL, FOOTPRINT, DASHES = "#E69F00", "#FFFFFF", (0, (2, 2))
MOST_CHANNELS = 64
"""That are drawn; the numbers are of all."""
# Colour maps of even steps that are told apart with any colour vision; signed weights are white at zero.
WEIGHTS, SIGNED, SPREAD = "viridis", "RdBu_r", "cividis"


@dataclass(frozen=True, slots=True)
class Attention:
    """How an attention layer weighs the footprints of a square grid of pixels, or of one."""

    model: str
    picture: str
    answer: str
    """What the network makes of the picture."""
    layer: str
    kind: str
    """pairwise, patchwise or scalar."""
    footprint: int
    """Side, in pixels of the layer's map."""
    image_HW3: Floats
    """As the network sees it, 0 to 1."""
    reduction: int
    """Side of a pixel of the layer's map, in pixels of the image."""
    pixels: tuple[tuple[int, int], ...]
    """(row, column) on the layer's map, a square grid row by row."""
    weight_GKn: Floats
    """Weights of the pixels by channel (head) and position of the footprint."""
    between: float
    """Percent of these weights' variation that lies between channels."""
    between_everywhere: float
    """The same over all pixels of the map."""

    @property
    def map(self) -> tuple[int, int]:
        """Height and width of the layer's map."""
        height, width, _ = self.image_HW3.shape
        return height // self.reduction, width // self.reduction

    @property
    def is_signed(self) -> bool:
        """Without softmax."""
        return self.kind == "patchwise"

    @property
    def channel(self) -> str:
        """What a map of weights belongs to."""
        return "head" if self.kind == "scalar" else "channel"

    @property
    def channels(self) -> str:
        """How many there are, in words."""
        count, what = len(self.weight_GKn), "head" if self.kind == "scalar" else "weight channel"
        return f"{count} {what}{'s' * (count > 1)}"


def in_words(attention: Attention) -> str:
    """What the picture shows, for those who do not see it."""
    G, K, n = attention.weight_GKn.shape
    k, (H, W), (row, column), side = attention.footprint, attention.map, attention.pixels[0], math.isqrt(n)
    one = f"the footprint of the pixel in row {row}, column {column}"
    whose = one if n == 1 else f"the footprints of a {side} x {side} grid of pixels"
    g, j, p = np.unravel_index(np.abs(attention.weight_GKn).argmax(), (G, K, n))
    down, right = int(j) // k - k // 2, int(j) % k - k // 2
    steps = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    steps += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    most, compared = (
        ("strongest", "zero is white") if attention.is_signed else ("largest", f"uniform weights would be {1 / K:.3g}")
    )
    sentences = (
        f"{attention.model} predicts {attention.answer} for {attention.picture}.",
        f"The picture shows the weights of {attention.layer} ({attention.kind} attention, {attention.channels}) for {whose}",
        f"of its {H} x {W} feature map; each footprint has {k} x {k} pixels.",
        f"The {most} weight, {attention.weight_GKn[g, j, p]:.3g}, belongs to {attention.channel} {g} and the pixel",
        f"{' and '.join(steps) if steps else 'itself'}; {compared}.",
        between_in_words(attention),
    )
    return " ".join(sentences)


def between_in_words(attention: Attention) -> str:
    G, one = len(attention.weight_GKn), len(attention.pixels) == 1
    if G == 1:
        return f"There is only one {attention.channel}, so all value channels share one map of weights."
    whose = "this pixel's" if one else "these pixels'"
    here, everywhere, unlike = (f"{share:.0f} %" for share in (attention.between, attention.between_everywhere, 100 - 100 / G))
    return (
        f"{here} of the variance of {whose} weights is between {attention.channel}s, which one shared map of weights could "
        f"not express ({everywhere} over the whole feature map; uncorrelated {attention.channel}s would give {unlike})."
    )


def draw(attention: Attention, path: Path) -> None:
    """Writes the picture as PNG, with `in_words` as its description.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    G = len(attention.weight_GKn)
    shown = min(G, MOST_CHANNELS)
    columns = 4 if shown <= 8 else 6 if shown <= 18 else 8
    top_side, side = _side(4), _side(columns)
    rows = -(-shown // columns)
    words = textwrap.wrap(between_in_words(attention), 112)
    top = MARGIN + 0.62
    channels = top + HEADING + top_side + 0.66
    bar = channels + rows * (side + 0.28) - 0.08
    height = bar + 0.48 + LINE * len(words) + MARGIN
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    page = _Page(figure, height)

    page.text(MARGIN, MARGIN, _title(attention), LARGE)
    page.text(MARGIN, MARGIN + 0.24, _subtitle(attention), NORMAL, GREY)
    left = [MARGIN + place * (top_side + GAP) for place in range(4)]
    _draw_image(page.axes(left[0], top + HEADING, top_side, "the image as the\nnetwork sees it"), attention)
    patches = page.axes(left[1], top + HEADING, top_side, f"pixels in\nthe footprint{'s' * (len(attention.pixels) > 1)}")
    _show(patches, attention, np.stack([_picture(*seen) for seen in zip(*footprints(attention), strict=True)]), {})

    weight_GKn, scale = attention.weight_GKn, _scale(attention)
    mean = page.axes(left[2], top + HEADING, top_side, f"mean over {attention.channel}s (what\nscalar attention could express)")
    drawn = _draw_weights(mean, attention, weight_GKn.mean(0), scale)
    spread_Kn = weight_GKn.std(0)
    spread = page.axes(left[3], top + HEADING, top_side, f"standard deviation\nover {attention.channel}s")
    spreads = _draw_weights(spread, attention, spread_Kn, {"cmap": SPREAD, "vmin": 0, "vmax": spread_Kn.max() or 1})
    page.bar(spreads, left[3], top + HEADING + top_side + 0.06, top_side, {0: "0", spread_Kn.max(): f"{spread_Kn.max():.2g}"})

    for number in range(shown):
        x = MARGIN + number % columns * (side + GAP)
        y = channels + number // columns * (side + 0.28)
        axes = page.axes(x, y, side, f"{attention.channel} {number}")
        _draw_weights(axes, attention, weight_GKn[number], scale)
    page.bar(drawn, MARGIN, bar, 2 * top_side + GAP, _ticks(attention, scale["norm"].vmax))
    page.text(MARGIN + 2 * (top_side + GAP), bar - 0.03, _legend(attention, shown), SMALL, GREY)
    page.text(MARGIN, bar + 0.42, "\n".join(words), NORMAL)
    metadata = {"Title": _title(attention), "Description": in_words(attention)}
    try:
        figure.savefig(path, format="png", dpi=DPI, metadata=metadata)
    except OSError as error:
        raise UserError(f"{path}: cannot write this file ({error.strerror}); choose another file with --out") from None


def _side(columns: int) -> float:
    return (WIDTH - 2 * MARGIN - (columns - 1) * GAP) / columns


def _title(attention: Attention) -> str:
    n, k = len(attention.pixels), attention.footprint
    whose = "the footprint of one pixel" if n == 1 else f"the footprints of {n} pixels"
    return f"{attention.model}: {attention.kind} attention over {whose}, {k} × {k}"  # noqa: RUF001


def _subtitle(attention: Attention) -> str:
    H, W = attention.map
    where = f"{attention.layer}, map of {H} × {W}, {attention.channels}"  # noqa: RUF001
    return f"{attention.picture}, predicted {attention.answer}  |  {where}"


def _legend(attention: Attention, shown: int) -> str:
    scale = "one scale" if attention.is_signed else "one square-root scale"
    lines = [f"weights on {scale}; orange: the pixel itself"]
    is_mirrored = bool(footprints(attention)[1].any())
    if len(attention.pixels) > 1:
        lines.append(f"white: the footprint of the first pixel{'; pale: reflected' * is_mirrored}")
    elif is_mirrored:
        lines.append("dashed: border of the image; pixels beyond it are reflected")
    if shown < len(attention.weight_GKn):
        lines.append(f"{attention.channel}s 0 to {shown - 1} of {len(attention.weight_GKn)}")
    return "\n".join(lines)


def _scale(attention: Attention) -> dict[str, Any]:
    """Signed weights are linear around zero. Of others most are small and few are large: their colours follow the root."""
    from matplotlib.colors import Normalize, PowerNorm

    limit = float(np.abs(attention.weight_GKn).max()) or 1.0
    if attention.is_signed:
        return {"cmap": SIGNED, "norm": Normalize(-limit, limit)}
    return {"cmap": WEIGHTS, "norm": PowerNorm(0.5, 0.0, limit)}


def _ticks(attention: Attention, limit: float) -> dict[float, str]:
    if attention.is_signed:
        return {-limit: f"\N{MINUS SIGN}{limit:.2g}", 0: "0", limit: f"{limit:.2g}"}
    K = attention.weight_GKn.shape[1]
    even = {1 / K: f"1/{K} (uniform)"} if limit > 4 / K else {}
    return {0: "0", **even, limit: f"{limit:.2g}"}


class _Page:
    """Squares and words at places in inches from the top left corner."""

    def __init__(self, figure: Any, height: float) -> None:
        self.figure, self.height = figure, height

    def axes(self, left: float, top: float, side: float, heading: str) -> Any:
        axes = self._axes(left, top, side, side)
        for place, line in enumerate(reversed(heading.splitlines())):
            y = 1 - (top - 0.07 - place * LINE) / self.height
            self.figure.text((left + side / 2) / WIDTH, y, line, fontsize=SMALL, color=INK, ha="center")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        return axes

    def bar(self, drawn: Any, left: float, top: float, width: float, ticks: dict[float, str]) -> None:
        bar = self.figure.colorbar(drawn, cax=self._axes(left, top, width, 0.1), orientation="horizontal")
        bar.set_ticks(list(ticks), labels=list(ticks.values()), fontsize=SMALL, color=INK)
        bar.ax.tick_params(length=3, pad=2)
        bar.outline.set_visible(False)
        labels = bar.ax.get_xticklabels()
        labels[0].set_horizontalalignment("left")
        labels[-1].set_horizontalalignment("right")

    def text(self, left: float, top: float, words: str, size: float, color: str = INK) -> None:
        x, y = left / WIDTH, 1 - top / self.height
        self.figure.text(x, y, words, fontsize=size, color=color, va="top", linespacing=1.35)

    def _axes(self, left: float, top: float, width: float, height: float) -> Any:
        return self.figure.add_axes((left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height))


def reach_of(attention: Attention) -> int:
    """How many pixels of the map the footprint of the first pixel reaches over the border, at most."""
    (H, W), half, (row, column) = attention.map, attention.footprint // 2, attention.pixels[0]
    return max(half - row, half - column, row + half - H + 1, column + half - W + 1, 0)


def _mirrored(attention: Attention, reach: int) -> tuple[Floats, NDArray[np.bool_]]:
    """The image in pixels of the map, [h, w, r, r, 3], with so many around it as the layer sees them; and where those are."""
    (H, W), r = attention.map, attention.reduction
    blocks = attention.image_HW3[: H * r, : W * r].reshape(H, r, W, r, 3).transpose(0, 2, 1, 3, 4)
    around = ((reach, reach), (reach, reach))
    outside = np.pad(np.zeros((H, W), bool), around, constant_values=True)
    return np.pad(blocks, (*around, (0, 0), (0, 0), (0, 0)), mode="reflect"), outside


def surroundings(attention: Attention) -> Floats:
    """The image with as much of the mirrored border, pale, as `reach_of` says."""
    return _picture(*_mirrored(attention, reach_of(attention)))


def footprints(attention: Attention) -> tuple[Floats, NDArray[np.bool_]]:
    """What lies in the footprint of each pixel, [n, k, k, r, r, 3], r = `reduction`; and what of it is mirrored, [n, k, k]."""
    k = attention.footprint
    blocks, outside = _mirrored(attention, k // 2)
    squares = [(slice(row, row + k), slice(column, column + k)) for row, column in attention.pixels]
    return np.stack([blocks[square] for square in squares]), np.stack([outside[square] for square in squares])


def _picture(blocks: Floats, outside: NDArray[np.bool_]) -> Floats:
    """Blocks [h, w, r, r, 3] side by side, pale where they are mirrored."""
    pale = np.where(outside[:, :, None, None, None], 0.6 + 0.4 * blocks, blocks)
    h, w, r, _, _ = blocks.shape
    return pale.transpose(0, 2, 1, 3, 4).reshape(h * r, w * r, 3)


def _draw_image(axes: Any, attention: Attention) -> None:
    """The image with all pixels and the footprint of the first, and as much of the mirrored border as that needs."""
    (H, W), k, half, reach = attention.map, attention.footprint, attention.footprint // 2, reach_of(attention)
    row, column = attention.pixels[0]
    axes.imshow(surroundings(attention), extent=(-reach, W + reach, H + reach, -reach), interpolation="nearest")
    if reach:
        _outline(axes, 0, 0, W, H, FOOTPRINT, 0.9, linestyle=DASHES)
    _outline(axes, column - half, row - half, k, k, FOOTPRINT, 1.2)
    for row, column in attention.pixels:
        _outline(axes, column, row, 1, 1, PIXEL, 1.2)


def _outline(axes: Any, left: float, top: float, width: float, height: float, color: str, line: float, **style: Any) -> None:
    """A rectangle with a dark edge, so that it is seen on any ground."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    dark = [withStroke(linewidth=2 * line, foreground=INK)]
    style |= {"edgecolor": color, "linewidth": line, "path_effects": dark, "clip_on": False}
    axes.add_patch(Rectangle((left, top), width, height, fill=False, **style))


def _draw_weights(axes: Any, attention: Attention, weight_Kn: Floats, scale: dict[str, Any]) -> Any:
    k = attention.footprint
    return _show(axes, attention, weight_Kn.T.reshape(-1, k, k), scale)


def _show(axes: Any, attention: Attention, tiles: Floats, scale: dict[str, Any]) -> Any:
    """A tile [n, ...] for each pixel in a square, a pixel of the map apart, each with its pixel in the middle marked."""
    k, side = attention.footprint, math.isqrt(len(tiles))
    step = k + 1
    whole = side * step - 1
    axes.set_facecolor(BETWEEN_TILES if side > 1 else "none")
    for number, (tile, (row, column)) in enumerate(zip(tiles, attention.pixels, strict=True)):
        left, top = number % side * step, number // side * step
        drawn = axes.imshow(tile, extent=(left, left + k, top + k, top), interpolation="nearest", **scale)
        _outline(axes, left + k // 2, top + k // 2, 1, 1, PIXEL, 1.2 if side == 1 else 0.7)
        if side == 1:
            _draw_border(axes, attention, row - k // 2, column - k // 2)
    axes.set(xlim=(0, whole), ylim=(whole, 0))
    return drawn


def _draw_border(axes: Any, attention: Attention, top: int, left: int) -> None:
    """Where the image ends inside a footprint with this corner."""
    k, (H, W) = attention.footprint, attention.map
    first, last = (max(-top, 0), max(-left, 0)), (min(H - top, k), min(W - left, k))
    if first != (0, 0) or last != (k, k):
        _outline(axes, first[1], first[0], last[1] - first[1], last[0] - first[0], FOOTPRINT, 0.9, linestyle=DASHES)
