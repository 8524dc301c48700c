"""What a grid lacks, for `san plan` and `san run`: trials to train, in which order and for how long, and measurements."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from cluster import ClusterError, Resources, concurrency, this_machine
from experiments.config.config import flat
from experiments.config.grid import Trial
from experiments.evaluation.robustness import PROTOCOLS
from experiments.paper.tables import count, note_on_missing_rows
from experiments.runner.grid_run import GridRun, check_init, finished_trials, is_done, known_results
from experiments.runner.measure import MeasureTask
from experiments.runner.progress import duration, trial_count
from experiments.tracking import Result
from experiments.training.images import notes_on, open_data
from pipelines.datasets.dataset import counted
from san.models.san import SANSpec


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial of a plan."""

    row: str
    seed: int
    key: str
    finished: bool
    stopped_at: int | None
    """The epoch after which early stopping ended it."""
    hours: TimeEstimate | None
    """None if there is nothing to train."""
    params: int
    flops: int
    """As the paper counts them, of the model that is trained."""
    equal_to: str | None = None
    """The planned trial with the same key, which is trained instead."""


def plan(grid_run: GridRun) -> list[PlannedTrial]:
    """The finished and stopped trials, then those to train, in the order in which `run` starts them."""
    results = known_results(grid_run)
    done = [trial for trial in grid_run.selected if is_done(grid_run, results, trial)]
    alike: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in grid_run.selected:
        alike[trial.key].append(trial)
    planned = [_planned(trial, results[trial.key]) for trial in done]
    missing = to_train(grid_run, results)
    check_init(grid_run, (trial for trial, _ in missing))
    for first, hours in missing:
        planned.append(_planned(first, hours=hours))
        planned += [_planned(trial, equal_to=first.name) for trial in alike[first.key][1:]]  # trained once
    return planned


def _planned(
    trial: Trial, done: Result | None = None, hours: TimeEstimate | None = None, equal_to: str | None = None
) -> PlannedTrial:
    data = trial.config.data
    finished, stopped_at = (False, None) if done is None else (done.finished, done.stopped_at)
    counts = count(trial.config.model.spec(), data.size, len(open_data(data)[0].classes))
    size = counts.params, counts.flops_paper
    return PlannedTrial(trial.row, trial.seed, trial.key, finished, stopped_at, hours, *size, equal_to)


def to_train(grid_run: GridRun, results: Mapping[str, Result]) -> list[tuple[Trial, TimeEstimate]]:
    """The trials that are neither finished nor stopped, one for each key, with the hours that they are expected to take.

    In the order in which they start: the shortest first, so that results are available early.
    """
    missing: dict[str, Trial] = {}
    for trial in grid_run.selected:
        if not is_done(grid_run, results, trial):
            missing.setdefault(trial.key, trial)
    estimator = Estimator(results.values())
    trials = [(trial, estimator.hours(trial, *map(len, open_data(trial.config.data)))) for trial in missing.values()]
    return sorted(trials, key=lambda each: each[1].wall)


def missing_measurements(grid_run: GridRun, results: Mapping[str, Result]) -> dict[str, MeasureTask]:
    """What finished trials lack of the grid's protocol, by key; complete trials are left out."""
    tasks = {}
    if grid_run.grid.robustness is not None:
        for trial, result in finished_trials(grid_run.selected, results):
            if missing := PROTOCOLS[grid_run.grid.robustness].missing(result.metrics):
                epochs = result.epochs(trial.config.recipe.epochs)
                tasks[trial.key] = MeasureTask(grid_run.workspace, trial, result.run_id, missing, epochs)
    return tasks


def plan_in_words(grid_run: GridRun, planned: Sequence[PlannedTrial], address: str | None) -> tuple[list[str], bool]:
    """The number of trials to train, how many run at a time, their resources and the training time; and whether the trials can
    run."""
    from cluster.session import is_local, session  # imports Ray

    missing = [trial.hours for trial in planned if trial.hours is not None]
    first, *notes = images_in_words(grid_run)
    first += f": {trial_count(len(planned))}, {len(missing)} to train"
    lacking = note_on_missing_rows(grid_run.grid.table, (trial.row for trial in planned))
    beside = [*notes, *([f"compared with the paper's table `{grid_run.grid.table}`{lacking}"] if lacking else [])]
    if protocol := grid_run.grid.robustness:
        measured = len(missing) + len(missing_measurements(grid_run, known_results(grid_run)))
        beside.append(f"robustness (`{protocol}`): {trial_count(measured)} to measure")
    if not missing:
        return [first, *beside], True
    first += " in the order above"
    beside += _unequal_sizes(planned)
    local = is_local(address)
    with nullcontext(this_machine()) if local else session(address) as resources:
        try:
            at_once = min(concurrency(grid_run.placement, resources), len(missing))
        except ClusterError as error:
            return [first, *beside, f"cannot run here: {error}", *_in_hours(missing, None)], False
    nodes = len(resources.nodes)
    where = "this machine" if local else f"the cluster ({nodes} {'node' if nodes == 1 else 'nodes'})"
    return [
        first,
        *beside,
        f"{where} has {concurrency_in_words(grid_run, resources, at_once)}",
        *_in_hours(missing, at_once),
    ], True


