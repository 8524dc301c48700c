"""What a grid would train: which cells, in which order, how many at a time, for how long. Trains and tracks nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from cluster import ClusterError, Resources, concurrency
from experiments.estimate import Costs, Hours
from experiments.grid import Trial
from experiments.images import open_data
from experiments.job import Job, is_done, known_results
from experiments.report.paper import unprinted
from experiments.tracking import Result


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a plan."""

    row: str
    seed: int
    key: str
    finished: bool
    stopped_at: int | None
    """The epoch after which early stopping ended it."""
    hours: Hours | None
    """None where nothing is to train, and where no finished run is like it."""


def plan(job: Job) -> list[Cell]:
    """The cells, each with its content hash: finished and stopped ones, then those to train, as `run` would start them. Trains
    and tracks nothing."""
    results = known_results(job)
    done = [trial for trial in job.trials if is_done(job, results, trial)]
    alike: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in job.trials:
        alike[trial.key].append(trial)
    cells = []
    for trial in done:
        result = results[trial.key]
        cells.append(Cell(trial.row, trial.seed, trial.key, result.finished, result.stopped_at, None))
    for first, hours in to_train(job, results):
        for trial in alike[first.key]:  # equal cells are trained once
            cells.append(Cell(trial.row, trial.seed, trial.key, False, None, hours if trial is first else None))
    return cells


def to_train(job: Job, results: Mapping[str, Result]) -> list[tuple[Trial, Hours | None]]:
    """The cells that are neither finished nor stopped, one for each key, with their hours where those are known.

    In the order in which they start: what takes least comes first, for its answer comes soonest.
    """
    missing: dict[str, Trial] = {}
    for trial in job.trials:
        if not is_done(job, results, trial):
            missing.setdefault(trial.key, trial)
    costs = Costs(results.values())
    found = []
    for trial in missing.values():
        images = len(open_data(trial.config.data)[0])
        hours = costs.speeds.hours(trial, images)
        found.append((costs.hours(trial, hours, images), trial, hours))
    return [(trial, hours) for _, trial, hours in sorted(found, key=lambda each: each[0])]


def plan_in_words(job: Job, cells: Sequence[Cell], address: str | None) -> list[str]:
    """How many cells there are to train, how many at a time, what each takes, and for how long."""
    from cluster.session import session, this_machine  # brings Ray

    missing = {cell.key: cell for cell in reversed(cells) if not _is_settled(cell)}  # the first of equal ones has the hours
    first = f"grid {job.name}, profile {job.profile}: {len(cells)} cells, {len(missing)} to train"
    lacking = unprinted(job.grid.table, (cell.row for cell in cells))
    beside = [f"compared with the paper's table `{job.grid.table}`{lacking}"] if lacking else []
    if not missing:
        return [first, *beside]
    first += ", in this order"
    here = this_machine if address is None and not os.environ.get("RAY_ADDRESS") else None
    with nullcontext(here()) if here else session(address) as resources:
        try:
            at_once = min(concurrency(job.placement, resources), len(missing))
        except ClusterError as error:
            return [first, *beside, f"cannot run here: {error}", *_in_hours(missing.values(), None)]
    nodes = len(resources.nodes)
    where = "this machine" if here else f"the cluster ({nodes} {'node' if nodes == 1 else 'nodes'})"
    return [first, *beside, f"{where} has {room(job, resources, at_once)}", *_in_hours(missing.values(), at_once)]


def room(job: Job, resources: Resources, at_once: int) -> str:
    now = f"{resources.cpus} CPUs and {resources.gpus} GPUs"
    room = f"{at_once} cells at a time, {job.placement} per cell"
    if resources.grows:
        return f"{now} now: {room}; its autoscaler adds nodes while cells wait, Ray does not tell how many"
    return f"{now}: {room}"


def _is_settled(cell: Cell) -> bool:
    return cell.finished or cell.stopped_at is not None


def _in_hours(missing: Collection[Cell], at_once: int | None) -> list[str]:
    known = [cell.hours for cell in missing if cell.hours is not None]
    if not known:
        return ["time: not known, no finished run has the same model, size and placement"]
    cpu, gpu, wall = (sum(getattr(hours, unit) for hours in known) for unit in ("cpu", "gpu", "wall"))
    text = f"training, by the speed of finished runs like them: {cpu:.3g} CPU-hours and {gpu:.3g} GPU-hours"
    if at_once:
        text += f", {max(wall / at_once, max(hours.wall for hours in known)):.3g} hours with {at_once} at a time"
    unknown = len(missing) - len(known)
    return [text + (f"; {unknown} cells of models, sizes or placements not met before are not counted" if unknown else "")]
