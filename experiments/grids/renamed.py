"""Keys that were renamed for version 0.1.0. In a grid, an old key is an error that names the new one; old runs can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from san.models.base import RENAMED_FIELDS

RENAMED: Mapping[str, Mapping[str, str]] = {
    "model": RENAMED_FIELDS,
    "recipe": {
        "batch": "batch_size",
        "lr_batch": "lr_batch_size",
        "accumulate": "grad_accum_steps",
        "ema": "ema_decay",
        "mixup": "mixup_alpha",
    },
    "engine": {"zero": "zero_stage"},
    "reliability": {
        "look_steps": "check_every_n_steps",
        "checkpoints": "keep_checkpoints",
        "checkpoint_minutes": "checkpoint_every_n_minutes",
        "hang_minutes": "hang_timeout_minutes",
    },
}
"""New name of each old key, by section of a config."""


def new_key(path: str) -> str | None:
    """`recipe.batch_size` for `recipe.batch`; None for a key that was never renamed."""
    section, _, key = path.partition(".")
    new = RENAMED.get(section, {}).get(key)
    return new and f"{section}.{new}"


def with_new_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config with every old key replaced."""
    new = {
        section: {names.get(key, key): value for key, value in dict(record[section]).items()}
        for section, names in RENAMED.items()
        if section in record
    }
    return {**record, **new}


def with_old_keys(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """One section with its old keys, which a cell's content hash uses so that finished runs keep their keys."""
    old = {new: key for key, new in RENAMED[section].items()}
    return {old.get(key, key): value for key, value in values.items()}
