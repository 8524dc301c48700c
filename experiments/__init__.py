"""What is run: grids of questions, trials, training, tracking and the report. Uses san, pipelines and cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_results"]


def load_results(
    grid: str | Path,
    *overrides: str,
    profile: str = "digits",
    runs: str | Path | None = None,
    seeds: int | None = None,
    imports: Sequence[str] = (),
) -> pd.DataFrame:
    """Reads a grid's results as a DataFrame with one row per trial, in the order of the grid. Trains nothing.

    Columns:

    - `key`, `trial`, `row` and `seed`
    - every setting by its dotted key, for example `model.footprint`, and `recipe.lr_used`; NaN for a setting that a trial's
      model lacks
    - `params`, `flops_paper` and `flops_actual` of the trained model, for one image (`san.complexity`)
    - the final metrics by their names in MLflow, for example `val/top1` in percent; NaN if the trial is not finished

    Args:
        grid: a grid's file, or the name of one of the project's grids.
        overrides: changes to every trial, such as `recipe.epochs=5`, as for `san run`.
        profile: name or file of the profile.
        runs: folder or bucket of the runs. The default is `SAN_RUNS`, else `runs/`.
        seeds: use seeds 0 to `seeds` - 1 instead of the grid's.
        imports: files to import in addition to the grid's, as for `san run --import`.

    Raises:
        UserError: a mistake in the grid, the profile or the overrides.
        DataError: images that cannot be used; trials are identified by their images, too.
        UnavailableError: the bucket or MLflow cannot be used.
    """
    from experiments.config.expand import grid_path
    from experiments.config.grid import GridRequest
    from experiments.report.tables import trial_table
    from experiments.runner.grid_run import known_results, open_grid_run

    request = GridRequest(grid_path(grid), profile, overrides, runs, seeds, imports=tuple(imports))
    grid_run = open_grid_run(request, writes=False)
    return trial_table(grid_run, known_results(grid_run))
