"""The profiles compare what the paper compares."""

import functools
from pathlib import Path

import pytest

import san
from experiments.config.config import ModelConfig
from experiments.config.expand import PROFILES_DIR, read_profile
from experiments.paper.tables import count

PAIRS = [
    (resnet, f"{sans}_{kind}")
    for resnet, sans in (("resnet26", "san10"), ("resnet38", "san15"), ("resnet50", "san19"))
    for kind in ("pairwise", "patchwise")
]
PROFILES = [PROFILES_DIR / f"{name}.yaml" for name in ("digits", "folder", "cifar10", "cifar10-full")]
"""The profiles of ImageNet have the models of the paper."""


@functools.cache
def counted(path: Path | None, name: str) -> san.Complexity:
    """A model's counts under a profile, and those of the paper without one."""
    profile = read_profile(path) if path else {"data": {"size": 224}}
    model = ModelConfig.model_validate({"name": name} | profile.get("model", {}))
    return count(model.spec(), profile["data"]["size"], classes=10)


@pytest.mark.parametrize(("resnet", "sans"), PAIRS)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_ratios_of_parameters_and_flops_are_near_the_papers(profile: Path, resnet: str, sans: str) -> None:
    for field in ("params", "flops_paper"):
        ours, papers = (getattr(counted(at, resnet), field) / getattr(counted(at, sans), field) for at in (profile, None))
        assert 0.75 < ours / papers < 1.25, f"{field}: {ours:.2f} instead of {papers:.2f}"
