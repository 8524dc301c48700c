"""A grid's answer as one HTML page: no script, nothing from elsewhere, so that it can be mailed and read without a network."""

from __future__ import annotations

import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template

import yaml

from experiments.config import merged, value_at
from experiments.grid import Grid, Trial
from experiments.report.attention import Attention, between_in_words
from experiments.report.chart import COLOURS, Axis, Point, Series, curves_chart, legend, points_chart
from experiments.report.figures import family
from experiments.report.table import Line, finished_metrics
from experiments.report.tiles import MOST_CHANNELS, tiles
from experiments.tracking import Result

TEMPLATE = Path(__file__).parent / "page.html"
CURVES = {"val/top1": ("validation top-1, %", 100.0), "train/loss": ("training loss", float("inf"))}
"""Metrics that are shown over epochs, with the words of their axis and what they cannot exceed."""
MOST_ROWS = 42
"""Rows of which curves, labels and commands are shown: more could not be told apart."""
MOST_LOOKS = 4
"""Cells of which a page shows the attention: each takes a second, large networks several."""
ROBUSTNESS = "robustness/"
"""How the metrics of robustness protocols begin: `robustness/<condition>/<number>`."""
SAME = {
    "images": "digest of the images",
    "workers": "workers of a cell",
    "commit": "commit",
    "versions": "versions",
    "machine": "machine",
}
"""Facts of cells that are told once where they are equal, and their words there."""
MINUS = "\N{MINUS SIGN}"

Curves = Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
"""By a trial's content hash and the name of a metric: epoch and value."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a cell's network weighs the footprint of a pixel."""

    trial: Trial
    checkpoint: str
    """Where it lies."""
    image: int
    """Number of the validation image."""
    seen: Attention | str
    """Or why there is none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a page tells of."""

    grid: Grid
    name: str
    caption: str
    command: str
    """The `san run` that makes it."""
    overrides: Sequence[str]
    trials: Sequence[Trial]
    results: Mapping[str, Result]
    lines: Sequence[Line]
    curves: Curves
    store: str
    """The tracker's address."""
    looks: Sequence[Look] = ()

    @property
    def profile(self) -> str:
        return self.trials[0].profile

    def done(self) -> list[tuple[Trial, Result]]:
        """Finished cells, in order."""
        found = [(trial, self.results[trial.key]) for trial in self.trials if trial.key in self.results]
        return [(trial, result) for trial, result in found if result.finished]

    def families(self) -> dict[str, list[Line]]:
        """Lines by the family of their models."""
        families: dict[str, list[Line]] = {}
        of_row = {trial.row: family(trial) for trial in self.trials}
        for line in self.lines:
            families.setdefault(of_row[line.id], []).append(line)
        return families


def shown_rows(lines: Sequence[Line]) -> list[str]:
    """The rows of which a page shows curves and commands."""
    return [line.id for line in lines[:MOST_ROWS]]


def page(answer: Answer) -> str:
    """The page. Every text that comes from a user is escaped."""
    sections = [
        _table(answer),
        _plot(answer),
        _cost(answer),
        _curves(answer),
        _attention(answer),
        _robustness(answer),
        _reproduce(answer),
    ]
    done, cells = len(answer.done()), len(answer.trials)
    state = f"all {cells} cells finished" if done == cells else f"{done} of {cells} cells finished"
    facts = [f"profile {answer.profile}", state, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{answer.name}: {answer.grid.question}"),
        name=escape(answer.name),
        question=escape(answer.grid.question),
        caption=re.sub("`(.*?)`", r"<code>\1</code>", escape(answer.caption)),
        facts="".join(f"<li>{escape(fact)}</li>" for fact in facts),
        sections="\n".join(filter(None, sections)),
    )


def _section(heading: str, *parts: str) -> str:
    name = heading.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(heading)}</h2>\n{"".join(parts)}\n</section>'


def _scroll(table: str, name: str, kind: str = "scroll") -> str:
    """A table that scrolls in its own box where the window is narrow; the keyboard reaches it."""
    return f'<div class="{kind}" role="region" aria-label="{escape(name)}" tabindex="0">{table}</div>'


# --- the table


def _table(answer: Answer) -> str:
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
    return _section("Answer", _scroll(table, "Table of results"), f'<p class="note">{escape(" ".join(notes))}</p>')


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


# --- charts


def _panel(heading: str, chart: str) -> str:
    return f'<div class="panel"><h3>{escape(heading)}</h3>{chart}</div>'


def _figure(panels: Sequence[str], key: str, note: str = "") -> str:
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    kind = "panels" if len(panels) % 3 == 0 else "panels two"
    return f'<div class="figure">{key}<div class="{kind}">{"".join(panels)}</div>{told}</div>'


