"""What is lost on turned and on attacked images."""

from __future__ import annotations

import statistics
from html import escape

from experiments.report.page.content import Answer
from experiments.report.page.elements import MINUS, scroll, section
from experiments.report.table import finished_metrics

ROBUSTNESS = "robustness/"
"""How the metrics of robustness protocols begin: `robustness/<condition>/<number>`."""


def robustness(answer: Answer) -> str:
    """What the tracker has of robustness: numbers under each condition, and the top-1 that is lost against none."""
    names = sorted({name for _, result in answer.done() for name in result.metrics if name.startswith(ROBUSTNESS)})
    if not names:
        return ""
    found = {line.id: finished_metrics(line.id, answer.trials, answer.results) for line in answer.lines}
    heads, rows = [], []
    for name in names:
        condition, _, number = name.removeprefix(ROBUSTNESS).rpartition("/")
        heads.append(f'<th scope="col">{escape(condition)}<br>{escape(number)}, %</th>')
    for row, seeds in found.items():
        cells = []
        for name in names:
            values = [(metrics[name], metrics["val/top1"]) for metrics in seeds if name in metrics]
            if not values:
                cells.append('<td class="missing">not measured</td>')
                continue
            mean = statistics.fmean(value for value, _ in values)
            drop = statistics.fmean(before - value for value, before in values)
            change = f"{round(-drop, 1) + 0.0:+.1f}".replace("-", MINUS)  # there is no -0.0
            lost = f' <span class="spread">{change}</span>' if name.endswith("/top1") else ""
            cells.append(f"<td>{mean:.1f}{lost}</td>")
        rows.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(cells)}</tr>')
    head = f'<thead><tr><th scope="col">row</th>{"".join(heads)}</tr></thead>'
    caption = "<caption>Numbers under each condition, means over seeds</caption>"
    table = f'<table class="plain">{caption}{head}<tbody>{"".join(rows)}</tbody></table>'
    note = '<p class="note">Behind a top-1: the change against that of the last validation, in points.</p>'
    return section("Robustness", scroll(table, "Table of robustness"), note)
