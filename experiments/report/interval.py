"""95 % confidence intervals over seeds.

They cover the randomness of initial weights and of the order of images, but not the choice of validation images.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
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
    with a t quantile of 12.7. None if all are equal: accuracy has discrete steps, so this does not mean certainty."""
    if len(values) < 3 or len(set(values)) == 1:
        return None
    return _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation between seeds, estimated from several rows together, with its degrees of freedom."""

    deviation: float
    freedom: int


def pooled(rows: Iterable[Sequence[float]]) -> Spread | None:
    """The spread of rows whose seeds are assumed to vary alike. None if no row has two seeds, and if all seeds of each row are
    equal."""
    several = [values for values in rows if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in several)
    return Spread(math.sqrt(squares / freedom), freedom) if squares > 0 else None


def of_difference(
    rows: tuple[Sequence[float], Sequence[float]], spreads: tuple[Spread | None, Spread | None]
) -> Interval | None:
    """The interval of the difference of two means, given the pooled spread of the rows that vary like each of them. By
    Student's t if that is the same spread, else with Welch's degrees of freedom (doi:10.1093/biomet/34.1-2.28). None without
    spreads, and if either row has fewer than two values."""
    first, second = spreads
    if first is None or second is None or min(map(len, rows)) < 2:
        return None
    one, two = first.deviation**2 / len(rows[0]), second.deviation**2 / len(rows[1])
    freedom = (one + two) ** 2 / (one**2 / first.freedom + two**2 / second.freedom) if first is not second else first.freedom
    return Interval(statistics.fmean(rows[0]) - statistics.fmean(rows[1]), _quantile(freedom) * math.sqrt(one + two))


def mean_in_words(mean: float, values: Sequence[float], half_width: float | None, form: str = ".1f") -> str:
    """`93.0 ± 1.2` for three seeds or more, `93.0 (92.1, 93.9)` for two, `93.0` for one."""
    text = format(mean, form)
    if half_width is not None:
        return f"{text} ± {half_width:.1f}"
    return f"{text} ({', '.join(format(value, form) for value in values)})" if len(values) == 2 else text


def _quantile(freedom: float) -> float:
    from scipy import stats  # type: ignore[import-untyped, unused-ignore]

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))
