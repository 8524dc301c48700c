"""Measures any checkpoints under a protocol."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from experiments.errors import UserError
from experiments.evaluation.evaluate import open_checkpoint, open_images
from experiments.evaluation.protocol import Ended, Numbers, measured, percentages
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.grid import ProtocolName
from experiments.runner.progress import counting
from experiments.training.resolve import CHECKPOINT, resolve_checkpoint


def measure_all(
    names: Sequence[str],
    overrides: Sequence[str],
    protocol: ProtocolName,
    profile: str | None,
    split: str | None,
    runs: str | Path | None,
) -> dict[str, list[dict[str, Numbers]]]:
    """Measures the numbers of each checkpoint under each condition. All checkpoints and their images are checked before the
    first is measured.

    Raises:
        UserError, DataError: as in `open_checkpoint` and `open_images`; or no checkpoint is given, or one twice.
    """
    if not names:
        raise UserError(f"no checkpoint given; expected {CHECKPOINT}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]}: given more than once; give each checkpoint once")
    ours: dict[str, list[dict[str, Numbers]]] = {}
    with ExitStack() as reached:
        paths = {name: reached.enter_context(resolve_checkpoint(name, runs))[0] for name in names}
        for path in paths.values():
            open_images(open_checkpoint(path, overrides, profile), split)
        for name, path in paths.items():
            opened = open_checkpoint(path, overrides, profile)  # again: they may be too many for the memory
            images, by_condition = open_images(opened, split), {}

            def shown(condition: str, images: int, batch: int, name: str = name) -> AbstractContextManager[Ended]:
                return counting(f"{name} {condition}", -(-images // batch), "batches")

            for condition, numbers in measured(opened, images, PROTOCOLS[protocol].conditions, shown):
                by_condition[condition.name] = numbers
                print(f"{name} {condition.name}: {percentages(numbers)}", file=sys.stderr, flush=True)
            ours[name if opened.row is None else f"{opened.row} ({name})"] = [by_condition]
    return ours
