"""Draws the figures of docs/explanation/operators.md: `python docs/figures/draw.py [NAME ...]` writes an SVG per figure.

Every bar and printed number is computed from one small example, so figures agree with the formulas. The same version of
matplotlib writes the same bytes each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from page import FAINT, GREY, HUGE, INK, LARGE, NORMAL, SMALL, WIDTH, Numbers, Page, number, shade

# One colour per quantity in every figure; as GROUPS they tell weight channels apart.
PHI, PSI, DELTA, BETA, ALPHA, OUT = "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#E69F00", "#56B4E9"
GROUPS = (PHI, PSI, BETA, DELTA)

# The example: a footprint of 3 x 3 = K positions, row by row, pixel i in the middle, R channels.
K, CENTER, CHOSEN, R = 9, 4, 5, 4
PHIS: Numbers = np.round(np.random.default_rng(6).uniform(-2, 2, (K, R)), 1)
PSIS: Numbers = np.round(np.random.default_rng(9).uniform(-2, 2, (K, R)), 1)


def softmax(scores: Numbers) -> Numbers:
    exponentials: Numbers = np.exp(scores - scores.max())
    return np.divide(exponentials, exponentials.sum())


def numbered_footprint(page: Page, x: float, y: float, side: float, chosen: int | None = CHOSEN) -> None:
    """The example's footprint: positions j from 1 to 9, pixel i in the middle, the chosen j in psi's colour."""
    for j in range(K):
        fill = PHI if j == CENTER else PSI if j == chosen else "white"
        left, top = x + j % 3 * side, y + j // 3 * side
        page.rectangle(left, top, side, side, fill, GREY, 0.8)
        ink = INK if fill == "white" else "white"
        page.text(left + side / 2, top + side / 2, str(j + 1), SMALL, ink, halo=fill)


# --- the footprint


def footprint() -> Page:
    page = Page(392)
    side, left, top = 22, 14, 56
    page.text(left + 7 * side, 28, r"inside the map: $K = k^2 = 49$ positions $j$")
    page.grid(left, top, [["white"] * 14] * 14, side)
    page.grid(left + 3 * side, top + 3 * side, [[shade(0.45, 1, PSI)] * 7] * 7, side)
    page.rectangle(left + 6 * side, top + 6 * side, side, side, PHI)
    page.text(left + 6.5 * side, top + 6.5 * side, r"$i$", LARGE, "white")
    page.rectangle(left + 3 * side, top + 3 * side, 7 * side, 7 * side, edge=PSI, line=2.2)
    page.text(left + 7 * side, 378, r"orange: the footprint $\mathcal{R}(i)$, $7 \times 7$", SMALL, GREY)

    side, left, top = 34, 436, 134  # of the map's corner
    page.text(521, 28, "at the border: mirrored pixels (pale)\nreplace the missing ones")
    for row in range(-2, 6):
        for column in range(-2, 6):
            outside, covered = row < 0 or column < 0, row <= 4 and column <= 4
            if outside and not covered:
                continue
            is_center = (row, column) == (1, 1)
            fill = PHI if is_center else "white" if not covered else shade(0.15 if outside else 0.45, 1, PSI)
            x, y = left + column * side, top + row * side
            page.rectangle(x, y, side, side, fill, GREY, 0.7)
            words = r"$i$" if is_center else f"{abs(row)},{abs(column)}"  # reflection: row -2 is row 2
            page.text(x + side / 2, y + side / 2, words, LARGE if is_center else SMALL, "white" if is_center else INK)
    page.line((left, top + 6 * side), (left, top), (left + 6 * side, top), width=2.6)
    page.rectangle(left - 2 * side, top - 2 * side, 7 * side, 7 * side, edge=PSI, line=2.2)
    page.text(521, 362, "numbers: row, column of the source pixel;\nthick black: the edge of the map", SMALL, GREY)
    return page


# --- pairwise relations


def pairwise_relation(
    title: str,
    sign: str,
    count: str,
    relate: Callable[[Numbers, Numbers], Numbers],
    digits: int = 1,
    colors: Sequence[str] | str = DELTA,
) -> Page:
    """Above: phi_i and psi_j to delta for one j. Below: the same for all positions of the footprint."""
    page = Page(380)
    deltas = np.stack([relate(PHIS[CENTER], psi) for psi in PSIS])
    d = deltas.shape[1]
    between, pitch, zero = 46.0, 34.0, 104.0
    page.text(350, 22, title, LARGE)
    x = (WIDTH - pitch * (2 * R + d) - 2 * between) / 2
    for values, color, name, channels, after in (
        (PHIS[CENTER], PHI, r"$\varphi(x_i)$", "R channels", sign),
        (PSIS[CHOSEN], PSI, r"$\psi(x_j)$", "R channels", "="),
        (deltas[CHOSEN], colors, r"$\delta(x_i, x_j)$", count, ""),
    ):
        middle = x + pitch * len(values) / 2
        page.text(middle, 172, name, LARGE, str(color) if after else INK)
        page.bars(x, zero, values, color, pitch, 15, 1 if after else digits)
        page.text(middle, 194, channels, SMALL)
        x += pitch * len(values) + between
        page.text(x - between / 2, zero, after, HUGE)
    page.line((14, 211), (686, 211), color=FAINT)

    page.text(50, 234, r"$\mathcal{R}(i)$, $j$ = 1 to 9", SMALL)
    numbered_footprint(page, 14, 248, 24)
    page.text(124, 258, r"$\psi(x_j)$", color=PSI)
    page.text(124, 330, r"$\delta(x_i, x_j)$")
    left, column, mini = 154.0, 59.0, 10.0 if d <= R else 6.0
    for j in range(K):
        middle = left + j * column + column / 2
        page.text(middle, 226, f"{j + 1} = $i$" if j == CENTER else str(j + 1), SMALL, GREY)
        page.bars(middle - 5 * R, 258, PSIS[j], PSI, 10, 9)
        page.bars(middle - mini * d / 2, 330, deltas[j], colors, mini, 9)
    page.rectangle(left + CHOSEN * column + 2, 217, column - 4, 157)
    return page


def summation() -> Page:
    return pairwise_relation(r"summation: $\delta = \varphi(x_i) + \psi(x_j)$", "+", "d = R channels", np.add)


def subtraction() -> Page:
    return pairwise_relation(
        r"subtraction: $\delta = \varphi(x_i) - \psi(x_j)$", "\N{MINUS SIGN}", "d = R channels", np.subtract
    )


def concatenation() -> Page:
    title = r"concatenation: $\delta = [\varphi(x_i), \psi(x_j)]$"
    return pairwise_relation(title, ",", "d = 2R channels", lambda a, b: np.concatenate((a, b)), colors=[PHI] * R + [PSI] * R)


def hadamard() -> Page:
    title = r"Hadamard product: $\delta = \varphi(x_i) \odot \psi(x_j)$"
    return pairwise_relation(title, r"$\odot$", "d = R channels", np.multiply, 2)


def dot() -> Page:
    title = r"dot product: $\delta = \varphi(x_i)^\top \psi(x_j)$"
    return pairwise_relation(title, r"$\cdot$", "d = 1 channel", lambda a, b: np.array([a @ b]), 2)


# --- patchwise relations


def vector_row(page: Page, x: float, y: float, values: Numbers, color: str, name: str) -> None:
    """A named vector as small bars in a frame that links can end at."""
    page.rectangle(x, y - 12, 92, 24, "white", color)
    page.text(x + 22, y, name, NORMAL, color)
    page.bars(x + 46, y, values, color, 10, 5)


def star() -> Page:
    page = Page(360)
    products = PSIS @ PHIS[CENTER]
    page.text(350, 20, r"star product: $\delta = [\varphi(x_i)^\top \psi(x_j)]_{\forall j \in \mathcal{R}(i)}$", LARGE)
    numbered_footprint(page, 20, 146, 28, None)
    page.text(62, 244, r"$\mathcal{R}(i)$, $i = 5$", SMALL)
    top, pitch, middle = 68, 30, 188
    vector_row(page, 138, middle, PHIS[CENTER], PHI, r"$\varphi_i$")
    for j, product in enumerate(products):
        y = top + j * pitch
        page.line((230, middle), (330, y), color=GREY)
        vector_row(page, 330, y, PSIS[j], PSI, rf"$\psi_{j + 1}$")
        page.arrow((428, y), (456, y), color=GREY)
        page.rectangle(560, y - 9, product * 12, 18, DELTA, DELTA, 0)
        page.text(560 + product * 12 + (20 if product >= 0 else -20), y, number(product, 2), SMALL)
    page.line((560, top - 14), (560, top + 8 * pitch + 14), width=0.8)
    page.text(184, 338, r"one $\varphi$", SMALL, GREY)
    page.text(376, 338, r"every $\psi_j$", SMALL, GREY)
    page.text(560, 338, "d = K = 9 channels")
    return page


def clique() -> Page:
    page = Page(372)
    products = PHIS @ PSIS.T
    page.text(350, 20, r"clique product: $\delta = [\varphi(x_j)^\top \psi(x_k)]_{\forall j, k \in \mathcal{R}(i)}$", LARGE)
    top, pitch = 76, 30
    for j in range(K):
        for k in range(K):
            page.line((106, top + j * pitch), (226, top + k * pitch), color=FAINT, width=0.8)
    for k in range(K):
        page.line((106, top + CHOSEN * pitch), (226, top + k * pitch), color=DELTA, width=1.6)
    for j in range(K):
        vector_row(page, 14, top + j * pitch, PHIS[j], PHI, rf"$\varphi_{j + 1}$")
        vector_row(page, 226, top + j * pitch, PSIS[j], PSI, rf"$\psi_{j + 1}$")
    side, left = 35, 376
    for j in range(K):
        page.text(left - 14, top + j * pitch, rf"$\varphi_{j + 1}$", SMALL, PHI)
        page.text(left + (j + 0.5) * side, top - 24, rf"$\psi_{j + 1}$", SMALL, PSI)
        for k in range(K):
            page.rectangle(left + k * side, top + (j - 0.5) * pitch, side, pitch, shade(products[j, k], 12, DELTA), GREY, 0.7)
            page.text(left + (k + 0.5) * side, top + j * pitch, number(products[j, k], 1), SMALL)
    page.rectangle(left, top + (CHOSEN - 0.5) * pitch, 9 * side, pitch, edge=INK, line=2)
    page.text(166, 350, r"every $\varphi_j$ against every $\psi_k$", SMALL, GREY)
    page.text(left + 4.5 * side, 350, r"d = K$\cdot$K = 81 channels, rounded to one digit")
    return page


def patch_concatenation() -> Page:
    page = Page(344)
    title = r"patchwise concatenation: $\delta = [\varphi(x_i), [\psi(x_j)]_{\forall j \in \mathcal{R}(i)}]$"
    page.text(350, 20, title, LARGE)
    column, side, left, top = 67.0, 30, 305, 44
    numbered_footprint(page, left, top, side, None)
    for block in range(K + 1):
        j, x = (CENTER, 15.0) if block == 0 else (block - 1, 15 + block * column)
        color, values = (PHI, PHIS[CENTER]) if block == 0 else (PSI, PSIS[j])
        name = r"$\varphi(x_i)$" if block == 0 else rf"$\psi(x_{block})$"
        start = (left + (j % 3 + 0.5) * side, top + (j // 3 + 0.84) * side)
        page.line(start, (x + column / 2, 182), color=color, width=0.9)
        page.disc(*start, 2.5, color, "white")
        page.text(x + column / 2, 196, name, NORMAL, color)
        page.rectangle(x + 2, 210, column - 4, 80, "white", color)
        page.bars(x + column / 2 - 26, 250, values, color, 13, 17)
    page.text(left - 16, top + 22, r"$\mathcal{R}(i)$, $i = 5$", SMALL, GREY, "right")
    page.line((17, 298), (17, 304), (683, 304), (683, 298))
    page.text(350, 324, r"one vector of d = R(K + 1) = 4$\cdot$10 = 40 channels")
    return page


# --- from the relation to the weights


def mapping() -> Page:
    page = Page(478)
    C, positions = 256, 49
    relation, G = C // 16, C // 4 // 8
    page.text(200, 20, r"pairwise: $\gamma$ for each pair $(i, j)$", LARGE)
    page.text(540, 20, r"patchwise: $\gamma$ for each patch $\mathcal{R}(i)$", LARGE)
    first_pairwise, first_patchwise = ("d", relation + 2), ("d", relation * (positions + 1))
    last_pairwise, last_patchwise = ("G", G), (r"K$\cdot$G", positions * G)
    hidden: dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]] = {
        "L": ([], []),
        "LRL": ([("C/16", C // 16)], [("G", G)]),
        "LRLRL": ([("C/16", C // 16)] * 2, [("R", relation), ("G", G)]),
    }
    for row, (name, (for_pairs, for_patches)) in enumerate(hidden.items()):
        base = 138 + row * 136
        page.text(40, base - 30, name, LARGE)
        page.line((14, base + 30), (686, base + 30), color=FAINT)
        chain(page, 100, base, [first_pairwise, *for_pairs, last_pairwise])
        chain(page, 430, base, [first_patchwise, *for_patches, last_patchwise])
    page.text(
        350,
        458,
        "Arrow: BatchNorm, ReLU, Linear. Bar: channels, on a logarithmic scale.\n"
        "Drawn for C = 256, R = 16, G = 8, k = 7 with subtraction and patchwise concatenation.",
        SMALL,
        GREY,
    )
    return page


def chain(page: Page, left: float, base: float, widths: Sequence[tuple[str, int]]) -> None:
    """Bars of channel numbers from the relation (left) to the weights (right) with an arrow for each layer between them."""
    step = 220 / (len(widths) - 1)
    for n, (symbol, width) in enumerate(widths):
        x, height = left + n * step, 8 * np.log2(width)
        color = DELTA if n == 0 else ALPHA if n == len(widths) - 1 else FAINT
        page.rectangle(x - 13, base - height, 26, height, color, GREY, 0.8)
        page.text(x, base - height - 10, str(width), SMALL)
        page.text(x, base + 13, symbol)
        if n:
            page.arrow((x - step + 18, base - 12), (x - 18, base - 12))
    weights = sum(width_in * width_out for (_, width_in), (_, width_out) in pairwise(widths))
    page.text(left + 110, base - 66, f"{weights:,} weights".replace(",", " "), SMALL)


def position() -> Page:
    page = Page(360)
    side, left, top = 13, 14, 84
    pixels = {"A": (2, 3), "B": (8, 7)}  # row, column
    page.text(left + 5.5 * side, 60, "map of 11 x 11 pixels", SMALL, GREY)
    page.grid(left, top, [["white"] * 11] * 11, side)
    for name, (row, column) in pixels.items():
        page.rectangle(left + (column - 1) * side, top + (row - 1) * side, 3 * side, 3 * side, shade(0.45, 1, PSI), PSI, 1.6)
        page.rectangle(left + column * side, top + row * side, side, side, PHI, PHI)
        page.text(left + (column - 2.2) * side, top + (row + 0.5) * side, name, LARGE)
    page.text(left + 5.5 * side, top + 11 * side + 16, "across: \N{MINUS SIGN}1 to 1", SMALL, GREY)
    page.text(left + 5.5 * side, top + 11 * side + 34, "down: \N{MINUS SIGN}1 to 1", SMALL, GREY)

    coordinate = np.linspace(-1, 1, 11)
    maps = np.stack(np.broadcast_arrays(coordinate[None, :], coordinate[:, None]))  # p, here the coordinates themselves
    cell = 31
    page.text(216, 28, "none")
    page.text(370, 28, r"absolute: $p_j$")
    page.text(588, 28, r"relative: $p_i - p_j$")
    for n, x in enumerate((276, 378, 488, 590)):
        page.text(x + 1.5 * cell, 54, ("across", "down")[n % 2], SMALL, GREY)
    for (name, (row, column)), y in zip(pixels.items(), (72, 200), strict=True):
        page.text(180, y + 1.5 * cell, name, LARGE)
        page.text(222, y + 1.5 * cell, "no\nchannels", SMALL, GREY)
        patch = maps[:, row - 1 : row + 2, column - 1 : column + 2]
        for channel in range(2):
            page.heat(276 + 102 * channel, y, patch[channel], cell, DELTA, 1, 1)
            page.heat(488 + 102 * channel, y, maps[channel, row, column] - patch[channel] + 0.0, cell, DELTA, 0.4, 1)
    page.text(370, 316, "differs from pixel to pixel", SMALL)
    page.text(588, 316, "the same for A and B", SMALL)
    page.text(350, 344, r"Drawn with $p$ = the coordinates; in a network, $p$ is a learned linear layer.", SMALL, GREY)
    return page


def aggregation() -> Page:
    page = Page(424)
    G, M, side = 4, 8, 20
    generator = np.random.default_rng(4)
    logits, values = generator.normal(size=(G, K)), np.round(generator.uniform(-1, 1, (M, K)), 1)
    weights = np.stack([softmax(row) for row in logits])
    page.text(350, 18, r"weights $\alpha_g$: G = M / S = 4 channels, here with softmax, so each sums to 1")
    for g in range(G):
        x, color = 108 + g * 161.3, GROUPS[g]
        page.text(x, 40, f"g = {g}", SMALL)
        page.heat(x - 1.5 * side, 50, weights[g].reshape(3, 3), side, color, weights.max())
        page.rectangle(x - 1.5 * side, 50, 3 * side, 3 * side, edge=color, line=2.2)
        for c in range(g, M, G):
            page.line((x, 112), (56 + c * 84, 178), color=color, width=1.8, style="-" if c < G else "--")
    for c in range(M):
        x, color = 56 + c * 84, GROUPS[c % G]
        page.text(x, 190, f"c = {c}", SMALL)
        page.heat(x - 1.5 * side, 200, values[c].reshape(3, 3), side, BETA, 1)
        page.rectangle(x - 1.5 * side, 200, 3 * side, 3 * side, edge=color, line=2.2)
        page.bars(x - 20, 338, np.array([weights[c % G] @ values[c]]), color, 40, 120, 2)
    page.text(350, 278, r"values $\beta_c$ in $\mathcal{R}(i)$: M = 8 channels; S = 2 of them share a weight, $g = c$ mod $G$")
    page.text(350, 402, r"output $y_c = \sum_j \, \alpha_{g,j} \, \beta_{c,j}$: M = 8 channels")
    return page


# --- kinds, transformations, block


def scalar() -> Page:
    page = Page(440)
    heads, k, channels, j = 2, 5, 2 * R, 7
    generator = np.random.default_rng(11)
    phi, psis = generator.normal(size=channels), generator.normal(size=(k * k, channels))
    rows, columns = generator.normal(size=(2, k, R))
    psis_placed = psis + np.concatenate((np.repeat(rows, k, 0), np.tile(columns, (k, 1))), 1)  # half rows, half columns
    first, second = generator.normal(size=(channels, channels)), generator.normal(size=(R, channels))
    relations = phi - psis
    mapped = np.maximum(relations @ first.T, 0) @ second.T / 4
    page.line((350, 14), (350, 426), color=FAINT)

    page.text(175, 20, "scalar attention, 2 heads", LARGE)
    head_colors = [GROUPS[c % heads] for c in range(channels)]
    page.text(90, 46, r"$\varphi_i$")
    page.bars(34, 92, phi, head_colors, 14, 12)
    page.text(175, 92, r"$\cdot$", HUGE)
    page.text(260, 46, r"$\psi_j + r_{j-i}$, for every $j$")
    page.bars(204, 92, psis_placed[j], head_colors, 14, 12)
    page.text(175, 144, "inner product within each head, softmax over j", SMALL, GREY)
    maps = [softmax(psis_placed[:, head::heads] @ phi[head::heads]).reshape(k, k) for head in range(heads)]
    weight_maps(page, 175, 130, maps)
    value_boxes(page, 175, head_colors)
    page.text(175, 406, "one weight map per head:\nall M / heads channels of the head share it")

    page.text(525, 20, "vector attention, G = 4", LARGE)
    page.text(525, 46, r"$\delta_{ij} = \varphi_i - \psi_j$, for every $j$")
    page.bars(469, 92, relations[j], DELTA, 14, 12)
    page.text(525, 144, r"$\gamma$ mixes all channels, softmax over j", SMALL, GREY)
    weight_maps(page, 525, 80, [softmax(mapped[:, g]).reshape(k, k) for g in range(R)])
    value_boxes(page, 525, [GROUPS[c % R] for c in range(channels)])
    page.text(525, 406, "one weight map per weight channel:\nS = M / G value channels share it")
    return page


def weight_maps(page: Page, middle: float, pitch: float, maps: Sequence[Numbers]) -> None:
    """The maps side by side in the groups' colours, each between two arrows."""
    side = 14
    for n, (weights, color) in enumerate(zip(maps, GROUPS, strict=False)):
        x = middle + (n - (len(maps) - 1) / 2) * pitch
        page.arrow((x, 156), (x, 184), color=color, width=1.8)
        page.heat(x - 2.5 * side, 194, weights, side, color, weights.max())
        page.rectangle(x - 2.5 * side, 194, 5 * side, 5 * side, edge=color, line=1.6)
        page.arrow((x, 272), (x, 306), color=color, width=1.8)


