"""What a user asks for with `san run` and the commands beside it: a grid under a profile."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from experiments.grids.config import PROJECT_DIR


@dataclass(frozen=True, slots=True)
class GridRequest:
    """A grid as it was asked for; nothing is checked yet."""

    grid: Path
    """File of the grid."""
    profile: str = "digits"
    """Name or file of the profile."""
    overrides: tuple[str, ...] = ()
    """Changes to every trial, such as `recipe.epochs=5`."""
    runs: str | Path | None = None
    """Folder or bucket of the runs. None: `SAN_RUNS`, else `runs/`."""
    seeds: int | None = None
    """Seeds 0 to `seeds` - 1 replace those of the grid. None: those of the grid."""
    only: tuple[str, ...] = ()
    """Rows to train; empty for all."""
    take_over: bool = False
    """Whether this command replaces the claim of another one, in a bucket."""
    serial: bool = False
    """Whether this process trains the trials itself, without Ray."""
    imports: tuple[str, ...] = ()
    """Files to import in addition to the grid's."""

    @property
    def command(self) -> str:
        """The `san run` to type in the project's folder for the same trials, wherever their runs are."""
        whole = self.grid.resolve()
        grid = whole.relative_to(PROJECT_DIR) if whole.is_relative_to(PROJECT_DIR) else self.grid
        seeds = [] if self.seeds is None else ["--seeds", str(self.seeds)]
        options = [*(f"--only={row}" for row in self.only), *(f"--import={file}" for file in self.imports)]
        return shlex.join(["san", "run", str(grid), "--profile", self.profile, *seeds, *self.overrides, *options])

    def with_runs(self, command: str) -> str:
        """A command for the same store of runs."""
        return command if self.runs is None else f"{command} --runs {shlex.quote(str(self.runs))}"
