"""The table: paper beside ours."""

from __future__ import annotations

from collections import Counter
from html import escape

from experiments.report.page.content import Answer
from experiments.report.page.elements import MINUS, scroll, section
from experiments.report.table import Line


def results(answer: Answer) -> str:
    lines = answer.lines
    has_paper, has_difference = (
        any(getattr(line, field) is not None for line in lines) for field in ("paper_top1", "difference")
    )
    seeds = Counter(trial.row for trial in answer.trials)
    groups = [
        ("top-1, %", [("paper", "paper_top1", ".1f")] * has_paper + [("ours", "top1", ".1f")]),
        ("top-5, %", [("ours", "top5", ".1f")]),
        ("parameters, 10⁶", [("paper", "paper_params", ".1f")] * has_paper + [("ours", "params", ".1f")]),
        ("FLOPs, 10⁹", [("paper", "paper_flops", ".1f")] * has_paper + [("ours", "flops", ".1f")]),
    ]
    if has_difference:
        groups[0][1].append(("difference", "difference", "+.1f"))
    wide = "".join(f'<th class="start" scope="colgroup" colspan="{len(columns)}">{heading}</th>' for heading, columns in groups)
    firsts = [(heading, place) for _, columns in groups for place, (heading, _, _) in enumerate(columns)]
    narrow = "".join(f'<th{_start(place)} scope="col">{heading}</th>' for heading, place in firsts)
    body = []
    for line in lines:
        cells = []
        for _, columns in groups:
            cells += [_cell(line, field, form, seeds[line.id], place) for place, (_, field, form) in enumerate(columns)]
        body.append(f'<tr><th scope="row">{escape(line.id)}</th>{"".join(cells)}</tr>')
    head = f'<thead><tr><th scope="col" rowspan="2">row</th>{wide}</tr><tr>{narrow}</tr></thead>'
    notes = []
    if any(line.top1_half_width is not None for line in lines):
        notes.append("± is half of a 95 % interval of the mean over seeds (Student's t): chance of training, not of images.")
    if has_paper and not has_difference:
        notes.append("No difference is given: ours are trained on other images than the paper's.")
    notes.append("Parameters and FLOPs (multiply-accumulates, as the paper counts) are those of the full-size models.")
    caption = "Paper beside ours" if has_paper else "Ours"
    table = f"<table><caption>{caption}</caption>{head}<tbody>{''.join(body)}</tbody></table>"
    return section("Answer", scroll(table, "Table of results"), f'<p class="note">{escape(" ".join(notes))}</p>')


def _start(place: int) -> str:
    """Marks the first column of a group."""
    return ' class="start"' if place == 0 else ""


def _cell(line: Line, field: str, form: str, seeds: int, place: int) -> str:
    value = getattr(line, field)
    if value is None:
        text = '<span class="missing">not finished</span>' if field in ("top1", "top5") else "\N{EN DASH}"
    else:
        text = format(value, form).replace("-", MINUS)
    if field == "top1" and value is not None:
        text = f"<strong>{text}</strong>"
        if line.top1_half_width is not None:
            text += f' <span class="spread">± {line.top1_half_width:.1f}</span>'
        if line.seeds < seeds:
            text += f' <span class="missing">{line.seeds} of {seeds} seeds</span>'
    return f"<td{_start(place)}>{text}</td>"