def value_boxes(page: Page, x: float, colors: Sequence[str]) -> None:
    """Value channels in the colours of the weights they use."""
    for c, color in enumerate(colors):
        page.rectangle(x + (c - len(colors) / 2) * 32 + 2, 316, 28, 28, shade(0.5, 1, color), color, 1.6)
        page.text(x + (c - len(colors) / 2 + 0.5) * 32, 330, rf"$\beta_{c}$", SMALL)
    page.text(x, 362, "value channels c", SMALL, GREY)


def transformation() -> Page:
    page = Page(330)
    kinds = (
        (
            "distinct",
            [(r"$\varphi$", PHI, "C/16"), (r"$\psi$", PSI, "C/16"), (r"$\beta$", BETA, "C/4")],
            (0, 1, 2),
        ),
        ("phi_eq_psi", [(r"$\varphi = \psi$", PHI, "C/16"), (r"$\beta$", BETA, "C/4")], (0, 0, 1)),
        ("phi_eq_psi_eq_beta", [(r"$\varphi = \psi = \beta$", BETA, "C/4")], (0, 0, 0)),
    )
    for n, (name, linears, roles) in enumerate(kinds):
        middle = 120 + n * 230
        if n < 2:
            page.line((middle + 115, 14), (middle + 115, 316), color=FAINT)
        page.text(middle, 22, name)
        page.box(middle, 66, 60, 30, r"$x$", GREY)
        page.text(middle + 40, 66, "C", SMALL, GREY, "left")
        places = {3: (-70.0, 0.0, 70.0), 2: (-35.0, 70.0), 1: (0.0,)}[len(linears)]
        for (words, color, width), place in zip(linears, places, strict=True):
            page.arrow((middle, 81), (middle + place, 132))
            page.box(middle + place, 150, 56 + 20 * words.count("="), 36, words, color)
            page.text(middle + place, 180, width, SMALL, GREY)
        for role, place in zip(roles, (-70, 0, 70), strict=True):
            page.arrow((middle + places[role], 190), (middle + place, 232), color=linears[role][1])
        for words, place in ((r"$\varphi$", -70), (r"$\psi$", 0), (r"$\beta$", 70)):
            page.text(middle + place, 246, words, LARGE)
        page.text(middle - 35, 276, r"relation $\delta$", SMALL)
        page.text(middle + 70, 276, "values", SMALL)
        page.text(middle, 304, ("r1 = 16, r2 = 4", "r1 = 16, r2 = 4", "r1 = r2 = 4")[n])
    return page


