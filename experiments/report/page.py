"""A grid's results as one HTML page without scripts or external files, so that it can be mailed and read offline."""

from __future__ import annotations

import base64
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.evaluation.robustness import PROTOCOLS, TITLES
from experiments.report import data as report_data
from experiments.report.data import GridReport, Measurement, TableRow, grid_measurements
from experiments.report.plots import Chart, cost_charts, curve_charts, plot_charts, svg
from experiments.report.tables import MEASUREMENT_COLUMNS, Column, setting_in_words, shown_columns, value_of
from experiments.runs.summary import Confusion
from experiments.tracking import Result
from san.models.san import SANSpec

MINUS = "\N{MINUS SIGN}"
SPREAD = (
    "± is half of the 95 % interval of the mean over seeds (Student's t). "
    "It covers the randomness of training, not of the images."
)
DROP_SPREAD = "The interval of a drop is computed from the drops of the individual seeds."
ONE_SEED = "No row has more than one seed, so differences between rows can come from the seed."
NO_DIFFERENCE = (
    "No difference is shown, because our training differs from the paper's in the images, the image size or the number "
    "of epochs."
)
NOTE_ON_COUNTS = "Parameters and FLOPs (multiply-accumulates, as in the paper) are counted for the {} models."
GROUPS = {
    "": "settings",
    "top-1": "top-1, %",
    "top-5": "top-5, %",
    "params M": "parameters, 10\N{SUPERSCRIPT SIX}",
    "FLOPs M": "FLOPs, 10\N{SUPERSCRIPT SIX}",
    "FLOPs G": "FLOPs, 10\N{SUPERSCRIPT NINE}",
}
"""The page's headings above columns; other groups have their own name."""
SHOWN_ELSEWHERE = ("id", "seeds", "note")
"""Fields that are not columns of the page's table of results."""
SAME = {
    "images": "digest of the image lists",
    "workers": "workers per trial",
    "commit": "commit",
    "versions": "versions",
    "machine": "machine",
}
"""Facts about trials that are shown only once if they are equal, and their names there."""


Groups = Mapping[str, Sequence[Column]]
"""Columns by the heading above them."""


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """A table whose rows are in bodies with a title, or in one without. Each row has a record for each group of columns."""

    name: str
    caption: str
    groups: Groups
    bodies: Mapping[str, Mapping[str, Sequence[TableRow | Measurement | None]]]
    notes: Sequence[str]
    missing: str
    """Shown instead of our missing numbers."""


@dataclass(frozen=True, slots=True)
class ChartSection:
    """A section of charts. Further charts are folded."""

    heading: str
    charts: Sequence[Chart]
    note: str = ""
    folded: Sequence[Sequence[Chart]] = ()


def templates() -> Environment:
    """The templates in this folder. Text is escaped unless it is `Markup`; a missing variable is an error."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(report: GridReport) -> str:
    """Renders the page. All text is escaped."""
    environment = templates()
    environment.filters |= {"number": _number, "value_of": value_of, "data_uri": _data_uri}
    grid_run = report.grid_run
    done, total = len(report.finished), len(grid_run.trials)
    facts = [
        f"grid {grid_run.name}",
        f"profile {grid_run.profile}",
        *(text for text in grid_run.request.overrides if text not in grid_run.changes),
        f"all {total} trials finished" if done == total else f"{done} of {total} trials finished",
    ]
    if ended := max((result.ended for _, result in report.finished), default=0):
        facts.append(datetime.fromtimestamp(ended, UTC).strftime("last trial finished %Y-%m-%d %H:%M UTC"))
    return environment.get_template("page.html").render(
        report=report,
        grid_run=grid_run,
        store=grid_run.workspace.tracking_uri,
        caption=Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(setting_in_words(grid_run))))),
        facts=facts,
        protocol=_protocol_table(report.measurements) if report.measurements else None,
        other_protocols=_other_protocols(report),
        seeds=Counter(trial.row for trial in grid_run.trials),
        results=_results_table(report),
        sections=[section for section in (_plot_section(report), _cost_section(report), _curves_section(report)) if section],
        by_classes=_by_classes(report.confusions),
        attention_command=_attention_command(report),
        is_server=grid_run.workspace.tracking_uri.startswith(("http://", "https://")),
        **_facts(report),
        row_commands={row: replace(grid_run.request, only=(row,)).command for row in report.shown_rows},
        commands_note=_limit_note(report, "a command on this page"),
    )


def _data_uri(chart: Chart) -> str:
    """The chart as the address of an image, which keeps its ids and styles apart from those of other charts."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(chart).encode()).decode()}"


def _attention_command(report: GridReport) -> str | None:
    """Draws the attention weights of the best row that has any, for its first finished trial."""
    top1, grid_run = {row.id: row.top1 or 0.0 for row in report.rows}, report.grid_run
    trials = [trial for trial, _ in report.finished if isinstance(trial.config.model.spec(), SANSpec)]
    if not trials:
        return None
    best = max(trials, key=lambda trial: top1[trial.row])
    imports = [f"--import={file}" for file in (*grid_run.grid.imports, *grid_run.request.imports)]
    return grid_run.request.with_runs(shlex.join(["san", "attention", best.key, "0", *imports]))


def _limit_note(report: GridReport, what: str) -> str:
    """Says which rows have `what` if not all of them do."""
    most, total = report_data.MOST_ROWS, len(report.rows)
    return f" Only the best {most} of the {total} rows, by top-1, have {what}." if total > most else ""