def _sides(answer: Answer) -> list[tuple[str, str, str]]:
    """Whose accuracies there are: a heading, and the fields of `Line` with the accuracy and half of its interval."""
    sides = [(f"ours, {answer.profile}", "top1", "top1_half_width"), ("paper, ImageNet", "paper_top1", "")]
    return [side for side in sides if any(getattr(line, side[1]) is not None for line in answer.lines)]


def _points(lines: Iterable[tuple[Line, float, str]], accuracy: str, half: str, words: str = "") -> list[Point]:
    """Of those lines that have that accuracy, at the places and with the labels that come with them."""
    points = []
    for line, x, label in lines:
        value = getattr(line, accuracy)
        if value is None:
            continue
        around = (getattr(line, half) if half else None) or 0.0
        spread = f" ± {around:.1f}" if around else ""
        title = f"{line.id}: {value:.1f}{spread} % at {x:.3g} {words}".strip()
        points.append(Point(x, value, value - around, value + around, label, title))
    return sorted(points, key=lambda point: point.x)


def _plot(answer: Answer) -> str:
    """The grid's own picture: accuracy over its number, a line for each of its series."""
    plot, sides = answer.grid.plot, _sides(answer)
    if plot is None or not sides:
        return ""
    places = {t.row: (str(value_at(t.config, plot.series)), value_at(t.config, plot.x)) for t in answer.trials}
    names = list(dict.fromkeys(name for name, _ in places.values()))
    ticks = sorted({x for _, x in places.values()})
    panels = []
    for heading, accuracy, half in sides:
        series = []
        # Intervals at the same number stand a little apart, or they would hide each other.
        apart = 0.012 * (ticks[-1] - ticks[0]) if half else 0.0
        for style, name in enumerate(names):
            aside = apart * (style - (len(names) - 1) / 2)
            mine = [(line, places[line.id][1], "") for line in answer.lines if places[line.id][0] == name]
            points = [replace(point, x=point.x + aside) for point in _points(mine, accuracy, half)]
            series += [Series(name, style, points)] if points else []
        alternative = f"Top-1 accuracy over {plot.label}, {heading}."
        axes = Axis(plot.label, ticks), Axis("top-1, %", most=100.0)
        panels.append(_panel(heading, points_chart(alternative, series, *axes)))
    key = legend(((name, style) for style, name in enumerate(names)), lines=True)
    return _section(f"Accuracy over {plot.label.split(',')[0]}", _figure(panels, key))


def _cost(answer: Answer) -> str:
    """The paper's claim as a picture: what accuracy costs in parameters and in FLOPs, by family of models."""
    costs = {"params": "million parameters", "flops": "billion FLOPs"}
    sides, families = _sides(answer), answer.families()
    if not sides or all(line.params is None for line in answer.lines):
        return ""
    has_labels = len(answer.lines) <= MOST_ROWS
    panels = []
    for field, words in costs.items():
        for heading, accuracy, half in sides:
            series = []
            for style, (name, lines) in enumerate(families.items()):
                labels = short_names([line.id for line in lines]) if has_labels else {}
                counted = [line for line in lines if line.params is not None]
                mine = [(line, getattr(line, field), labels.get(line.id, "")) for line in counted]
                points = _points(mine, accuracy, half, words)
                series += [Series(name, style, points)] if points else []
            alternative = f"Top-1 accuracy over {words}, {heading}."
            chart = points_chart(alternative, series, Axis(words), Axis("top-1, %", most=100.0))
            panels.append(_panel(f"{heading}, over {'parameters' if field == 'params' else 'FLOPs'}", chart))
    key = legend(((name, style) for style, name in enumerate(families)), lines=True)
    note = "Up and to the left is better. Intervals without an end are cut. A point tells more on hovering."
    return _section("Accuracy and cost", _figure(panels, key, note))


def short_names(ids: Sequence[str]) -> dict[str, str]:
    """What tells rows of a family apart: their ids without the parts with which all of them begin and end."""
    parts = {row: _parts(row) for row in ids}
    if len(ids) < 2:
        return {row: row for row in ids}
    shortest = min(map(len, parts.values()))
    begin = next((i for i in range(shortest) if len({p[i] for p in parts.values()}) > 1), shortest)
    room = shortest - begin
    end = next((i for i in range(room) if len({p[-1 - i] for p in parts.values()}) > 1), room)
    return {row: "".join(p[begin : len(p) - end]).strip("_-.") or row for row, p in parts.items()}


