"""A grid under a profile, checked: everything that is known of it before anything runs."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster import Placement
from experiments.config.config import ModelConfig
from experiments.config.expand import expand, profile_path
from experiments.config.grid import Grid, GridRequest, Trial
from experiments.errors import UserError
from experiments.paper.tables import table_names
from experiments.runs.workspace import Workspace, has_runs, open_workspace
from experiments.tracking import Result
from experiments.training.fine_tuning import init_digest, initialize
from experiments.training.images import data_digest, loaders, open_data, without_writing
from san.choice import choices

if TYPE_CHECKING:
    from experiments.tracking.tracker import Tracker


LONGEST_SUFFIX = 100
"""Letters of the overrides in a name."""


@dataclass(frozen=True, slots=True)
class GridRun:
    """A grid under a profile, checked and expanded: everything that is known before anything runs."""

    request: GridRequest
    name: str
    profile: str
    grid: Grid
    trials: tuple[Trial, ...]
    full_size: Mapping[str, ModelConfig]
    """Each row's model at the paper's setting."""
    workspace: Workspace

    @property
    def changes(self) -> tuple[str, ...]:
        """The overrides that can change trials, sorted by key, so that their order does not matter."""
        found = (text for text in self.request.overrides if re.match(r"(model|data|recipe)\b", text))
        return tuple(sorted(found, key=lambda text: text.partition("=")[0]))

    @property
    def suffix(self) -> str:
        """The changes as part of a file name, as in `+recipe.lr=0.2`; empty without changes."""
        whole = "+".join(["", *self.changes])
        short = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", whole)[:LONGEST_SUFFIX]
        return short if short == whole else f"{short}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"

    @property
    def full_name(self) -> str:
        """Name of the claim and of the report's folder, as in `footprint-digits+recipe.lr=0.2`."""
        return f"{self.name}-{self.profile}{self.suffix}"

    @property
    def selected(self) -> tuple[Trial, ...]:
        """The trials of the rows in `--only`; without it, all."""
        only = self.request.only
        return tuple(trial for trial in self.trials if not only or trial.row in only)

    @property
    def tracker(self) -> Tracker:
        from experiments.tracking.tracker import Tracker  # imports MLflow, which a plan does not need if there are no runs

        return Tracker(self.workspace.tracking_uri, self.name, self.profile)

    @property
    def placement(self) -> Placement:
        """What each trial takes; a grid cannot change it from row to row."""
        resources = self.trials[0].config.resources
        return Placement(resources.workers, resources.cpus, resources.gpus)


def open_grid_run(request: GridRequest, writes: bool = True) -> GridRun:
    """Reads and checks everything that a grid needs: its file, every row, the images, the bucket if the runs are in one.

    With `writes` false, a missing embedded dataset is not written. Of `recipe.init`, only the digest is computed, for the keys;
    `check_init` loads the weights.

    Raises:
        UserError: mistakes in the grid, the profile and the overrides, with their places; a password in an address.
        DataError: images that cannot be used.
        StorageError: the bucket is not there, does not answer or does not take our credentials.
    """
    workspace = open_workspace(request.runs)
    workspace.store.check()
    grid, seeds = request.grid, request.seeds
    name, expanded = profile_path(request.profile).stem, expand(request, table_names())
    configs = expanded.configs
    for row in request.only:
        if row not in configs:
            raise UserError(f"--only {row}: {grid} has no such row; {choices('rows', row, configs)}")
    if not writes:
        configs = {row: config.model_copy(update={"data": without_writing(config.data)}) for row, config in configs.items()}
    # Once for the rows that differ in nothing that a loader looks at.
    apart = {(c.data, c.recipe.batch_size, c.recipe.grad_accum_steps, c.resources): (row, c) for row, c in configs.items()}
    for row, config in apart.values():
        try:
            loaders(config, seed=0, rank=0, world=config.resources.workers)
        except UserError as error:
            which = f"row {row}: " if len(apart) > 1 else ""
            (asked,) = (one for one in expanded.grid.rows if one.id == row)
            source = expanded.source_of(str(error).partition(":")[0], asked)
            raise UserError(f"{source}: {which}{error}") from None
    digests = {init: init_digest(init, workspace) for init in {config.recipe.init for config in configs.values()}}
    trials = tuple(
        Trial(grid.stem, name, row.id, seed, config, data_digest(config.data), digests[config.recipe.init], expanded.imports)
        for row in expanded.grid.rows
        for config in [configs[row.id]]
        for seed in (row.seeds or expanded.grid.seeds if seeds is None else range(seeds))
    )
    for scaling in dict.fromkeys(config.recipe.scaling for config in configs.values()):
        if scaling is not None:
            print_status(scaling)
    return GridRun(request, grid.stem, name, expanded.grid, trials, expanded.full_size, workspace)


def check_init(grid_run: GridRun, trials: Iterable[Trial]) -> None:
    """Loads the weights of `recipe.init` into a network of each kind, and prints a line about each.

    Raises:
        UserError: the weights do not fit.
    """
    request, done = grid_run.request, list[str]()
    configs = {trial.row: trial.config for trial in trials}
    tuned = {(repr(c.model), c.data, init, c.recipe.freeze): row for row, c in configs.items() if (init := c.recipe.init)}
    for (_, data, init, freeze), row in tuned.items():
        classes = open_data(data)[0].classes
        model = configs[row].model.spec().build(len(classes))
        try:
            done.append(initialize(model, init, None, grid_run.workspace, classes, freeze))
        except UserError as error:
            raise UserError(f"{request.grid}: row {row}: {error}") from None
    for text in dict.fromkeys(done):
        print_status(text)


def known_results(grid_run: GridRun) -> dict[str, Result]:
    """What is in the tracker already; a local database that does not exist yet is not made by looking."""
    return grid_run.tracker.results() if has_runs(grid_run.workspace.tracking_uri) else {}


def finished_results(grid_run: GridRun) -> dict[str, Result]:
    """What is in the tracker already.

    Raises:
        UserError: no trial is finished.
    """
    results, request = known_results(grid_run), grid_run.request
    if not any(is_finished(results, trial) for trial in grid_run.trials):
        raise UserError(
            f"no finished trial of grid {grid_run.name} with profile {grid_run.profile} in {grid_run.workspace.tracking_uri}; "
            "repeat the overrides with which it was trained, choose another store with --runs, or train the grid with "
            f"`{request.with_runs(request.command)}`"
        )
    return results


def is_finished(results: Mapping[str, Result], trial: Trial) -> bool:
    return trial.key in results and results[trial.key].finished


def finished_trials(trials: Sequence[Trial], results: Mapping[str, Result]) -> list[tuple[Trial, Result]]:
    """The finished trials with their results, in order."""
    with_result = [(trial, results[trial.key]) for trial in trials if trial.key in results]
    return [(trial, result) for trial, result in with_result if result.finished]


def is_done(grid_run: GridRun, results: Mapping[str, Result], trial: Trial) -> bool:
    """Whether nothing is to train: it is finished, or this grid's early stopping has stopped it."""
    stops = grid_run.grid.early_stopping is not None and trial.key in results and results[trial.key].stopped_at is not None
    return stops or is_finished(results, trial)


def print_status(text: str) -> None:
    """Prints a line on stderr, because stdout is for the table."""
    print(text, file=sys.stderr, flush=True)
