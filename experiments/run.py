"""A grid, from plan to table."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cluster import ClusterError, Placement, concurrency
from experiments.claims import WhileClaimed, claimed_cells, in_turn
from experiments.config import ModelConfig
from experiments.errors import UserError
from experiments.estimate import Hours, Speeds
from experiments.grid import Grid, Trial, expand
from experiments.progress import Progress
from experiments.report import figures, table
from experiments.report.paper import counts_at_paper_setting, paper_claims, paper_rows, table_names
from experiments.report.study import section_of, write_study
from experiments.storage import Lease, StorageError
from experiments.tracking import PATIENCE, PAUSE, Result, TrackerError
from experiments.trial import data_digest, loaders, open_data, run_trial
from experiments.workspace import Workspace, open_workspace
from pipelines import DataError

if TYPE_CHECKING:
    from cluster.sweep import Outcome
    from experiments.tracking.tracker import Tracker

GRIDS_DIR = Path(__file__).parent / "grids"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A grid under a profile, checked and expanded: everything that is known before anything runs."""

    name: str
    profile: str
    grid: Grid
    trials: tuple[Trial, ...]
    full_size: Mapping[str, ModelConfig]
    """Each row's model at the paper's setting."""
    workspace: Workspace

    @property
    def tracker(self) -> Tracker:
        from experiments.tracking.tracker import Tracker  # brings MLflow, which a plan without runs can do without

        return Tracker(self.workspace.tracking_uri, self.name, self.profile)

    @property
    def placement(self) -> Placement:
        """What each cell takes; a grid cannot change it from row to row."""
        wanted = self.trials[0].config.placement
        return Placement(wanted.workers, wanted.cpus, wanted.gpus)


def has_store(uri: str) -> bool:
    """Whether anything can have been tracked there: a server, or a database that exists."""
    return not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).exists()


