"""A grid, from plan to table."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cluster import ClusterError, Placement, Resources, concurrency
from experiments.claims import WhileClaimed, claimed_cells, in_turn
from experiments.config import PROJECT_DIR, ModelConfig
from experiments.errors import UserError
from experiments.estimate import Costs, Hours
from experiments.grid import Grid, Trial, expand
from experiments.progress import Progress
from experiments.report import figures, table
from experiments.report.page import CURVES, Answer, page, shown_rows
from experiments.report.paper import counts_at_paper_setting, paper_claims, paper_numbers, paper_rows, table_names
from experiments.report.study import section_of, write_study
from experiments.robustness import PROTOCOLS
from experiments.robustness import table as robust
from experiments.robustness.cells import Watch, Work, measure, works
from experiments.storage import Lease, StorageError
from experiments.summary import read_top1
from experiments.tracking import PATIENCE, PAUSE, Result, TrackerError
from experiments.trial import data_digest, loaders, open_data, run_trial
from experiments.workspace import Workspace, open_workspace
from pipelines import DataError

if TYPE_CHECKING:
    from cluster.halving import Judge
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
    overrides: tuple[str, ...]
    command: str
    """The `san run` that was, or would be, asked for."""

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
    command = _run_command(path, profile, overrides, seeds)
    return Job(path.stem, profile, expanded.grid, trials, expanded.full_size, workspace, tuple(overrides), command)


def _run_command(path: Path, profile: str, overrides: Sequence[str], seeds: int | None) -> str:
    """What to type in the project's folder."""
    whole = path.resolve()
    grid = whole.relative_to(PROJECT_DIR) if whole.is_relative_to(PROJECT_DIR) else path
    chosen = [] if seeds is None else ["--seeds", str(seeds)]
    return shlex.join(["san", "run", str(grid), "--profile", profile, *chosen, *overrides])


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
    done = [trial for trial in job.trials if _is_done(job, results, trial)]
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
        if not _is_done(job, results, trial):
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
    return [first, f"{where} has {_room(job, resources, at_once)}", *_in_hours(missing.values(), at_once)]


def _room(job: Job, resources: Resources, at_once: int) -> str:
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


def run(job: Job, address: str | None) -> bool:
    """Trains what is missing, prints the table, draws the plot. Returns whether every cell is finished.

    Raises:
        UserError, ClusterError: what is asked for cannot be had here; nothing has been written then.
        KeyboardInterrupt: stopped by the user; the next call continues.
    """
    results = known_results(job)
    missing = {trial.key: trial for trial, _ in to_train(job, results)}
    done = sum(_is_finished(results, trial) for trial in job.trials)
    stopped = sum(_is_done(job, results, trial) for trial in job.trials) - done
    equal = len(job.trials) - done - stopped - len(missing)
    found = f", {done} finished before (taken from MLflow)" if done else ""
    found += f", {stopped} stopped before" if stopped else ""
    found += f", {equal} equal to another" if equal else ""
    _say(f"grid {job.name}, profile {job.profile}: {len(job.trials)} cells{found}, {len(missing)} to train")
    if not missing and not _to_measure(job, results):
        return show(job, results)[1]
    try:
        trained = _train(job, missing, address) if missing else []
        results = _patiently(lambda: known_results(job))
        unsent = [missing[key].name for key in trained if not _is_done(job, results, missing[key])]
        if unsent:
            _say(f"{', '.join(unsent)}: trained, but MLflow did not take everything; the same command sends the rest")
        if to_measure := _to_measure(job, results):
            _measure(job, to_measure, address)
            results = _patiently(lambda: known_results(job))
        files, complete = show(job, results)
        _patiently(lambda: job.tracker.log_report(files, complete))
        _patiently(lambda: job.tracker.describe(_note(job, results)))
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


def finished_results(job: Job) -> dict[str, Result]:
    """What is in the tracker already.

    Raises:
        UserError: no cell is finished.
    """
    results = known_results(job)
    if not any(_is_finished(results, trial) for trial in job.trials):
        raise UserError(
            f"no cell of grid {job.name} under profile {job.profile} is finished in {job.workspace.tracking_uri}; "
            f"train it with `{job.command}`, or name another store with --runs"
        )
    return results


def _is_finished(results: Mapping[str, Result], trial: Trial) -> bool:
    return trial.key in results and results[trial.key].finished


