"""95 % confidence intervals over seeds.

They cover the randomness of initial weights and of the order of images, but not the choice of validation images.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval around a mean, from `middle - half_width` to `middle + half_width`."""

    middle: float
    half_width: float

    @property
    def low(self) -> float:
        return self.middle - self.half_width

    @property
    def high(self) -> float:
        return self.middle + self.half_width


def half_width(values: Sequence[float]) -> float | None:
    """Half of the interval of a mean by Student's t. None for fewer than three values: two values are clearer than an interval
    with a t quantile of 12.7."""
    if len(values) < 3:
        return None
    return _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def of_difference(better: Sequence[float], worse: Sequence[float]) -> Interval | None:
    """The interval of a difference of means by Welch's t, which allows different variances. None for fewer than two values, and
    if all values are equal: accuracy has discrete steps, so equal values do not mean certainty."""
    if min(len(better), len(worse)) < 2:
        return None
    difference = statistics.fmean(better) - statistics.fmean(worse)
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (better, worse)]
    square = sum(part for part, _ in parts)
    if square == 0:
        return None
    freedom = square**2 / sum(part**2 / freedom for part, freedom in parts)
    return Interval(difference, _quantile(freedom) * math.sqrt(square))


def in_words(mean: float, values: Sequence[float], half_width: float | None, form: str = ".1f") -> str:
    """`93.0 ± 1.2` for three seeds or more, `93.0 (92.1, 93.9)` for two, `93.0` for one."""
    text = format(mean, form)
    if half_width is not None:
        return f"{text} ± {half_width:.1f}"
    return f"{text} ({', '.join(format(value, form) for value in values)})" if len(values) == 2 else text


def _quantile(freedom: float) -> float:
    from scipy import stats  # type: ignore[import-untyped, unused-ignore]

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))