def open_job(
    path: Path, profile: str, overrides: Sequence[str], runs: str | Path | None = None, seeds: int | None = None
) -> Job:
    """Reads and checks everything that a grid needs: its file, every row, the images, the bucket where it is to be kept in one.

    With `seeds`, 0 to seeds - 1 come instead of the grid's.

    Raises:
        UserError: all mistakes in the grid, the profile and the overrides, with their places; a password in an address.
        DataError: images that cannot be used.
        StorageError: the bucket is not there, does not answer or does not take our credentials.
    """
    workspace = open_workspace(runs)
    if workspace.bucket is not None:
        workspace.bucket.check()
    expanded = expand(path, profile, overrides, table_names())
    # Once for the rows that differ in nothing that a loader looks at.
    apart = {(c.data, c.recipe.batch, c.recipe.accumulate, c.placement): c for c in expanded.configs.values()}
    for config in apart.values():
        loaders(config, seed=0, rank=0, world=config.placement.workers)
    trials = tuple(
        Trial(path.stem, profile, row, seed, config, data_digest(config.data))
        for row, config in expanded.configs.items()
        for seed in (expanded.grid.seeds if seeds is None else range(seeds))
    )
    for scaling in dict.fromkeys(config.recipe.scaling for config in expanded.configs.values()):
        if scaling is not None:
            _say(scaling)
    return Job(path.stem, profile, expanded.grid, trials, expanded.full_size, workspace)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a plan."""

    row: str
    seed: int
    key: str
    finished: bool
    hours: Hours | None
    """None where it is finished, and where no finished run is like it."""


def plan(job: Job) -> list[Cell]:
    """The cells in order, each with its content hash and whether it is finished. Trains and tracks nothing."""
    results = known_results(job)
    speeds = Speeds(results.values())
    cells, met = [], set()
    for trial in job.trials:
        finished = _is_finished(results, trial)
        trains = not finished and trial.key not in met  # equal cells are trained once
        met.add(trial.key)
        hours = speeds.hours(trial, len(open_data(trial.config.data)[0])) if trains else None
        cells.append(Cell(trial.row, trial.seed, trial.key, finished, hours))
    return cells


def plan_in_words(job: Job, cells: Sequence[Cell], address: str | None) -> list[str]:
    """How many cells there are to train, how many at a time, what each takes, and for how long."""
    from cluster.session import session, this_machine  # brings Ray

    missing = {cell.key: cell for cell in reversed(cells) if not cell.finished}  # the first of equal ones has the hours
    first = f"grid {job.name}, profile {job.profile}: {len(cells)} cells, {len(missing)} to train"
    if not missing:
        return [first]
    first += ", in this order"
    here = this_machine if address is None and "RAY_ADDRESS" not in os.environ else None
    with nullcontext(here()) if here else session(address) as resources:
        try:
            at_once = min(concurrency(job.placement, resources), len(missing))
        except ClusterError as error:
            return [first, f"cannot run here: {error}", *_in_hours(missing.values(), None)]
    where = "this machine" if here else f"the cluster ({len(resources.nodes)} nodes)"
    room = f"{where} has {resources.cpus} CPUs and {resources.gpus} GPUs: {at_once} cells at a time, {job.placement} per cell"
    return [first, room, *_in_hours(missing.values(), at_once)]


def _in_hours(missing: Collection[Cell], at_once: int | None) -> list[str]:
    known = [cell.hours for cell in missing if cell.hours is not None]
    if not known:
        return ["time: not known, no finished run has the same model, size and placement"]
    cpu, gpu, wall = (sum(getattr(hours, unit) for hours in known) for unit in ("cpu", "gpu", "wall"))
    text = f"training, by the speed of finished runs like them: {cpu:.3g} CPU-hours and {gpu:.3g} GPU-hours"
    if at_once is not None:
        text += f", {max(wall / at_once, max(hours.wall for hours in known)):.3g} hours with {at_once} at a time"
    unknown = len(missing) - len(known)
    return [text + (f"; {unknown} cells of models, sizes or placements not met before are not counted" if unknown else "")]


def run(job: Job, address: str | None) -> bool:
    """Trains what is missing, prints the table, draws the plot. Returns whether every cell is finished.

    Raises:
        UserError, ClusterError: what is asked for cannot be had here; nothing has been written then.
        KeyboardInterrupt: stopped by the user; the next call continues.
    """
    results = known_results(job)
    unfinished = [trial for trial in job.trials if not _is_finished(results, trial)]
    missing: dict[str, Trial] = {}
    for trial in unfinished:
        missing.setdefault(trial.key, trial)
    done, equal = len(job.trials) - len(unfinished), len(unfinished) - len(missing)
    found = f", {done} finished before (taken from MLflow)" if done else ""
    found += f", {equal} equal to another" if equal else ""
    _say(f"grid {job.name}, profile {job.profile}: {len(job.trials)} cells{found}, {len(missing)} to train")
    if not missing:
        return show(job, results)[1]
    try:
        trained = _train(job, missing, address)
        results = _patiently(lambda: known_results(job))
        unsent = [missing[key].name for key in trained if not _is_finished(results, missing[key])]
        if unsent:
            _say(f"{', '.join(unsent)}: trained, but MLflow did not take everything; the same command sends the rest")
        files, complete = show(job, results)
        _patiently(lambda: job.tracker.log_report(files, complete))
    except TrackerError as error:
        raise TrackerError(
            f"{error}\nwhat was trained is kept; the same command continues and sends what MLflow lacks"
        ) from None
    return complete


def study(profile: str, seeds: int, runs: str | Path | None, address: str | None, page: Path) -> bool:
    """Trains what is missing of the paper's ablation tables and writes what of them shows; returns whether all is finished.

    Raises: as `open_job` and `run` do, before anything is trained.
    """
    _make(page.parent)
    if page.is_dir() or not os.access(page.parent, os.W_OK):
        raise UserError(f"{page}: cannot be written; name another file with --page")
    jobs = [open_job(GRIDS_DIR / f"{name}.yaml", profile, (), runs, seeds) for name in paper_claims()]
    complete = all([run(job, address) for job in jobs])
    train, val = open_data(jobs[0].trials[0].config.data)
    sections = [section_of(job.grid, job.trials, known_results(job)) for job in jobs]
    files = write_study(sections, page, len(train), len(val))
    _say(f"study: {files[0]}")
    return complete


def known_results(job: Job) -> dict[str, Result]:
    """What is in the tracker already; a local database that does not exist yet is not made by looking."""
    if not has_store(job.workspace.tracking_uri):
        return {}
    job.tracker.check()
    return job.tracker.results()


def _is_finished(results: Mapping[str, Result], trial: Trial) -> bool:
    return trial.key in results and results[trial.key].finished


def _patiently(ask: Callable[[], T]) -> T:
    """What the tracker or the bucket answers, within `PATIENCE` seconds; after hours of training it may be away just now."""
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except (TrackerError, StorageError):
            if time.monotonic() > limit:
                raise
            time.sleep(PAUSE)


def _train(job: Job, missing: dict[str, Trial], address: str | None) -> list[str]:
    """Trains the cells that no other process is training; returns the keys of those that came to their end."""
    from cluster.session import session  # brings Ray

    start = time.monotonic()
    with session(address) as resources:
        at_once = min(concurrency(job.placement, resources), len(missing))
        _say(f"{resources.cpus} CPUs and {resources.gpus} GPUs: {at_once} cells at a time, {job.placement} per cell")
        with claimed_cells(job.workspace, f"{job.name}-{job.profile}", missing) as (claimed, claim):
            others = [trial.name for key, trial in missing.items() if key not in claimed]
            if others:
                _say(f"{', '.join(others)}: left to another `san run`, which is training the same")
            results = known_results(job)  # another run may have finished some before they could be claimed
            claimed = {key: trial for key, trial in claimed.items() if not _is_finished(results, trial)}
            outcomes = _sweep(job, claimed, claim)
            for key, outcome in outcomes.items():
                if outcome.error is not None:
                    _keep_story(job, missing[key], outcome.traceback)
                    run_id = job.workspace.run_id(missing[key])
                    _patiently(functools.partial(job.tracker.failed, missing[key], run_id, outcome.error))
    trained = [key for key, outcome in outcomes.items() if outcome.error is None]
    _say(f"trained {len(trained)} cells in {time.monotonic() - start:.0f} s")
    return trained


def _sweep(job: Job, missing: dict[str, Trial], claim: Lease | None) -> dict[str, Outcome]:
    from cluster.sweep import sweep  # brings Ray Tune and Train

    with in_turn(job.workspace, "store"):  # two grids may be the first in a store
        job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    names = {key: trial.name for key, trial in missing.items()}
    progress = Progress(names, {key: trial.config.recipe.epochs for key, trial in missing.items()}, sys.stderr)
    train = functools.partial(run_trial, job.workspace)
    try:
        with _sweep_storage(job.workspace, f"{job.name}-{job.profile}") as storage:
            return sweep(
                train,
                missing,
                job.placement,
                storage=storage,
                observer=progress if claim is None else WhileClaimed(progress, claim),
                final=(UserError, DataError, FloatingPointError),
                patience=job.trials[0].config.reliability.patience,
            )
    except KeyboardInterrupt:
        with suppress(TrackerError):
            job.tracker.interrupted((trial, job.workspace.run_id(trial)) for trial in missing.values())
        raise
    finally:
        progress.close()


@contextmanager
def _sweep_storage(workspace: Workspace, name: str) -> Iterator[Path | str]:
    """Where a sweep leaves what only it needs; a killed run leaves its own."""
    path = workspace.runs / "sweeps" / name
    if workspace.bucket is None:
        shutil.rmtree(path, ignore_errors=True)
        yield path
        return
    workspace.bucket.remove_folder(workspace.name(path))
    yield workspace.place(path)
    with suppress(StorageError):
        workspace.bucket.remove_folder(workspace.name(path))


def _keep_story(job: Job, trial: Trial, story: str) -> None:
    workspace = job.workspace
    path = workspace.runs / "failures" / f"{trial.name}-{trial.key}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(story, encoding="utf-8")
    _patiently(lambda: workspace.keep(path))
    log = workspace.place(workspace.log(trial, node="*"))
    _say(f"{trial.name}: the whole error is in {workspace.place(path)}, what it said before in {log}")


def table_of(job: Job, results: Mapping[str, Result]) -> list[table.Line]:
    """The table of what is finished."""
    printed = paper_rows(job.grid.table) if job.grid.table else {}
    return table.lines(job.grid, job.trials, results, printed, counts_at_paper_setting(job.full_size))


def show(job: Job, results: Mapping[str, Result]) -> tuple[list[Path], bool]:
    """Prints the table of what is finished and writes it beside the plot; returns the files, and whether all is finished."""
    lines = table_of(job, results)
    folder = job.workspace.runs / f"{job.name}-{job.profile}"
    _make(folder)
    files = [folder / "table.md", folder / "table.csv"]
    files[0].write_text(f"{_caption(job)}\n\n{table.as_markdown(lines)}\n", encoding="utf-8")
    files[1].write_text(table.as_csv(lines), encoding="utf-8")
    print(f"\n{_caption(job)}\n\n{table.as_text(lines)}\n", flush=True)
    if any(line.top1 is not None for line in lines):
        files.append(folder / "plot.png")
        figures.draw(job.grid.plot, job.trials, lines, job.grid.question, files[-1])
        _say(f"plot: {job.workspace.place(files[-1])}")
    for file in files:
        _patiently(functools.partial(job.workspace.keep, file))
    _say(f"browse the runs: {_command()} ui")
    unfinished = [trial.name for trial in job.trials if not _is_finished(results, trial)]
    if unfinished:
        _say(f"not finished: {', '.join(unfinished)}; the same command continues")
    return files, not unfinished


def _command() -> str:
    """How to call `san` from here."""
    beside = Path(sys.executable).parent / "san"
    on_path = shutil.which("san")
    return "san" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from None


def _caption(job: Job) -> str:
    epochs = job.trials[0].config.recipe.epochs
    paper = f" Paper: ImageNet, table `{job.grid.table}`." if job.grid.table else ""
    return (
        f"{job.grid.question}{paper} Ours: profile `{job.profile}`, {epochs} epochs; params and FLOPs at the paper's setting."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