def _is_done(job: Job, results: Mapping[str, Result], trial: Trial) -> bool:
    """Whether nothing is to train: it is finished, or this grid's early stopping has stopped it."""
    stops = job.grid.early_stopping is not None and trial.key in results and results[trial.key].stopped_at is not None
    return stops or _is_finished(results, trial)


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
        _say(_room(job, resources, at_once))
        with claimed_cells(job.workspace, f"{job.name}-{job.profile}", missing) as (claimed, claim):
            others = [trial.name for key, trial in missing.items() if key not in claimed]
            if others:
                _say(f"{', '.join(others)}: left to another `san run`, which is training the same")
            results = known_results(job)  # another run may have finished some before they could be claimed
            claimed = {key: trial for key, trial in claimed.items() if not _is_done(job, results, trial)}
            with _early_stopping(job, results) as goes_on:
                outcomes = _sweep(job, claimed, claim, goes_on)
            for key, outcome in outcomes.items():
                if outcome.error is not None:
                    _keep_story(job, missing[key], outcome.traceback)
                    run_id = job.workspace.run_id(missing[key])
                    _patiently(functools.partial(job.tracker.failed, missing[key], run_id, outcome.error))
    trained = [key for key, outcome in outcomes.items() if outcome.error is None]
    _say(f"trained {len(trained)} cells in {time.monotonic() - start:.0f} s")
    return trained


@contextmanager
def _early_stopping(job: Job, results: Mapping[str, Result]) -> Iterator[Judge | None]:
    """Who tells the cells whether they go on, where the grid wants that; cells of earlier calls count too."""
    wanted = job.grid.early_stopping
    if wanted is None:
        yield None
        return
    from cluster.halving import Halving, judge  # brings Ray Tune

    halving = Halving(wanted.grace_epochs, wanted.reduction, job.trials[0].config.recipe.epochs)
    before = [trial for trial in job.trials if _is_done(job, results, trial)]
    summaries = {trial.key: job.workspace.checkpoints(trial) / "summary.csv" for trial in before}
    for summary in summaries.values():
        job.workspace.bring(summary)
    known = {key: read_top1(summary) for key, summary in summaries.items()}
    with judge(halving, known) as goes_on:
        yield goes_on


def _prepare(job: Job) -> None:
    """The grid's place in the store."""
    with in_turn(job.workspace, "store"):  # two grids may be the first in a store
        job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
        job.tracker.describe(_note(job, {}))