# Stage, side of the map for 224 pixels, channels, footprint, blocks in SAN10, SAN15 and SAN19 (table "arch-imagenet").
STAGES = (
    ("1", "112", "64", "3", "2", "3", "3"),
    ("2", "56", "256", "7", "1", "2", "3"),
    ("3", "28", "512", "7", "2", "3", "4"),
    ("4", "14", "1024", "7", "4", "5", "6"),
    ("5", "7", "2048", "7", "1", "2", "3"),
)


def block() -> Page:
    page = Page(640)
    page.text(225, 20, "self-attention block", LARGE)
    phi, psi, left, beta = 110.0, 200.0, 155.0, 345.0
    x = (left + beta) / 2
    page.box(x, 56, 60, 28, r"$x$")
    page.arrow((x, 70), (x, 96))
    page.box(x, 112, 120, 32, "BN, ReLU")
    page.line((x, 128), (x, 146))
    page.line((phi, 146), (beta, 146))
    for place, words, color in (
        (phi, r"$\varphi$: Linear", PHI),
        (psi, r"$\psi$: Linear", PSI),
        (beta, r"$\beta$: Linear", BETA),
    ):
        page.arrow((place, 146), (place, 170))
        page.box(place, 188, 82, 36, words, color)
        page.arrow((place, 206), (place, 434 if place == beta else 238))
    for y, words, color in (
        (256, r"relation $\delta$, position", DELTA),
        (324, r"mapping $\gamma$", ALPHA),
        (392, "softmax (not in patchwise)", ALPHA),
    ):
        page.box(left, y, 190, 36, words, color)
        page.arrow((left, y + 18), (left, y + 50 if y < 392 else 434))
    page.box(x, 452, 280, 36, "aggregation", OUT)
    page.arrow((x, 470), (x, 496))
    page.box(x, 512, 120, 32, "BN, ReLU")
    page.arrow((x, 528), (x, 550))
    page.box(x, 566, 120, 32, "Linear")
    page.arrow((x, 582), (x, 602))
    page.disc(x, 614, 12, "white", INK)
    page.text(x, 614, "+", LARGE)
    page.arrow((x - 30, 56), (32, 56), (32, 614), (x - 12, 614))
    page.text(42, 598, "identity", SMALL, GREY, "left")
    for place, y, words in (
        (x, 83, "C = 256"),
        (phi, 222, "R = 16"),
        (psi, 222, "R = 16"),
        (left, 290, "d = 16 + 2 for each pair"),
        (left, 358, "G = 8 for each pair"),
        (left, 422, r"$\alpha$"),
        (beta, 314, "M = 64"),
        (x, 483, "M = 64"),
        (x, 592, "C = 256"),
    ):
        page.text(place + 8, y, words, SMALL, GREY, "left")

    page.line((452, 14), (452, 626), color=FAINT)
    stage(page)
    return page


