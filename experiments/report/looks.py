"""What the report shows of attention: `san show`'s look at a few of a grid's finished networks, at the same pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from experiments.evaluation.evaluate import open_checkpoint, open_images, reach
from experiments.grids.grid import Trial
from experiments.report.page import MOST_LOOKS, Look
from experiments.report.show import look
from experiments.runs.workspace import Workspace
from experiments.tracking import Result
from experiments.training.checkpoint import DAMAGE, last_of
from san.models.san import SANSpec


def of_each_kind(cells: Sequence[tuple[Trial, Result]]) -> list[Trial]:
    """Of finished cells the best by top-1 of each kind of attention and relation, in order; `MOST_LOOKS` at most, the best of
    every kind before the second best of any."""
    best: dict[tuple[type[SANSpec], str | None], Trial] = {}
    for trial, _ in sorted(cells, key=lambda cell: -cell[1].metrics["val/top1"]):
        spec = trial.config.model.spec()
        if isinstance(spec, SANSpec):
            best.setdefault((type(spec), getattr(spec, "relation", None)), trial)
    seen: Counter[type[SANSpec]] = Counter()
    places = []
    for (kind, _), trial in best.items():
        places.append((seen[kind], trial))
        seen[kind] += 1
    chosen = [trial for _, trial in sorted(places, key=lambda place: place[0])[:MOST_LOOKS]]
    return [trial for trial, _ in cells if trial in chosen]


def look_at_cells(workspace: Workspace, cells: Sequence[tuple[Trial, Result]]) -> list[Look]:
    """How the networks of some finished cells (`of_each_kind`) weigh the footprint of the pixel in the middle of the validation
    image in the middle; of one that cannot be looked at, why."""
    return [_look_at(workspace, trial) for trial in of_each_kind(cells)]


def _look_at(workspace: Workspace, trial: Trial) -> Look:
    place = workspace.uri(last_of(workspace.checkpoints(trial), trial.config.recipe.epochs))
    try:
        with reach(place, workspace.runs) as (path, _):
            opened = replace(open_checkpoint(path), config=trial.config)
        images = open_images(opened)
        number = len(images) // 2
        return Look(trial, place, number, look(opened, images.only([number])))
    except DAMAGE as error:  # UserError, DataError and StorageError are; a report does not fail for want of a picture
        return Look(trial, place, 0, " ".join(str(error).split()) or type(error).__name__)