def images_in_words(grid_run: GridRun) -> list[str]:
    """A grid, its profile and its images and classes; then notes on the images."""
    configs = dict.fromkeys(trial.config.data for trial in grid_run.trials)
    images = []
    for data in configs:
        train, val = open_data(data)
        number = f"{len(train):,} training and {len(val):,} validation images of {data.size}x{data.size} pixels"
        images.append(f"{number}, {counted(train.classes)}")
    first = f"grid {grid_run.name}, profile {grid_run.profile} ({' or '.join(dict.fromkeys(images))})"
    return [first, *dict.fromkeys(note for data in configs for note in notes_on(data))]


def _unequal_sizes(planned: Sequence[PlannedTrial]) -> list[str]:
    """A warning if rows are so different in size that their accuracies say little about anything else."""
    rows = {trial.row: (trial.params, trial.flops) for trial in planned}
    middle = [statistics.median_high(numbers) for numbers in zip(*rows.values(), strict=True)]
    far = [row for row, sizes in rows.items() if any(max(two) > 2 * min(two) for two in zip(sizes, middle, strict=True))]
    if not far:
        return []
    return [f"more than a factor of 2 from the grid's median in parameters or FLOPs: {', '.join(far)}"]


def concurrency_in_words(grid_run: GridRun, resources: Resources, at_once: int) -> str:
    concurrent = f"{trial_count(at_once)} at a time, {grid_run.placement} per trial"
    if resources.grows:
        return f"{resources} now: {concurrent}; the autoscaler may add nodes while trials wait"
    return f"{resources}: {concurrent}"


def _in_hours(hours: Sequence[TimeEstimate], at_once: int | None) -> list[str]:
    cpu, gpu, wall = (sum(getattr(each, unit) for each in hours) for unit in ("cpu", "gpu", "wall"))
    text = f"CPU time {duration(3600 * cpu)}" + (f", GPU time {duration(3600 * gpu)}" if gpu else "")
    if at_once:
        longest = duration(3600 * max(wall / at_once, max(each.wall for each in hours)))
        text = f"{longest} with {trial_count(at_once)} at a time ({text})"
    rough = sum(each.is_rough for each in hours)
    if rough:
        text += f"; a rough guess from FLOPs for {rough} of {trial_count(len(hours))} (may be off by a factor of 3)"
    return [f"training time: {text}"]


Setting = frozenset[tuple[str, str]]
SECTIONS = ("model.", "engine.", "resources.")
FIELDS = ("data.size", "recipe.batch_size", "recipe.grad_accum_steps", "recipe.precision")

RATES = {"attention": {"cpu": 2.5e9, "gpu": 1.2e12}, "other": {"cpu": 8e9, "gpu": 8e12}}
"""The paper's FLOPs per second of training on one core and on one GPU: of SANs, and of other networks (a ResNet26).
On a Xeon with the profile `cifar10`, and on an H200 with images of 224 x 224 pixels."""
SECONDS_PER_IMAGE = 5e-4
"""The part of the training time that does not depend on FLOPs, measured with the profile `digits`."""
VALIDATION_COST = 0.25
"""Time to validate an image over the time to train with it: 0.21 to 0.28 on one core, for SAN10 and ResNet26."""
START_SECONDS, GROUP_SECONDS = 2.0, 15.0
"""For a trial with one worker after the first, and for starting several workers in addition."""
LEAST_SECONDS = 10.0
"""Of training, for a speed to count: the first steps of a process are slow."""


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Hours that a trial takes: its start, training and validation."""

    wall: float
    cpu: float
    gpu: float
    is_rough: bool
    """Whether it follows from the FLOPs, because no run of the same model has trained for `LEAST_SECONDS`."""


class Estimator:
    """Estimates hours of training from finished runs."""

    def __init__(self, results: Iterable[Result]) -> None:
        trained: defaultdict[Setting, list[tuple[float, float]]] = defaultdict(list)
        for result in results:
            if result.finished and "summary/training_hours" in result.metrics:
                seconds = 3600 * result.metrics["summary/training_hours"]
                trained[_setting_of(result.params)].append((seconds, seconds * result.metrics["summary/images_per_second"]))
        sums = {setting: [sum(column) for column in zip(*measured, strict=True)] for setting, measured in trained.items()}
        self._speeds = {setting: images / seconds for setting, (seconds, images) in sums.items() if seconds >= LEAST_SECONDS}

    def hours(self, trial: Trial, train_images: int, val_images: int) -> TimeEstimate:
        """The time of a trial with these numbers of images per epoch."""
        config, resources = trial.config, trial.config.resources
        measured = self._speeds.get(_setting_of({key: str(value) for key, value in flat(trial.record).items()}))
        spec = config.model.spec()
        rate = RATES["attention" if isinstance(spec, SANSpec) else "other"]["gpu" if resources.gpus else "cpu"]
        seconds_per_image = SECONDS_PER_IMAGE + count(spec, config.data.size).flops_paper / rate
        speed = measured or resources.workers * (1 if resources.gpus else resources.cpus) / seconds_per_image
        epochs, validations = config.recipe.epochs, -(-config.recipe.epochs // config.recipe.validate_every_n_epochs)
        images = epochs * train_images + VALIDATION_COST * validations * val_images
        start = START_SECONDS + (GROUP_SECONDS if resources.workers > 1 else 0)
        wall = (start + images / speed) / 3600
        return TimeEstimate(
            wall, wall * resources.workers * resources.cpus, wall * resources.workers * resources.gpus, not measured
        )


def _setting_of(params: Mapping[str, str]) -> Setting:
    return frozenset((key, value) for key, value in params.items() if key.startswith(SECTIONS) or key in FIELDS)
