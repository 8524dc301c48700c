"""How to make it again: commands, keys, versions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

import yaml

from experiments.grids.config import merged
from experiments.grids.grid import Grid, Trial
from experiments.report.page.content import Answer, left_out, shown_rows
from experiments.report.page.elements import scroll, section, shell
from experiments.tracking import Result

SAME = {
    "images": "digest of the image lists",
    "workers": "workers per cell",
    "commit": "commit",
    "versions": "versions",
    "machine": "machine",
}
"""Facts of cells that are told once where they are equal, and their words there."""


def reproduce(answer: Answer) -> str:
    store = escape(answer.store)
    browse = (
        f'The runs are in MLflow at <a href="{store}">{store}</a>'
        if _is_server(answer.store)
        else "<code>san ui</code> opens the runs in MLflow"
    )
    parts = [
        "<p>This command trains all cells at the commit below. It skips cells that are already finished in the store.</p>",
        shell(answer.command),
        f"<p>{browse}. Each run stores its resolved config and the versions of all packages as artifacts.</p>",
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
        parts.append(scroll(f'<table class="cells">{table}</table>', "Table of cells", "scroll tall"))
    limited = left_out(answer.lines, "a command on this page")
    told = f"Each of these commands trains the cells of one row, with the same keys as above.{limited}"
    parts.append(f"<h3>One row at a time</h3><p>{told}</p>")
    parts += [_alone(answer, row) for row in shown_rows(answer.lines)]
    return section("Reproduce", *parts)


def _facts(store: str, cells: Sequence[tuple[Trial, Result]]) -> dict[str, list[str]]:
    """What is told of each cell, as HTML."""
    untold = {"workers": "unknown", "git_commit": "unknown"}
    results = [result for _, result in cells]

    def tagged(name: str) -> list[str]:
        missing = untold.get(name, "see environment.txt of the run")
        return [escape(result.tags.get(f"san.{name}", missing)) for result in results]

    return {
        "key": [f"<code>{trial.key}</code>" for trial, _ in cells],
        "run": [_run_link(store, result) for result in results],
        "top-1, %": [f"{result.metrics['val/top1']:.2f}" for result in results],
        "minutes": [f"{result.seconds / 60:.1f}" for result in results],
        "images": [escape(trial.data_digest) for trial, _ in cells],
        "workers": tagged("workers"),
        "commit": [f"<code>{commit}</code>" for commit in tagged("git_commit")],
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
    commands = shell(row_alone(answer.grid, row, answer.trials, answer.overrides))
    return f"<details><summary>{escape(row)}</summary>{commands}</details>"


def row_alone(grid: Grid, row: str, trials: Sequence[Trial], overrides: Sequence[str]) -> str:
    """Shell commands that train one row's cells, from a grid of its own: the same cells, by content."""
    (mine,) = (one for one in grid.rows if one.id == row)
    layers = merged(grid.base.model_dump(), mine.model_dump(exclude={"id"}))
    seeds = [trial.seed for trial in trials if trial.row == row]
    asked = {"question": grid.question} | ({"robustness": grid.robustness} if grid.robustness else {})
    content = {**asked, "seeds": seeds, "rows": [{"id": row, **{key: v for key, v in layers.items() if v}}]}
    text = yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)
    profile = next(trial.profile for trial in trials if trial.row == row)
    file = f"{row}.yaml"
    command = shlex.join(["san", "run", file, "--profile", profile, *overrides])
    return f"cat > {shlex.quote(file)} <<'END'\n{text}END\n{command}"
