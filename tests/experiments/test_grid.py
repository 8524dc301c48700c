"""Grids: expansion is pure, every mistake is named with its path, all at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.grid import Expanded, Trial, parse_override
from experiments.grid import expand as expand_grid
from experiments.report.paper import paper_rows, table_names

GRIDS = sorted((Path(__file__).parents[2] / "experiments" / "grids").glob("*.yaml"))


def told(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def expand(path: Path, *overrides: str, profile: str = "digits") -> dict[str, Trial]:
    checked = expanded(path, *overrides, profile=profile).configs
    return {row: Trial(path.stem, profile, row, 0, config, "digest") for row, config in checked.items()}


def expanded(path: Path, *overrides: str, profile: str = "digits") -> Expanded:
    return expand_grid(path, profile, overrides, table_names())


@pytest.mark.parametrize("profile", ["digits", "imagenet"])
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_has_the_rows_of_its_table(path: Path, profile: str) -> None:
    assert list(expand(path, profile=profile)) == list(paper_rows(path.stem))


def test_layers_profile_base_row_override(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: Which layer wins?
        table: footprint
        base: {model: {name: san10_pairwise, footprint: 5}, recipe: {lr: 0.2, momentum: 0.5}}
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
            ["row a: model.name:", "unknown model 'san10_pairwize'", "did you mean 'san10_pairwise'?"],
            ["row b: model.footprnt:", "unknown key; did you mean 'footprint'?", "Allowed: depths, footprint"],
            ["row c: model:", "stage 2 of san10_pairwise at input size 24", "at least 7x7, not 6x6"],
            ["row d: model.footprint:", "integer", "'seven'"],
            ["row e: data.source:", "'folder' or 'digits'", "'cloud'"],
            ["row e: recipe.lr:", "number", "'fast'"],
            ["row e: recipe.epoch:", "unknown key; did you mean 'epochs'?", "Allowed: batch, epochs"],
        ],
        strict=True,
    ):
        assert line.startswith(str(path))
        assert all(part in line for part in parts), line


def test_rejects_mistakes_of_all_layers_at_once(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: What is wrong?
        table: footprints
        foo: 1
        rows:
          - {id: a, model: {name: resnet26, footprnt: 3}}
          - {id: b, modl: {}}
    """)
    lines = told(lambda: expand(path, "recipe.lr", "data.flip=perhaps", "recipe.epochs=0")).splitlines()
    wanted = [
        "override 'recipe.lr': it is written key.path=value",
        f"{path}: foo: unknown key",
        f"{path}: rows[1].modl: unknown key; did you mean 'model'?",
        f"{path}: table: the paper has no table 'footprints'",
        "override 'data.flip=perhaps': data.flip: input should be a valid boolean",
        "override 'recipe.epochs=0': recipe.epochs: input should be greater than or equal to 1, not 0",
        f"{path}: row a: model.footprnt: unknown key",
    ]
    for start in wanted:
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{name: resnet26, footprint: 4}", "a footprint must be odd and positive"),
        ("{name: resnet26, footprint: -3}", "a footprint must be odd and positive"),
        ("{name: resnet26, width_factor: 0.5x}", "model.width_factor: input should be a valid number"),
        ("{name: resnet26, width_factor: .inf}", "width_factor must be positive, not inf"),
        ("{name: resnet26, stages: two}", "model.stages: input should be a valid integer"),
        ("{name: resnet26, widths: 5}", "model.widths: a list was expected, not 5"),
        ("{name: san10_pairwise, width_factor: 0.25}", "16 channels cannot be divided by r1=16"),
        ("{name: san10_pairwise, r1: 0}", "cannot be divided by r1=0"),
        ("{name: san10_pairwise, footprint: 4}", "must be odd and positive"),
        ("{}", "model.name: missing; it must be given"),
        ("3", r"rows\[0\].model: a mapping of keys was expected, not 3"),
    ],
)
def test_rejects_a_model_that_cannot_be_built(row: str, message: str, write_grid: Callable[[str], Path]) -> None:
    path = write_grid(f"{{question: q, table: footprint, rows: [{{id: a, model: {row}}}]}}")
    with pytest.raises(UserError, match=message):
        expand(path)


def test_a_number_written_as_text_is_a_number(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("{question: q, table: footprint, rows: [{id: a, model: {name: resnet26, footprint: '5'}}]}")
    assert expand(path)["a"].config.model.spec().footprint == 5  # type: ignore[attr-defined]


def test_full_size_models_follow_row_and_override_not_profile(small_grid: Path) -> None:
    spec = expanded(small_grid, "model.footprint=5").full_size["pairwise_3"].spec()
    assert (spec.footprint, spec.stages, spec.width_factor) == (5, None, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("key", "wrong"), [("x", "model.footprnt"), ("x", "model.name"), ("series", "nowhere.at.all")])
def test_rejects_a_plot_of_nothing(key: str, wrong: str, write_grid: Callable[[str], Path]) -> None:
    plot = {"x": "model.footprint", "series": "model.name", "label": "l"} | {key: wrong}
    path = write_grid(f"{{question: q, table: footprint, plot: {plot}, rows: [{{id: a, model: {{name: resnet26}}}}]}}")
    with pytest.raises(UserError, match=f"plot.{key}: row a has no .* at '{wrong}'"):
        expand(path)


def test_tells_a_mistake_of_every_row_once(small_grid: Path) -> None:
    text = told(lambda: expand(small_grid, "recipe.epochs=0"))
    assert text.count("\n") == 0
    assert text == "override 'recipe.epochs=0': recipe.epochs: input should be greater than or equal to 1, not 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question: [", r"grid.yaml:\d: not valid YAML"),
        ("- a list", "a mapping of keys was expected at the top, not list"),
        ("question: q\nquestion: q", "grid.yaml:1: not valid YAML: the key 'question' is given twice"),
        ("question: 2020-13-45", "not valid YAML: month must be in 1..12"),
        ("question: " + 3000 * "[", "not valid YAML"),
        ("question: q\ntable: footprint\nseeds: [-1]\nrows: [{id: a}]", r"seeds\[0\]: .*greater than or equal to 0, not -1"),
        ("question: q\ntable: footprint\nseeds: [1, 1]\nrows: [{id: a}]", "each seed must be used once, but 1 is used"),
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
        expand(path)


def test_rejects_a_missing_file(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read (No such file" in told(lambda: expand(tmp_path / "none.yaml"))


@pytest.mark.parametrize("name", ["laptop", "../grids/footprint"])
def test_rejects_an_unknown_profile(name: str, small_grid: Path) -> None:
    text = told(lambda: expand(small_grid, profile=name))
    assert text == f"unknown profile {name!r}; known: digits, imagenet"


@pytest.mark.parametrize("text", ["recipe.epochs", "=3", "recipe..epochs=3", "recipe.lr=[1"])
def test_rejects_a_broken_override(text: str) -> None:
    assert text in told(lambda: parse_override(text))


def test_override_values_are_yaml() -> None:
    assert parse_override("data.crop_area=[0.5, 1]") == {"data": {"crop_area": [0.5, 1]}}
