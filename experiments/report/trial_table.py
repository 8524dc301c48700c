"""A grid's trials as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.grids.config import flat
from experiments.grids.grid import Trial
from experiments.report.data import counts_of_trained
from experiments.runner.grid_run import GridRun, is_finished
from experiments.tracking import Result
from experiments.tracking.results_file import METRICS

if TYPE_CHECKING:
    import pandas as pd

COUNTS = ("params", "flops_paper", "flops_actual")


def trial_table(grid_run: GridRun, results: Mapping[str, Result]) -> pd.DataFrame:
    """One row per trial in the grid's order; `experiments.load_results` describes the columns."""
    import pandas as pd  # takes half a second

    counts = counts_of_trained(grid_run.trials)
    settings = pd.DataFrame([_settings(trial) for trial in grid_run.trials])
    counted = pd.DataFrame([{name: getattr(counts[trial.row], name) for name in COUNTS} for trial in grid_run.trials])
    finished = [results[trial.key].metrics if is_finished(results, trial) else {} for trial in grid_run.trials]
    names = dict.fromkeys([*METRICS.values(), *sorted(set().union(*finished))])
    metrics = [name for name in names if name not in COUNTS and not name.startswith("system/")]
    return settings.join(counted).join(pd.DataFrame(finished, columns=metrics, dtype=float))


def _settings(trial: Trial) -> dict[str, Any]:
    config = flat(trial.record) | {"recipe.lr_used": trial.config.recipe.lr_used}
    # Lists cannot be grouped by.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    return {"key": trial.key, "trial": trial.name, "row": trial.row, "seed": trial.seed} | values