def _by_classes(confusions: Mapping[str, Confusion]) -> dict[tuple[str, ...], dict[str, Confusion]]:
    """Confusion matrices by their classes, because rows may be trained on different images."""
    by_classes: dict[tuple[str, ...], dict[str, Confusion]] = {}
    for row, confusion in confusions.items():
        by_classes.setdefault(confusion.classes, {})[row] = confusion
    return by_classes


def _plot_section(report: GridReport) -> ChartSection | None:
    plot = report.grid_run.grid.plot
    charts = plot_charts(plot, report.grid_run.trials, report.rows) if plot else []
    if plot is None or not charts:
        return None
    return ChartSection(f"Accuracy by {plot.label.split(',')[0]}", charts, "" if _has_spread(report) else ONE_SEED)


def _cost_section(report: GridReport) -> ChartSection | None:
    charts = cost_charts(report)
    notes = ["Up and to the left is better."]
    notes += ["Intervals without an end mark are cut off."] * _has(report.rows, "top1_half_width")
    notes += [] if _has_spread(report) else [ONE_SEED]
    return ChartSection("Accuracy and cost", charts, " ".join(notes)) if charts else None


def _curves_section(report: GridReport) -> ChartSection | None:
    groups = curve_charts(report)
    has_seeds = len({trial.seed for trial in report.grid_run.trials}) > 1
    note = "Lines show the mean over seeds, bands the range from lowest to highest." if has_seeds else ""
    note = (note + _limit_note(report, "curves")).strip()
    return ChartSection("Training curves", groups[0], note, groups[1:]) if groups else None


def _has_spread(report: GridReport) -> bool:
    return any(row.seeds > 1 for row in report.rows)


def _number(value: float | str, form: str = ".1f") -> str:
    if isinstance(value, str):
        return value
    text = format(value, form)
    is_zero = not text.strip("-0.")  # a small negative number, whose sign means nothing
    return text.lstrip("-") if is_zero else text.replace("-", MINUS)


def _has(records: Iterable[Any], field: str) -> bool:
    return any(getattr(record, field) is not None for record in records)


def _results_table(report: GridReport) -> HtmlTable:
    """The table of the grid. If the grid names a protocol, this table is the background of the protocol's."""
    rows = report.rows
    groups: dict[str, list[Column]] = {}
    for column in shown_columns(rows):
        if column.field not in SHOWN_ELSEWHERE:
            groups.setdefault(GROUPS.get(column.group, column.group), []).append(column)
    notes = [SPREAD] * _has(rows, "top1_half_width")
    notes += [NO_DIFFERENCE] * (_has(rows, "paper_top1") and not _has(rows, "difference"))
    caption = "Paper and ours" if _has(rows, "paper_top1") else "Results"
    counts = NOTE_ON_COUNTS.format("full-size" if report.grid_run.grid.table else "trained")
    body = {row.id: [row] * len(groups) for row in rows}
    return HtmlTable("Table of results", caption, groups, {"": body}, [*notes, counts], "not finished")


def _protocol_table(measurements: Sequence[Measurement]) -> HtmlTable:
    """The table of a protocol, condition by condition, without empty columns."""
    groups: dict[str, Sequence[Column]] = {}
    for number in TITLES:
        if of_number := [one for one in measurements if one.number == number]:
            groups[number] = [
                column for column in MEASUREMENT_COLUMNS if column.field == "ours" or _has(of_number, column.field)
            ]
    by_cell = {(one.condition, one.row, one.number): one for one in measurements}
    bodies: dict[str, dict[str, Sequence[Measurement | None]]] = {}
    for one in measurements:
        bodies.setdefault(one.condition, {})[one.row] = [by_cell.get((one.condition, one.row, number)) for number in groups]
    notes = [f"{SPREAD} {DROP_SPREAD}"] * _has(measurements, "half_width")
    notes += [NO_DIFFERENCE] * (_has(measurements, "paper") and not _has(measurements, "difference"))
    caption = f"{'Paper and ours' if _has(measurements, 'paper') else 'Results'}, by condition"
    titled = {f"{TITLES[number]}, %": columns for number, columns in groups.items()}
    return HtmlTable("Table of results by condition", caption, titled, bodies, notes, "not measured")


def _other_protocols(report: GridReport) -> dict[str, HtmlTable]:
    """Tables of the protocols for which the trials have numbers although the grid names no protocol."""
    if report.grid_run.grid.robustness:
        return {}
    by_protocol = {
        name: grid_measurements(protocol, report.grid_run.trials, report.results, {}) for name, protocol in PROTOCOLS.items()
    }
    return {name: _protocol_table(measured) for name, measured in by_protocol.items() if _has(measured, "ours")}


def _facts(report: GridReport) -> dict[str, Any]:
    """Facts that are the same for all finished trials (`same_facts`), and those of each trial (`trial_facts`)."""

    def tagged(result: Result, name: str, missing: str = "see environment.txt of the run") -> str:
        return result.tags.get(f"san.{name}", missing)

    facts = [
        {
            "key": trial.key,
            "run": result.run_id,
            "top-1, %": f"{result.metrics['val/top1']:.2f}",
            "minutes": f"{60 * result.metrics['summary/training_hours']:.1f}",
            "images": trial.data_digest,
            "workers": tagged(result, "workers", "unknown"),
            "commit": tagged(result, "git_commit", "unknown"),
            "versions": tagged(result, "versions"),
            "machine": tagged(result, "machine"),
        }
        for trial, result in report.finished
    ]
    same = {name: facts[0][name] for name in SAME if facts and len({each[name] for each in facts}) == 1}
    rest = [{name: value for name, value in each.items() if name not in same} for each in facts]
    return {"same_facts": {SAME[name]: value for name, value in same.items()}, "trial_facts": rest}
