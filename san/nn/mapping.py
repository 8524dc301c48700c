"""The mapping gamma from a relation to attention weights (section 3.1 and table "mapping")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch import nn


@dataclass(frozen=True, slots=True)
class Mapping:
    """The widths of gamma's hidden layers."""

    pairwise: Callable[[int], tuple[int, ...]]
    """From the C / 16 hidden channels of a pairwise mapping."""
    patchwise: Callable[[int, int], tuple[int, ...]]
    """From R relation channels and G weight channels."""


MAPPINGS: dict[str, Mapping] = {
    "L": Mapping(lambda hidden: (), lambda R, G: ()),
    "LRL": Mapping(lambda hidden: (hidden,), lambda R, G: (G,)),
    "LRLRL": Mapping(lambda hidden: (hidden, hidden), lambda R, G: (R, G)),
}
"""By the paper's names: L is a Linear layer, R is a ReLU."""


def gamma(widths: tuple[int, ...]) -> nn.Sequential:
    """BatchNorm, ReLU, Linear for each step of `widths`; only the last Linear has a bias.

    Widths (d, G) give the paper's `L`, and (d, hidden, G) its default `LRL`. The input is [N, d, K, P] or [N, d, 1, P]; the
    Linear layers are 1x1 convolutions.
    """
    last = len(widths) - 2
    layers: list[nn.Module] = []
    for step, (width_in, width_out) in enumerate(pairwise(widths)):
        layers += [
            nn.BatchNorm2d(width_in),
            nn.ReLU(),
            nn.Conv2d(width_in, width_out, 1, bias=step == last),
        ]
    return nn.Sequential(*layers)
