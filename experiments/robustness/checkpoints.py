"""`san robustness`: any checkpoints through a protocol."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from experiments import evaluate
from experiments.errors import UserError
from experiments.evaluate import checkpoint_path, open_checkpoint, open_images
from experiments.grid import ProtocolName
from experiments.report.text import percentages
from experiments.robustness import PROTOCOLS, table
from experiments.robustness.protocol import Ended, Numbers, measured
from experiments.tracking import trial_key
from experiments.workspace import Workspace


def measure_all(
    names: Sequence[str],
    overrides: Sequence[str],
    protocol: ProtocolName,
    profile: str | None,
    split: str | None,
    workspace: Workspace,
) -> list[table.Cell]:
    """The table of checkpoints, a row for each name: a path, a trial's key or the id of its run in MLflow.

    All are looked at, and their images, before the first is measured.

    Raises:
        UserError, DataError: as `open_checkpoint` and `open_images`; none is given, or one twice.
    """
    if not names:
        raise UserError("no checkpoint is given; give files, keys (`san runs` lists them) or MLflow's ids of runs")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]}: is given twice; leave out one")
    paths = {name: _path(name, workspace) for name in names}
    for path in paths.values():
        open_images(open_checkpoint(path, overrides, profile), split)
    ours: dict[str, list[dict[str, Numbers]]] = {}
    for name, path in paths.items():
        opened = open_checkpoint(path, overrides, profile)  # again: they may be too many for the memory
        images, found = open_images(opened, split), {}
        for condition, numbers in measured(opened, images, PROTOCOLS[protocol].conditions, partial(_shown, name)):
            found[condition.name] = numbers
            print(f"{name} {condition.name}: {percentages(numbers)}", file=sys.stderr, flush=True)
        ours[name] = [found]
    return table.cells(PROTOCOLS[protocol], ours)


def _path(name: str, workspace: Workspace) -> Path:
    if Path(name).exists() or not re.fullmatch("[0-9a-f]{32}", name):
        return checkpoint_path(name, workspace.runs)
    return checkpoint_path(trial_key(workspace.tracking_uri, name), workspace.runs)


def _shown(name: str, condition: str, images: int, batch: int) -> AbstractContextManager[Ended]:
    return evaluate.shown(images, batch, f"{name} {condition}")
