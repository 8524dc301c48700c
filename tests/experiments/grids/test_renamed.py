"""Keys that were renamed before the first release: errors in new files, still read in old ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import san
from experiments.errors import UserError
from experiments.grids.config import TrialConfig
from experiments.grids.expand import PROFILES_DIR, expand, read_profile
from experiments.grids.renamed import RENAMED, new_key, with_new_keys, with_old_keys
from san.models import model_spec

OLD_KEYS = [f"{section}.{key}" for section, keys in RENAMED.items() for key in keys]


def record() -> dict[str, Any]:
    """A config with every field."""
    config = TrialConfig.model_validate(read_profile(PROFILES_DIR / "digits.yaml") | {"model": {"name": "san10_pairwise"}})
    return config.model_dump(mode="json") | {"model": dataclasses.asdict(model_spec("san10_pairwise"))}


@pytest.mark.parametrize("key", OLD_KEYS)
def test_error_for_an_old_key_names_the_new_one(key: str, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("question: q\nrows: [{id: a, model: {name: san10_pairwise}}]")
    with pytest.raises(UserError, match=rf"override '{key}=1': {key}: renamed to `{new_key(key)}`; use the new name$"):
        expand(grid, "digits", (f"{key}=1",), ())


def old(values: Mapping[str, Any]) -> dict[str, Any]:
    return {section: with_old_keys(section, keys) if section in RENAMED else keys for section, keys in values.items()}


def test_old_record_is_read_with_the_new_keys() -> None:
    before = old(record())
    assert all(key.partition(".")[2] in before[key.partition(".")[0]] for key in OLD_KEYS)
    assert with_new_keys(before) == record() == with_new_keys(record())


def test_old_weights_file_is_loaded(tmp_path: Path) -> None:
    model = san.create_model("san10_patchwise", 5, num_stages=2, width_mult=0.5, group_size=4)
    san.save_checkpoint(model, tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt")
    content["overrides"] = with_old_keys("model", content["overrides"])
    assert set(content["overrides"]) == {"stages", "width_factor", "share"}
    torch.save(content, tmp_path / "old.pt")
    assert san.load_checkpoint(tmp_path / "old.pt").spec == model.spec


def test_error_for_an_old_field_names_the_new_one() -> None:
    with pytest.raises(ValueError, match="san10_pairwise has no field width_factor; width_factor is now width_mult"):
        san.create_model("san10_pairwise", width_factor=0.5)
