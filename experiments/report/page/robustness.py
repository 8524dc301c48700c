"""What is lost on turned and on attacked images."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from experiments.evaluation.protocol import TITLES
from experiments.evaluation.protocols import PROTOCOLS
from experiments.report.page.content import Answer
from experiments.report.page.elements import DASH, Columns, heads, missing, number, ours, scroll, section, spread, start
from experiments.report.page.results import NO_DIFFERENCE, SPREAD
from experiments.report.robustness import COLUMNS as PRINTED
from experiments.report.robustness import Cell
from experiments.report.table import finished_metrics

ROBUSTNESS = "robustness/"
"""How the metrics of robustness protocols begin: `robustness/<condition>/<number>`."""
COLUMNS: Columns = tuple((heading.removeprefix("{} "), field, form) for heading, field, form in PRINTED)
"""Of each number of a protocol, whose name stands above: heading, field of `Cell`, form."""
OF_DROPS = "The interval of a drop is computed from the drops of the individual seeds."


def disturbed(answer: Answer) -> str:
    """The answer of a grid that names a protocol: its table, condition by condition, without columns that tell nothing."""
    if not answer.cells:
        return ""
    groups: dict[str, Columns] = {}
    for name in TITLES:
        mine = [cell for cell in answer.cells if cell.number == name]
        told = {field for _, field, _ in COLUMNS if field == "ours" or any(getattr(cell, field) is not None for cell in mine)}
        if mine:
            groups[name] = [column for column in COLUMNS if column[1] in told]
    cells = {(cell.condition, cell.row, cell.number): cell for cell in answer.cells}
    seeds = Counter(trial.row for trial in answer.trials)
    width = 1 + sum(map(len, groups.values()))
    bodies = []
    for condition in dict.fromkeys(cell.condition for cell in answer.cells):
        rows = [f'<tr><th scope="rowgroup" colspan="{width}"><span>{escape(condition)}</span></th></tr>']
        for row in dict.fromkeys(cell.row for cell in answer.cells):
            shown = [
                f"<td{start(place)}>{_text(cells.get((condition, row, name)), field, form, seeds[row])}</td>"
                for name, columns in groups.items()
                for place, (_, field, form) in enumerate(columns)
            ]
            rows.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(shown)}</tr>')
        bodies.append(f"<tbody>{''.join(rows)}</tbody>")
    has_paper, has_difference, has_spread = (
        any(getattr(cell, field) is not None for cell in answer.cells) for field in ("paper", "difference", "half_width")
    )
    notes = [f"{SPREAD} {OF_DROPS}"] * has_spread + [NO_DIFFERENCE] * (has_paper and not has_difference)
    caption = f"{'Paper and ours' if has_paper else 'Ours'}, by condition"
    head = heads({f"{TITLES[name]}, %": columns for name, columns in groups.items()})
    table = f"<table><caption>{caption}</caption>{head}{''.join(bodies)}</table>"
    note = f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""
    return section("Results", scroll(table, "Table of results by condition"), note)


def _text(cell: Cell | None, field: str, form: str, seeds: int) -> str:
    value = None if cell is None else getattr(cell, field)
    if cell is None or value is None:
        return missing("not measured") if cell and field == "ours" else DASH
    if field == "ours":
        return ours(value, cell.by_seed, cell.half_width, seeds)
    return number(value, form) + (spread(cell.drop_half_width) if field == "drop" else "")


def robustness(answer: Answer) -> str:
    """What the tracker has of robustness where the grid names no protocol: numbers under each condition, and the top-1 that is
    lost against none."""
    kept = {name for _, result in answer.done() for name in result.metrics if name.startswith(ROBUSTNESS)}
    if answer.grid.robustness or not kept:
        return ""
    known = _condition_names()
    names = [name for name in known if name in kept] + sorted(kept - known.keys())
    found = {line.id: finished_metrics(line.id, answer.trials, answer.results) for line in answer.lines}
    headings, rows = [], []
    for name in names:
        condition, _, measured = name.removeprefix(ROBUSTNESS).rpartition("/")
        title = TITLES.get(measured, measured)
        headings.append(f'<th scope="col">{escape(known.get(name, condition))}<br>{escape(title)}, %</th>')
    for row, seeds in found.items():
        cells = "".join(_changed(seeds, name) for name in names)
        if not any(name in metrics for metrics in seeds for name in names):
            cells = f'<td class="missing" colspan="{len(names)}">not measured</td>'
        rows.append(f'<tr><th scope="row">{escape(row)}</th>{cells}</tr>')
    head = f'<thead><tr><th scope="col">row</th>{"".join(headings)}</tr></thead>'
    caption = "<caption>Means over seeds under each condition</caption>"
    table = f'<table class="plain">{caption}{head}<tbody>{"".join(rows)}</tbody></table>'
    note = '<p class="note">The small number after a top-1 is its change from the last validation, in percentage points.</p>'
    return section("Robustness", scroll(table, "Table of robustness"), note)


def _changed(seeds: Sequence[Mapping[str, float]], name: str) -> str:
    """A number under a condition; of a top-1 what it lost, too."""
    values = [(metrics[name], metrics["val/top1"]) for metrics in seeds if name in metrics]
    if not values:
        return '<td class="missing">not measured</td>'
    mean = statistics.fmean(value for value, _ in values)
    drop = statistics.fmean(before - value for value, before in values)
    lost = f' <span class="spread">{number(-drop, "+.1f")}</span>' if name.endswith("/top1") else ""
    return f"<td>{mean:.1f}{lost}</td>"


def _condition_names() -> dict[str, str]:
    """The conditions' names by those of their metrics, in the protocols' order."""
    names: dict[str, str] = {}
    for protocol in PROTOCOLS.values():
        for condition in protocol.conditions:
            for name in condition.metrics(dict.fromkeys(condition.numbers, 0.0)):
                names.setdefault(name, condition.name)  # without disturbance two protocols measure the same
    return names
