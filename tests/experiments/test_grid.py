"""Grids: expansion is pure, every mistake is named with its path, all at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.grid import Trial, configs, parse_override, read_grid, read_profile
from experiments.report.paper import paper_rows

GRIDS = sorted((Path(__file__).parents[2] / "experiments" / "grids").glob("*.yaml"))


def told(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def expand(path: Path, *overrides: str, profile: str = "digits") -> dict[str, Trial]:
    checked = configs(path, read_grid(path), read_profile(profile), overrides)
    return {row: Trial(path.stem, profile, row, 0, config, "digest") for row, config in checked.items()}


@pytest.mark.parametrize("profile", ["digits", "imagenet"])
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_has_the_rows_of_its_table(path: Path, profile: str) -> None:
    assert list(expand(path, profile=profile)) == list(paper_rows(path.stem))


def test_layers_profile_base_row_override(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: Which layer wins?
        table: footprint
        base: {id: all, model: {name: san10_pairwise, footprint: 5}, recipe: {lr: 0.2, momentum: 0.5}}
        rows:
          - {id: a}
          - {id: b, model: {footprint: 3}, recipe: {lr: 0.4}}
    """)
    a, b = expand(path, "recipe.momentum=0.25").values()
    assert (a.config.model.overrides["footprint"], b.config.model.overrides["footprint"]) == (5, 3)
    assert (a.config.recipe.lr, b.config.recipe.lr) == (0.2, 0.4)
    assert a.config.recipe.momentum == b.config.recipe.momentum == 0.25
    assert a.config.data.size == 24  # the profile's


def test_keys_are_stable_and_know_what_counts(small_grid: Path) -> None:
    keys = {row: trial.key for row, trial in expand(small_grid).items()}
    assert keys == {row: trial.key for row, trial in expand(small_grid).items()}
    assert len(set(keys.values())) == 3
    for same in ("data.root=elsewhere", "placement.cpus=2"):
        assert expand(small_grid, same)["pairwise_3"].key == keys["pairwise_3"], same
    for other in ("recipe.lr=0.01", "data.flip=true", "model.width_factor=1", "placement.workers=2"):
        assert expand(small_grid, other)["pairwise_3"].key != keys["pairwise_3"], other
    first = expand(small_grid)["pairwise_3"]
    seeds = [Trial(first.grid, first.profile, first.row, seed, first.config, "digest") for seed in (0, 1)]
    assert [seed.name for seed in seeds] == ["pairwise_3", "pairwise_3-seed1"]
    assert seeds[0].key != seeds[1].key
    assert Trial(first.grid, first.profile, first.row, 0, first.config, "other images").key != first.key


def test_rejects_every_mistake_at_once(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: What is wrong?
        table: footprint
        rows:
          - {id: a, model: {name: san10_pairwize}}
          - {id: b, model: {name: resnet26, footprnt: 3}}
          - {id: c, model: {name: san10_pairwise, footprint: 13}}
          - {id: d, model: {name: san10_pairwise, footprint: seven}}
          - {id: e, model: {name: resnet26}, recipe: {epoch: 3, lr: fast}, data: {source: cloud}}
    """)
    lines = told(lambda: expand(path)).splitlines()
    assert len(lines) == 7
    for line, parts in zip(
        lines,
        [
            ["row a: model:", "unknown model 'san10_pairwize'", "did you mean 'san10_pairwise'?"],
            ["row b: model:", "resnet26 has no field footprnt", "its fields: depths"],
            ["row c: model:", "stage 2 of san10_pairwise at input size 24", "at least 7x7, not 6x6"],
            ["row d: model:", "footprint", "integer", "'seven'"],
            ["row e: data.source:", "'folder' or 'digits'", "'cloud'"],
            ["row e: recipe.lr:", "number", "'fast'"],
            ["row e: recipe.epoch:", "unknown key; did you mean 'epochs'?", "Allowed: batch, epochs"],
        ],
        strict=True,
    ):
        assert line.startswith(str(path))
        assert all(part in line for part in parts), line


def test_tells_a_mistake_of_every_row_once(small_grid: Path) -> None:
    text = told(lambda: expand(small_grid, "recipe.epochs=0"))
    assert text.count("\n") == 0
    assert "every row: recipe.epochs: input should be greater than or equal to 1, not 0" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question: [", r"grid.yaml:\d: not valid YAML"),
        ("- a list", "a mapping of keys was expected at the top, not list"),
        ("question: q\ntable: t\nrows: []", "rows: .*at least 1"),
        ("question: q\ntable: t\nrows: [{id: a, modl: {}}]", r"rows\[0\].modl: unknown key; did you mean 'model'\?"),
        ("question: q\ntable: t\nrows: [{id: a}, {id: a}]", "each id must be used once, but a is used more often"),
        ("question: q\ntable: t\nrows: [{id: 'a b'}]", r"rows\[0\].id: .*'a b'"),
        ("question: q\ntable: t\nseed: [1]\nrows: [{id: a}]", r"seed: unknown key; did you mean 'seeds'\?"),
    ],
)
def test_rejects_a_broken_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_grid(path)


def test_rejects_a_missing_file(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read (No such file" in told(lambda: read_grid(tmp_path / "none.yaml"))


def test_rejects_an_unknown_profile() -> None:
    assert told(lambda: read_profile("laptop")) == "unknown profile 'laptop'; known: digits, imagenet"


@pytest.mark.parametrize("text", ["recipe.epochs", "=3", "recipe..epochs=3", "recipe.lr=[1"])
def test_rejects_a_broken_override(text: str) -> None:
    assert text in told(lambda: parse_override(text))


def test_override_values_are_yaml() -> None:
    assert parse_override("data.crop_area=[0.5, 1]") == {"data": {"crop_area": [0.5, 1]}}