def _parts(row: str) -> list[str]:
    """Words, numbers and what is between them."""
    parts = [row[:1]]
    for before, letter in pairwise(row):
        if _kind(before) == _kind(letter):
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts


def _kind(letter: str) -> int:
    return 0 if letter.isalpha() else 1 if letter.isdigit() else 2


def _curves(answer: Answer) -> str:
    """A panel for each metric and family; large families have several, for a colour should not come back."""
    charts = []
    kept = set(shown_rows(answer.lines))
    for metric, (words, most) in CURVES.items():
        panels = []
        for name, lines in answer.families().items():
            rows = [line.id for line in lines if line.id in kept]
            for first in range(0, len(rows), COLOURS):
                series = []
                for style, row in enumerate(rows[first : first + COLOURS]):
                    points = _curve(answer, row, metric)
                    series += [Series(row, style, points)] if points else []
                if series:
                    chart = curves_chart(f"{words} over epochs, {name}.", series, Axis("epoch"), Axis(words, most=most))
                    key = legend([(one.name, one.style) for one in series], lines=True)
                    panels.append(_panel(f"{name}, {words.split(',')[0]}", chart + key))
        if panels:
            charts.append(_figure(panels, ""))
    if not charts:
        return ""
    seeds = len({trial.seed for trial in answer.trials}) > 1
    note = "Lines are means over seeds, bands reach from the lowest to the highest." if seeds else ""
    left_out = len(answer.lines) - len(kept)
    note += f" {left_out} more rows are not shown." if left_out else ""
    return _section("Training curves", *charts, f'<p class="note">{escape(note.strip())}</p>' if note else "")


def _curve(answer: Answer, row: str, metric: str) -> list[Point]:
    """A row's metric over the epochs that all of its seeds have begun with: mean, least and largest."""
    seeds = [dict(answer.curves.get(trial.key, {}).get(metric, ())) for trial in answer.trials if trial.row == row]
    seeds = [values for values in seeds if values]
    points = []
    for epoch in sorted(set.intersection(*map(set, seeds))) if seeds else ():
        values = [seed[epoch] for seed in seeds]
        mean = statistics.fmean(values)
        points.append(Point(epoch, mean, min(values), max(values), "", f"epoch {epoch}: {mean:.3g}"))
    return points


# --- attention


def _attention(answer: Answer) -> str:
    """What `san show` draws, of a few cells."""
    if not answer.looks:
        return ""
    note = (
        "How networks weigh the footprint of a pixel: the middle one of the validation image in the middle. Of each kind of "
        "attention and each relation it is the cell with the best top-1, after its last epoch; "
        f"{MOST_LOOKS} cells at most, the best of every kind first."
    )
    key = (
        "Squares are pixels of the footprint, the framed one is the pixel itself. A strong colour is a large weight; "
        "orange with a hole is negative. Spread is the standard deviation over all channels. Dashes are where the image ends; "
        "beyond, it is mirrored."
    )
    panels = f'<div class="panels two looks">{"".join(map(_look, answer.looks))}</div>'
    return _section("What the attention looks at", f'<p>{note}</p>{panels}<p class="note">{key}</p>')


def _look(look: Look) -> str:
    name, seen = escape(look.trial.name), look.seen
    if isinstance(seen, str):
        return f'<div class="panel"><h3>{name}</h3><p class="missing">No picture: {escape(seen)}</p></div>'
    relation = getattr(look.trial.config.model.spec(), "relation", None)
    heading = f"<h3>{name}: {seen.kind} attention{f', {relation}' if relation else ''}</h3>"
    (H, W), k = seen.map, seen.footprint
    some = f", of which {MOST_CHANNELS} are shown" if len(seen.weight_GKn) > MOST_CHANNELS else ""
    facts = (
        f"{seen.model} takes {seen.picture} for {seen.answer}. {seen.layer}, footprint {k} x {k}, map {H} x {W}, "
        f"{seen.channels}{some}."
    )
    picture = tiles(seen, f"seen-{look.trial.key}")
    told = f'<p class="note">{escape(facts)}</p>{picture}<p class="note">{between_in_words(seen)}</p>'
    command = escape(shlex.join(["san", "show", look.checkpoint, str(look.image)]))
    asked = f"<details><summary>All channels, other pixels</summary><pre><code>{command}</code></pre></details>"
    return f'<div class="panel">{heading}{told}{asked}</div>'


# --- robustness