def stage(page: Page) -> None:
    """The right half of the block's figure."""
    page.text(576, 20, "stage: transition and blocks", LARGE)
    steps = ("map of the previous stage", "max pool 2 x 2, stride 2", "Linear", "self-attention blocks", "BN, ReLU")
    sizes = ("C, H, W", "C, H/2, W/2", r"C$^\prime$, H/2, W/2", r"C$^\prime$, H/2, W/2", "")
    for n, (words, size) in enumerate(zip(steps, sizes, strict=True)):
        y = 56 + n * 72
        page.box(576, y, 190, 36, words, OUT if n == 3 else GREY)
        page.arrow((576, y + 18), (576, y + 54 if size else y + 44))
        page.text(584, y + 35, size, SMALL, GREY, "left")
    page.text(576, 402, "to the next stage, or to the\nglobal average pool and classifier", SMALL, GREY)
    rows = [("stage", "map", "C", "k", "10", "15", "19"), *STAGES]
    page.text(656, 450, "blocks in SAN", SMALL, GREY)
    for n, row in enumerate(rows):
        for place, words in zip((480, 520, 560, 596, 630, 656, 682), row, strict=True):
            page.text(place, 470 + n * 24, words, SMALL, GREY if n == 0 else INK)
    page.line((464, 482), (692, 482), width=0.8)


FIGURES: dict[str, Callable[[], Page]] = {
    "footprint": footprint,
    "summation": summation,
    "subtraction": subtraction,
    "concatenation": concatenation,
    "hadamard": hadamard,
    "dot": dot,
    "star": star,
    "clique": clique,
    "patch_concatenation": patch_concatenation,
    "mapping": mapping,
    "position": position,
    "aggregation": aggregation,
    "scalar": scalar,
    "transformation": transformation,
    "block": block,
}


def main(names: Sequence[str]) -> None:
    for name in names or FIGURES:
        FIGURES[name]().save(Path(__file__).with_name(f"{name}.svg"))


if __name__ == "__main__":
    main(sys.argv[1:])