def _sweep(job: Job, missing: dict[str, Trial], claim: Lease | None, goes_on: Judge | None) -> dict[str, Outcome]:
    from cluster.sweep import sweep  # brings Ray Tune and Train

    _prepare(job)
    names = {key: trial.name for key, trial in missing.items()}
    progress = Progress(names, {key: trial.config.recipe.epochs for key, trial in missing.items()}, sys.stderr)
    train = functools.partial(run_trial, job.workspace, goes_on=goes_on)
    try:
        with _sweep_storage(job.workspace, f"{job.name}-{job.profile}") as storage:
            return sweep(
                train,
                missing,
                job.placement,
                storage=storage,
                observer=progress if claim is None else WhileClaimed(progress, claim),
                progress="epoch",
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


def _to_measure(job: Job, results: Mapping[str, Result]) -> dict[str, Work]:
    """What finished cells lack of the numbers of the grid's protocol."""
    finished = [(trial, results[trial.key]) for trial in job.trials if _is_finished(results, trial)]
    return works(job.workspace, job.grid.robustness, finished) if job.grid.robustness else {}


def _measure(job: Job, missing: dict[str, Work], address: str | None) -> None:
    """Takes trained cells through the grid's protocol; each number is tracked as it comes."""
    from cluster.session import session  # brings Ray
    from cluster.sweep import sweep

    start, placement, name = time.monotonic(), replace(job.placement, workers=1), f"{job.name}-{job.profile}"

    def keep(work: Work, metrics: dict[str, float]) -> None:
        _patiently(lambda: job.tracker.add(work.run_id, metrics))

    trials = {key: work.trial for key, work in missing.items()}
    with session(address) as resources, claimed_cells(job.workspace, name, trials) as (claimed, claim):
        values = {key: missing[key] for key in claimed}
        at_once = min(concurrency(placement, resources), len(values))
        _say(f"{job.grid.robustness}: {len(values)} cells to measure, {at_once} at a time, {placement} per cell")
        _prepare(job)
        watch = Watch(values, keep, sys.stderr)
        observer = watch if claim is None else WhileClaimed(watch, claim)
        try:
            with _sweep_storage(job.workspace, name) as storage:
                final = (UserError, DataError)
                outcomes = sweep(measure, values, placement, storage=storage, observer=observer, final=final)
        finally:
            watch.close()
    failed = [key for key, outcome in outcomes.items() if outcome.error is not None]
    for key in failed:
        _keep_story(job, missing[key].trial, outcomes[key].traceback)
    _say(f"measured {len(outcomes) - len(failed)} cells in {time.monotonic() - start:.0f} s")


def _keep_story(job: Job, trial: Trial, story: str) -> None:
    workspace = job.workspace
    path = workspace.runs / "failures" / f"{trial.name}-{trial.key}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(story, encoding="utf-8")
    _patiently(lambda: workspace.keep(path))
    log = workspace.place(workspace.log(trial, node="*"))
    _say(f"{trial.name}: the whole error is in {workspace.place(path)}, what it said before in {log}")


def robustness_of(job: Job, results: Mapping[str, Result]) -> list[robust.Cell]:
    """The table of a grid that names a protocol."""
    assert job.grid.robustness is not None
    paper = paper_numbers(job.grid.table) if job.grid.table else {}
    return robust.cells_of_grid(PROTOCOLS[job.grid.robustness], job.trials, results, paper)


def table_of(job: Job, results: Mapping[str, Result]) -> list[table.Line]:
    """The table of what is finished."""
    printed = paper_rows(job.grid.table) if job.grid.table else {}
    return table.lines(job.grid, job.trials, results, printed, counts_at_paper_setting(job.full_size))


def show(job: Job, results: Mapping[str, Result]) -> tuple[list[Path], bool]:
    """Prints the table of what is finished and writes it beside the plot; returns the files, and whether nothing is left."""
    folder = job.workspace.runs / f"{job.name}-{job.profile}"
    _make(folder)
    files = [folder / "table.md", folder / "table.csv"]
    forms, lines = tables(job, results), table_of(job, results)
    files[0].write_text(f"{_caption(job)}\n\n{forms['markdown']}\n", encoding="utf-8")
    files[1].write_text(forms["csv"], encoding="utf-8")
    print(f"\n{_caption(job)}\n\n{forms['text']}\n", flush=True)
    if any(line.top1 is not None for line in lines):
        if not job.grid.robustness:
            files.append(folder / "plot.png")
            figures.draw(job.grid.plot, job.trials, lines, job.grid.question, files[-1])
            _say(f"plot: {job.workspace.place(files[-1])}")
        files.append(folder / "report.html")
        write_page(job, results, files[-1])
    for file in files:
        _patiently(functools.partial(job.workspace.keep, file))
    _say(f"browse the runs: {_command()} ui")
    stopped = [trial.name for trial in job.trials if _is_done(job, results, trial) and not _is_finished(results, trial)]
    if stopped:
        _say(f"stopped early: {', '.join(stopped)}; without early_stopping in the grid the same command continues them")
    to_measure = _to_measure(job, results)
    unfinished = [trial.name for trial in job.trials if not _is_done(job, results, trial) or trial.key in to_measure]
    if unfinished:
        _say(f"not finished: {', '.join(unfinished)}; the same command continues")
    return files, not unfinished


def write_page(job: Job, results: Mapping[str, Result], path: Path) -> None:
    """Writes the answer as an HTML page; a cell that is not finished has curves too.

    Raises:
        UserError: the file cannot be written.
    """
    lines = table_of(job, results)
    shown, curves = shown_rows(lines), {}
    for trial in job.trials:
        if trial.key in results and trial.row in shown:
            run_id = results[trial.key].run_id
            ask = functools.partial(job.tracker.history, run_id)
            curves[trial.key] = {metric: _patiently(functools.partial(ask, metric)) for metric in CURVES}
    text = page(
        Answer(
            grid=job.grid,
            name=job.name,
            caption=_setting(job),
            command=job.command,
            overrides=job.overrides,
            trials=job.trials,
            results=results,
            lines=lines,
            curves=curves,
            store=job.workspace.tracking_uri,
        )
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the page cannot be written ({error.strerror}); name another file") from None
    _say(f"report: {path}")


def tables(job: Job, results: Mapping[str, Result]) -> dict[str, str]:
    """The grid's table in each of its forms: text, markdown, latex, csv."""
    if job.grid.robustness:
        cells = robustness_of(job, results)
        return {name: form(cells) for name, form in robust.FORMS.items()}
    lines = table_of(job, results)
    return {name: form(lines) for name, form in table.FORMS.items()}


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
    return f"{job.grid.question} {_setting(job)}"


def _note(job: Job, results: Mapping[str, Result]) -> str:
    """What MLflow shows of the grid, as Markdown."""
    return f"**{job.grid.question}** {_setting(job)}\n\n{tables(job, results)['markdown']}"


def _setting(job: Job) -> str:
    epochs = job.trials[0].config.recipe.epochs
    paper = f"Paper: ImageNet, table `{job.grid.table}`. " if job.grid.table else ""
    ours = f"Ours: profile `{job.profile}`, {epochs} epochs"
    if job.grid.robustness:
        return f"{PROTOCOLS[job.grid.robustness].caption} {paper}{ours}."
    return f"{paper}{ours}; params and FLOPs at the paper's setting."


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