def _robustness(answer: Answer) -> str:
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
            lost = f' <span class="spread">{-drop:+.1f}</span>'.replace("-", MINUS) if name.endswith("/top1") else ""
            cells.append(f"<td>{mean:.1f}{lost}</td>")
        rows.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(cells)}</tr>')
    head = f'<thead><tr><th scope="col">row</th>{"".join(heads)}</tr></thead>'
    caption = "<caption>Numbers under each condition, means over seeds</caption>"
    table = f'<table class="plain">{caption}{head}<tbody>{"".join(rows)}</tbody></table>'
    note = '<p class="note">Behind a top-1: the change against that of the last validation, in points.</p>'
    return _section("Robustness", _scroll(table, "Table of robustness"), note)


# --- how to reproduce it


def _reproduce(answer: Answer) -> str:
    store = escape(answer.store)
    browse = f'MLflow at <a href="{store}">{store}</a>' if _is_server(answer.store) else "<code>san ui</code> shows the runs"
    parts = [
        "<p>All cells, at the commit below; a cell that is finished in the store is taken from there:</p>",
        f"<pre><code>{escape(answer.command)}</code></pre>",
        f"<p>{browse}, each with its resolved config and all package versions as artifacts.</p>",
    ]
    cells = answer.done()
    facts = _facts(answer.store, cells)
    same = {name: values[0] for name, values in facts.items() if name in SAME and len(set(values)) == 1}
    if same:
        told = "".join(f"<dt>{SAME[name]}</dt><dd>{value}</dd>" for name, value in same.items())
        parts.append(f"<h3>All cells</h3><dl>{told}</dl>")
    if cells:
        differ = {name: values for name, values in facts.items() if name not in same}
        heads = "".join(f'<th scope="col">{name}</th>' for name in ("cell", *differ))
        body = []
        for (trial, _), values in zip(cells, zip(*differ.values(), strict=True), strict=True):
            told = "".join(f"<td>{value}</td>" for value in values)
            body.append(f'<tr><th scope="row">{escape(trial.name)}</th>{told}</tr>')
        table = f"<caption>Finished cells</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody>"
        parts.append("<h3>Each cell</h3>")
        parts.append(_scroll(f'<table class="cells">{table}</table>', "Table of cells", "scroll tall"))
    parts.append("<h3>One row alone</h3><p>These train the same cells: they have the same keys.</p>")
    parts += [_alone(answer, row) for row in shown_rows(answer.lines)]
    return _section("Reproduce", *parts)


def _facts(store: str, cells: Sequence[tuple[Trial, Result]]) -> dict[str, list[str]]:
    """What is told of each cell, as HTML."""
    untold = {"workers": "unknown", "git_commit": "unknown"}
    results = [result for _, result in cells]

    def tagged(name: str) -> list[str]:
        missing = untold.get(name, "in environment.txt of the run")
        return [escape(result.tags.get(f"san.{name}", missing)) for result in results]

    return {
        "key": [f"<code>{trial.key}</code>" for trial, _ in cells],
        "run": [_run_link(store, result) for result in results],
        "top-1, %": [f"{result.metrics['val/top1']:.2f}" for result in results],
        "minutes": [f"{result.seconds / 60:.1f}" for result in results],
        "images": [escape(trial.data_digest) for trial, _ in cells],
        "workers": tagged("workers"),
        "commit": tagged("git_commit"),
        "versions": tagged("versions"),
        "machine": tagged("machine"),
    }


def _is_server(store: str) -> bool:
    return store.startswith(("http://", "https://"))


def _run_link(store: str, result: Result) -> str:
    name = f"<code>{result.run_id}</code>"
    if not _is_server(store):
        return name
    place = f"{store.rstrip('/')}/#/experiments/{result.experiment_id}/runs/{result.run_id}"
    return f'<a href="{escape(place)}">{name}</a>'


def _alone(answer: Answer, row: str) -> str:
    command = escape(row_alone(answer.grid, row, answer.trials, answer.overrides))
    return f"<details><summary>{escape(row)}</summary><pre><code>{command}</code></pre></details>"


def row_alone(grid: Grid, row: str, trials: Sequence[Trial], overrides: Sequence[str]) -> str:
    """Shell commands that train one row's cells, from a grid of its own: the same cells, by content."""
    (mine,) = (one for one in grid.rows if one.id == row)
    layers = merged(grid.base.model_dump(), mine.model_dump(exclude={"id"}))
    seeds = [trial.seed for trial in trials if trial.row == row]
    content = {"question": grid.question, "seeds": seeds, "rows": [{"id": row, **{key: v for key, v in layers.items() if v}}]}
    text = yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)
    profile = next(trial.profile for trial in trials if trial.row == row)
    file = f"{row}.yaml"
    command = shlex.join(["san", "run", file, "--profile", profile, *overrides])
    return f"cat > {shlex.quote(file)} <<'END'\n{text}END\n{command}"
