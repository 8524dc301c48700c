"""The table: paper beside ours."""

from __future__ import annotations

from collections import Counter
from html import escape

from experiments.report.page.content import Answer
from experiments.report.page.elements import DASH, heads, missing, number, ours, scroll, section, start
from experiments.report.table import Line

SPREAD = (
    "± is half of the 95 % interval of the mean over seeds (Student's t). "
    "It covers the randomness of training, not of the images."
)
NO_DIFFERENCE = (
    "No difference is shown, because our training differs from the paper's in the images, the image size or the number "
    "of epochs."
)


def results(answer: Answer) -> str:
    """The grid's answer; where that is the table of a protocol, what stands behind it."""
    lines = answer.lines
    has_paper, has_difference = (
        any(getattr(line, field) is not None for line in lines) for field in ("paper_top1", "difference")
    )
    seeds = Counter(trial.row for trial in answer.trials)
    groups = {
        "top-1, %": [("paper", "paper_top1", ".1f")] * has_paper + [("ours", "top1", ".1f")],
        "top-5, %": [("ours", "top5", ".1f")],
        "parameters, 10⁶": [("paper", "paper_params", ".1f")] * has_paper + [("ours", "params", ".1f")],
        "FLOPs, 10⁹": [("paper", "paper_flops", ".1f")] * has_paper + [("ours", "flops", ".1f")],
    }
    if has_difference:
        groups["top-1, %"].append(("difference", "difference", "+.1f"))
    body = []
    for line in lines:
        cells = []
        for columns in groups.values():
            cells += [_cell(line, field, form, seeds[line.id], place) for place, (_, field, form) in enumerate(columns)]
        body.append(f'<tr><th scope="row">{escape(line.id)}</th>{"".join(cells)}</tr>')
    notes = []
    if any(line.top1_half_width is not None for line in lines):
        notes.append(SPREAD)
    if has_paper and not has_difference:
        notes.append(NO_DIFFERENCE)
    notes.append("Parameters and FLOPs (multiply-accumulates, as in the paper) are counted for the full-size models.")
    caption = "Paper and ours" if has_paper else "Ours"
    table = f"<table><caption>{caption}</caption>{heads(groups)}<tbody>{''.join(body)}</tbody></table>"
    heading = "Accuracy on clean images" if answer.grid.robustness else "Results"
    return section(heading, scroll(table, "Table of results"), f'<p class="note">{escape(" ".join(notes))}</p>')


def _cell(line: Line, field: str, form: str, seeds: int, place: int) -> str:
    value = getattr(line, field)
    if value is None:
        text = missing("not finished") if field in ("top1", "top5") else DASH
    elif field == "top1":
        text = ours(value, line.top1_by_seed, line.top1_half_width, seeds)
    else:
        text = number(value, form)
    return f"<td{start(place)}>{text}</td>"
