"""Pictures of a grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config import value_at
from experiments.grid import Plot, Trial
from experiments.report.table import Line

# Okabe and Ito's palette: told apart with any colour vision; markers differ too.
STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", "-"),
)


def draw(plot: Plot, trials: Sequence[Trial], table: Sequence[Line], title: str, path: Path) -> None:
    """Top-1 over the plot's number, one line per series: ours on the left, the paper's on the right, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    places = {t.row: (str(value_at(t.config, plot.series)), value_at(t.config, plot.x)) for t in trials}
    panels = (("top1", f"ours, {trials[0].profile}"), ("paper_top1", "paper, ImageNet"))
    for axis, (field, heading) in zip(axes, panels, strict=True):
        for (name, points), (colour, marker, line) in zip(_series(table, places, field).items(), STYLES, strict=False):
            axis.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker, linestyle=line, label=name)
        axis.set(title=heading, xlabel=plot.label, ylabel="top-1 accuracy, %")
        axis.set_xticks(sorted({x for _, x in places.values()}))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _series(table: Sequence[Line], places: Mapping[str, tuple[str, Any]], field: str) -> dict[str, list[tuple[Any, float]]]:
    series: dict[str, list[tuple[Any, float]]] = defaultdict(list)
    for line in table:
        value = getattr(line, field)
        if value is not None:
            name, x = places[line.id]
            series[name].append((x, value))
    return series
