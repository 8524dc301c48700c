"""Grids: expansion is pure, every mistake is named with its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from experiments.errors import UserError
from experiments.grids.expand import GRIDS_DIR, Expanded, parse_override
from experiments.grids.expand import expand as expand_grid
from experiments.grids.grid import Trial
from experiments.paper.tables import EPOCHS, INPUT_SIZE, paper_rows, table_names

GRIDS = [path for path in sorted(GRIDS_DIR.glob("*.yaml")) if path.stem not in ("epochs", "pretrained")]
"""The grids of the paper's tables."""


def error_message(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def expand(path: Path, *overrides: str, profile: str = "digits") -> dict[str, Trial]:
    checked = expanded(path, *overrides, profile=profile).configs
    return {row: Trial(path.stem, profile, row, 0, config, "digest") for row, config in checked.items()}


def expanded(path: Path, *overrides: str, profile: str = "digits") -> Expanded:
    return expand_grid(path, profile, overrides, table_names())


@pytest.mark.parametrize("profile", ["digits", "folder", "imagenet", "imagenet-1gpu", "imagenet-fast"])
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
    assert a.config.data.size == 24  # from the profile


def test_key_depends_only_on_what_affects_the_result(small_grid: Path) -> None:
    keys = {row: trial.key for row, trial in expand(small_grid).items()}
    assert keys == {row: trial.key for row, trial in expand(small_grid).items()}
    assert len(set(keys.values())) == 3
    assert expand(small_grid, "data.source=shards", "data.root=elsewhere")["pairwise_3"].key == keys["pairwise_3"]
    places = ("data.root=elsewhere", "data.lists=elsewhere", "data.val_split_seed=1")
    settings = ("placement.workers=2", "engine.zero_stage=2", "engine.compile=true", "engine.deterministic=true")
    for same in (*places, *settings, "data.synthetic_classes=10", "data.synthetic_per_class=10", "placement.cpus=2"):
        assert expand(small_grid, same)["pairwise_3"].key == keys["pairwise_3"], same
    for other in ("recipe.lr=0.01", "data.flip=true", "model.width_mult=1"):
        assert expand(small_grid, other)["pairwise_3"].key != keys["pairwise_3"], other
    first = expand(small_grid)["pairwise_3"]
    seeds = [Trial(first.grid, first.profile, first.row, seed, first.config, "digest") for seed in (0, 1)]
    assert [seed.name for seed in seeds] == ["pairwise_3", "pairwise_3-seed1"]
    assert seeds[0].key != seeds[1].key
    assert Trial(first.grid, first.profile, first.row, 0, first.config, "other images").key != first.key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("name: san10_pairwise", "name: san10_pairwise, footprint: 7, relation: subtraction, position: relative"),
        ("name: resnet26, footprint: 3", "name: resnet26, footprint: '3', width_mult: 0.5, num_stages: 2"),  # from the profile
        ("name: san10_patchwise, depths: [2, 1, 2, 4, 1]", "depths: [2, 1, 2, 4, 1], name: san10_patchwise, mapping: LRL"),
    ],
)
def test_equal_models_have_equal_keys(one: str, other: str, write_grid: Callable[[str], Path]) -> None:
    path = write_grid(f"{{question: q, rows: [{{id: a, model: {{{one}}}}}, {{id: b, model: {{{other}}}}}]}}")
    a, b = expand(path).values()
    assert a.key == b.key
    assert a.record["model"] == b.record["model"]


def test_tables_share_their_trials() -> None:
    keys = {f"{path.stem}/{row}": trial.key for path in GRIDS for row, trial in expand(path).items()}
    for shared in (
        ["comparison/san10_pairwise", "relation/pairwise_subtraction", "mapping/pairwise_LRL", "position/pairwise_relative"],
        ["comparison/san10_patchwise", "relation/patchwise_concatenation", "mapping/patchwise_LRL", "footprint/patchwise_7"],
        ["comparison/resnet26", "relation/resnet26", "footprint/resnet26_3"],
        ["transformation/pairwise_distinct", "footprint/pairwise_7"],
        *([f"{table}/{row}" for table in ("comparison", "rotation", "attack")] for row in paper_rows("comparison")),
    ):
        assert len({keys[name] for name in shared}) == 1, shared
    for path in GRIDS:
        mine = [key for name, key in keys.items() if name.startswith(f"{path.stem}/")]
        assert len(set(mine)) == len(mine), path


def test_imagenet_profile_has_the_setting_of_the_paper() -> None:
    assert {path.stem for path in GRIDS} == {
        "comparison", "relation", "scalar_attention", "mapping", "transformation", "footprint", "position",
        "rotation", "attack",
    }  # fmt: skip
    rows = {path.stem: expand(path, profile="imagenet") for path in GRIDS}
    assert sum(map(len, rows.values())) == 47 + 2 * 9
    for name, trials in rows.items():
        for trial in trials.values():
            data, recipe, placement = trial.config.data, trial.config.recipe, trial.config.placement
            assert data.split == ("val-original" if name in ("comparison", "rotation", "attack") else "val-split")
            assert (data.val_split_per_class, data.train_per_class) == (50, None)
            assert (data.size, data.resize, data.crop_area, data.flip) == (INPUT_SIZE, 256, (0.08, 1.0), True)
            assert data.crop_ratio == pytest.approx((3 / 4, 4 / 3))
            assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.momentum) == (EPOCHS, 256, 0.1, 0.9)
            assert (recipe.weight_decay, recipe.label_smoothing) == (1e-4, 0.1)
            assert (placement.workers, placement.gpus) == (8, 1)
            assert trial.config.model.spec().num_stages is None and trial.config.model.spec().width_mult == 1


def test_rejects_an_override_of_a_product_axis(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("{question: q, rows: [{id: a, model: {name: resnet26}}], product: {recipe.lr: [0.1, 0.2]}}")
    text = error_message(lambda: expand(path, "recipe.lr=0.5"))
    assert text == f"{path}: product.recipe.lr: cannot be changed by override 'recipe.lr=0.5'; change the values in this file"


def test_last_override_of_a_key_is_used(small_grid: Path) -> None:
    trials = expand(small_grid, "recipe.epochs=1", "recipe.epochs=2", "recipe.epochs=1")
    assert {trial.config.recipe.epochs for trial in trials.values()} == {1}


def test_rejects_an_override_of_a_section(small_grid: Path) -> None:
    (line,) = error_message(lambda: expand(small_grid, "recipe=3")).splitlines()
    assert line.startswith("override 'recipe=3': recipe: ") and line.endswith(", not 3")


def test_invalid_row_is_reported_once(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("{question: q, rows: [{id: a, model: resnet26}]}")
    (line,) = error_message(lambda: expand(path)).splitlines()
    assert line.startswith(f"{path}: rows[0].model: ") and line.endswith(', not "resnet26"')


def test_rejects_a_plot_of_two_rows_at_one_point(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: q
        plot: {x: model.footprint, series: model.name, label: footprint}
        rows: [{id: a, model: {name: resnet26}}, {id: b, model: {name: resnet26}, recipe: {lr: 1}}]
    """)
    assert error_message(lambda: expand(path)) == (
        f"{path}: plot: rows a and b would be at the same point; set plot.series to a key in which the rows differ"
    )


def test_product_multiplies_every_row_in_order(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: Does the best learning rate depend on the footprint?
        base: {recipe: {lr: 9.0, momentum: 0.5}}
        rows:
          - {id: pairwise, model: {name: san10_pairwise}}
          - {id: resnet, model: {name: resnet26, width_mult: 1}}
        product:
          model.footprint: [3, 5]
          recipe.lr: [0.1, 0.2]
    """)
    configs = expanded(path).configs
    assert list(configs) == [
        f"{row}-footprint{footprint}-lr{lr}" for row in ("pairwise", "resnet") for footprint in (3, 5) for lr in (0.1, 0.2)
    ]
    config = configs["resnet-footprint5-lr0.1"]
    assert (config.model.name, config.model.overrides["footprint"], config.recipe.lr) == ("resnet26", 5, 0.1)
    assert (config.model.overrides["width_mult"], config.recipe.momentum) == (1, 0.5)
    assert list(expanded(path).full_size) == [row.id for row in expanded(path).grid.rows] == list(configs)


@pytest.mark.parametrize(
    ("product", "ids"),
    [
        ("model.name: [resnet26, resnet38]", ["nameresnet26", "nameresnet38"]),
        ("model.name: [resnet26], recipe.lr: [0.1, 1e-3, '0.2']", [f"nameresnet26-lr{lr}" for lr in ("0.1", "1e-3", "0.2")]),
        ("model.name: [resnet26], data.flip: [false, true]", ["nameresnet26-flipfalse", "nameresnet26-fliptrue"]),
        ("model.name: [resnet26], model.depths: [[1, 1, 1, 1]]", ["nameresnet26-depths1-1-1-1"]),
        ("model.name: [resnet26], model.num_stages: [2, 3]", ["nameresnet26-num_stages2", "nameresnet26-num_stages3"]),
    ],
)
def test_product_needs_no_rows(product: str, ids: list[str], write_grid: Callable[[str], Path]) -> None:
    assert list(expand(write_grid(f"{{question: q, product: {{{product}}}}}"))) == ids


MISTAKES = {
    "product": (
        """
        rows: [{id: a, model: {name: resnet26, footprint: 3}}]
        product:
          lr: [0.1]
          placement.workers: [1, 2]
          recipe.lr.x: [1]
          data.flip: []
          model.footprint: [3, 5]
        """,
        [
            "product.lr: not a key of section model, data, recipe",
            "product.placement.workers: not a key of section",
            "product.recipe.lr.x: not a key of section",
            "product.data.flip: empty list",
            "product.model.footprint: also set in row a",
        ],
    ),
    "file": (
        """
        foo: 1
        rows: [{id: a, modl: {}}, {id: 3}]
        seeds: [-1]
        product: {recipe.momentum: 0.9}
        """,
        [
            "foo: unknown key",
            "rows[0].modl: unknown key; did you mean `rows[0].model`?",
            "rows[1].id: ",
            "seeds[0]: ",
            "product.rec",
        ],
    ),
    "rows": (
        """
        base: {recipe: {lr: fast}}
        rows:
          - {id: a, model: {name: san10_pairwize}}
          - {id: b, model: {name: resnet26, footprnt: 3}, recipe: {lr: 1}}
          - {id: c, model: {name: san10_pairwise, footprint: 13}, recipe: {lr: 1}}
          - {id: d, model: {name: san10_pairwise, footprint: seven}, recipe: {lr: 1}}
          - {id: e, model: {name: resnet26}, recipe: {epoch: 3}, data: {source: cloud}}
        """,
        [
            "row a, e: recipe.lr: should be a valid number",
            "row b: model.footprnt: unknown key; did you mean `model.footprint`? Allowed: depths, footprint",
            "row c: model: stage 2 of san10_pairwise with images of 24 x 24 pixels",
            "row d: model.footprint: should be a valid integer",
            "row e: data.source: should be 'folder', 'shards', 'synthetic' or 'digits', not \"cloud\"",
            "row e: recipe.epoch: unknown key; did you mean `recipe.epochs`? Allowed: batch_size",
        ],
    ),
    "combinations": (
        """
        base: {recipe: {warmup_epochs: 18}}
        rows: [{id: a, model: {name: resnet26}}, {id: b, model: {name: resnet38}, recipe: {freeze: [stem]}}]
        """,
        ["every row: recipe.warmup_epochs: must be less than recipe.epochs=18", "row b: recipe.freeze: needs recipe.init"],
    ),
}


@pytest.mark.parametrize("step", MISTAKES)
def test_lists_every_mistake_of_a_step_once(step: str, write_grid: Callable[[str], Path]) -> None:
    text, expected = MISTAKES[step]
    path = write_grid("question: What is wrong?\n" + dedent(text))
    lines = error_message(lambda: expand(path)).splitlines()
    for start in expected:
        assert sum(line.startswith(f"{path}: {start}") for line in lines) == 1, start
    assert len(lines) == len(expected)


def test_names_the_override_that_is_wrong(small_grid: Path) -> None:
    lines = error_message(lambda: expand(small_grid, "data.flip=perhaps", "recipe.epochs=0")).splitlines()
    assert [line.partition(": should")[0] for line in lines] == [
        "override 'data.flip=perhaps': data.flip",
        "override 'recipe.epochs=0': recipe.epochs",
    ]
    assert "not KEY=VALUE" in error_message(lambda: expand(small_grid, "recipe.lr"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("table: footprint, robustness: rotation", "table: 'footprint' has no results for `robustness: rotation`"),
        ("table: attack, robustness: rotation", "table: 'attack' has no results for `robustness: rotation`"),
        ("table: rotation", "robustness: missing; table 'rotation' requires `robustness: rotation`"),
    ],
)
def test_rejects_a_table_without_robustness_results(keys: str, message: str, write_grid: Callable[[str], Path]) -> None:
    path = write_grid(f"{{question: q, {keys}, rows: [{{id: a, model: {{name: resnet26}}}}]}}")
    with pytest.raises(UserError, match=f"{path}: {message}"):
        expand(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{name: resnet26, footprint: 4}", "the footprint must be odd and positive"),
        ("{name: resnet26, width_mult: 0.5x}", 'model.width_mult: should be a valid number.* not "0.5x"'),
        ("{name: resnet26, widths: 5}", "model.widths: .*, not 5"),
        ("{name: san10_pairwise, width_mult: 0.25}", "4 value channels .* are not divisible by group_size=8"),
        ("{}", "model.name: missing; this key is required"),
    ],
)
def test_rejects_a_model_that_cannot_be_built(row: str, message: str, write_grid: Callable[[str], Path]) -> None:
    path = write_grid(f"{{question: q, table: footprint, rows: [{{id: a, model: {row}}}]}}")
    with pytest.raises(UserError, match=message):
        expand(path)


def test_number_may_be_written_as_text(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("{question: q, table: footprint, rows: [{id: a, model: {name: resnet26, footprint: '5'}}]}")
    assert expand(path)["a"].config.model.spec().footprint == 5  # type: ignore[attr-defined]


def test_full_size_models_follow_row_and_override_not_profile(small_grid: Path) -> None:
    spec = expanded(small_grid, "model.footprint=5").full_size["pairwise_3"].spec()
    assert (spec.footprint, spec.num_stages, spec.width_mult) == (5, None, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("key", "wrong"), [("x", "model.footprnt"), ("x", "model.name"), ("series", "nowhere.at.all")])
def test_rejects_an_unknown_plot_key(key: str, wrong: str, write_grid: Callable[[str], Path]) -> None:
    plot = {"x": "model.footprint", "series": "model.name", "label": "l"} | {key: wrong}
    path = write_grid(f"{{question: q, table: footprint, plot: {plot}, rows: [{{id: a, model: {{name: resnet26}}}}]}}")
    with pytest.raises(UserError, match=f"plot.{key}: row a has no .* at `{wrong}`"):
        expand(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question: [", r"grid.yaml:\d: not valid YAML"),
        ("- a list", "must be a mapping of keys at the top level, not list"),
        ("question: q\nquestion: q", "grid.yaml:1: not valid YAML: duplicate key 'question'"),
        ("question: q\nrows: [{id: a, model: {<<: {name: b}, x: 1, x: 2}}]", "grid.yaml:2: .*duplicate key 'x'"),
        ("question: q\nrows: [{id: a, model: {<<: 3}}]", "grid.yaml:2: not valid YAML: expected a mapping"),
        ("question: 2020-13-45", "not valid YAML: month must be in 1..12"),
        ("question: " + 3000 * "[", "not valid YAML"),
        (
            "question: q\ntable: footprint\nseeds: [-1]\nrows: [{id: a}]",
            r"seeds\[0\]: should be greater than or equal to 0, not -1$",
        ),
        (
            "question: q\ntable: footprint\nseeds: [1, 1]\nrows: [{id: a}]",
            "each seed must be unique, but these occur more than once: 1",
        ),
        ("question: q\nrows: [{id: a}, {id: a}]", "each id must be unique, but these occur more than once: a"),
        ("question: q\ntable: t\nrows: [{id: 'a b'}]", r'rows\[0\].id: .*"a b"$'),
        ("question: q", "rows: missing; give rows, a product, or both"),
        ("question: q\nproduct: [model.name]", "product: should be a valid dictionary, not "),
        ("question: q\nrows: []\nproduct: {model.name: [resnet26]}", "rows: .*at least 1"),
        (
            "question: q\nrows: [{id: a, model: {name: resnet26}}, {id: a-lr1}]\nproduct: {recipe.lr: [1, 2, 1]}",
            "each id must be unique, but these occur more than once: a-lr1, a-lr1-lr1",
        ),
        ("question: q\ntable: t\nseed: [1]\nrows: [{id: a}]", r"seed: unknown key; did you mean `seeds`\?"),
    ],
)
def test_rejects_a_broken_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        expand(path)


def test_merge_keys_follow_yaml(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: Who repeats it?
        rows:
          - {id: a, model: &plain {name: san10_pairwise, footprint: 5}}
          - {id: b, model: &wide {<<: *plain, footprint: 7}}
          - {id: c, model: {<<: *wide, relation: dot}}
          - {id: d, model: {footprint: 3, <<: [*wide, *plain]}}
    """)
    values = {
        row: (trial.config.model.name, trial.config.model.overrides) for row, trial in expand(path, profile="imagenet").items()
    }
    assert values == {
        "a": ("san10_pairwise", {"footprint": 5}),
        "b": ("san10_pairwise", {"footprint": 7}),
        "c": ("san10_pairwise", {"footprint": 7, "relation": "dot"}),
        "d": ("san10_pairwise", {"footprint": 3}),
    }


def test_rejects_a_missing_file(tmp_path: Path) -> None:
    assert "none.yaml: cannot read (No such file" in error_message(lambda: expand(tmp_path / "none.yaml"))


def test_grid_takes_missing_keys_from_the_grid_it_extends(write_grid: Callable[..., Path]) -> None:
    write_grid("question: q\nseeds: [1, 2]\nrows: [{id: a, model: {name: resnet26}}]", "parent.yaml")
    path = write_grid("extends: parent.yaml\nbase: {recipe: {epochs: 3}}\nseeds: [3]")
    grid = expanded(path).grid
    assert (grid.question, grid.seeds) == ("q", (3,))
    assert expand(path)["a"].config.recipe.epochs == 3


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ("none.yaml", "none.yaml: cannot read (No such file or directory)"),
        ("3", "extends: must be the path of a grid, not 3"),
        ("child.yaml", "child.yaml: extends: this grid extends itself"),
    ],
    ids=["missing file", "not a path", "cycle"],
)
def test_rejects_a_grid_that_cannot_be_extended(parent: str, message: str, write_grid: Callable[..., Path]) -> None:
    path = write_grid(f"extends: {parent}\nrows: [{{id: a, model: {{name: resnet26}}}}]", "child.yaml")
    assert message in error_message(lambda: expand(path))


def test_profile_extends_another(small_grid: Path) -> None:
    paper, one = (expand(small_grid, profile=name)["pairwise_3"].config for name in ("imagenet", "imagenet-1gpu"))
    assert one.data == paper.data
    assert (one.placement.workers, one.recipe.grad_accum_steps) == (1, 8)
    assert one.recipe.batch_size // one.recipe.grad_accum_steps == paper.recipe.batch_size // paper.placement.workers == 32
    fast = expand(small_grid, profile="imagenet-fast")["pairwise_3"].config.recipe
    assert (fast.lr_used, fast.precision, fast.warmup_epochs) == (pytest.approx(0.4), "bfloat16", 5)


@pytest.mark.parametrize("name", ["laptop", "../grids/footprint"])
def test_rejects_an_unknown_profile(name: str, small_grid: Path) -> None:
    text = error_message(lambda: expand(small_grid, profile=name))
    known = "cifar10, cifar10-full, digits, folder, imagenet, imagenet-1gpu, imagenet-fast"
    assert text == f"unknown profile {name!r}; profiles: {known}; or give the path of a .yaml file"


@pytest.mark.parametrize("text", ["recipe.epochs", "=3", "recipe..epochs=3", "recipe.lr=[1"])
def test_rejects_a_broken_override(text: str) -> None:
    assert text in error_message(lambda: parse_override(text))


def test_override_values_are_yaml() -> None:
    assert parse_override("data.crop_area=[0.5, 1]") == {"data": {"crop_area": [0.5, 1]}}


@pytest.mark.parametrize("place", ["grid", "override"])
def test_folder_source_needs_a_root(place: str, write_grid: Callable[[str], Path]) -> None:
    """Otherwise the digits of the profile would be used without a message."""
    base = "base: {data: {source: folder}}" if place == "grid" else ""
    path = write_grid(
        f"question: q\n{base}\nrows: [{{id: a, model: {{name: resnet26}}}}, {{id: b, model: {{name: resnet38}}}}]"
    )
    overrides = ["data.source=folder"] if place == "override" else []
    (line,) = error_message(lambda: expand(path, *overrides)).splitlines()
    where = f"{path}: every row" if place == "grid" else "override 'data.source=folder'"
    assert (
        line
        == f"{where}: data.source: folder needs data.root; add the folder of your images, such as data.root=/path/to/images"
    )
    assert expand(path, *overrides, "data.root=/images")["a"].config.data.root == "/images"


PROFILE = "extends: folder\ndata: {root: photos}\nrecipe: {epochs: 7}\n"


def test_profile_can_be_a_file_whose_paths_are_relative_to_it(
    small_grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "laptop.yaml").write_text(PROFILE)
    (tmp_path / "mine" / "longer.yaml").write_text("extends: laptop.yaml\nrecipe: {epochs: 9}\n")
    monkeypatch.chdir(tmp_path)
    for name, epochs in (("laptop", 7), ("longer", 9)):
        config = expand(small_grid, profile=f"mine/{name}.yaml")["pairwise_3"].config
        assert (config.data.root, config.recipe.epochs) == (str(tmp_path / "mine" / "photos"), epochs)
        assert config.data.size == 64


def test_relative_paths_of_grid_and_overrides_are_relative_to_the_current_folder(
    write_grid: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_grid("question: q\nbase: {data: {source: folder, root: here}}\nrows: [{id: a, model: {name: resnet26}}]")
    assert expand(path)["a"].config.data.root == str(tmp_path / "here")
    assert expand(path, "data.root=there")["a"].config.data.root == str(tmp_path / "there")
    assert expand(path, "data.root=/there")["a"].config.data.root == "/there"


def test_rejects_a_profile_file_with_the_name_of_ours(small_grid: Path, tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(PROFILE)
    text = error_message(lambda: expand(small_grid, profile=str(tmp_path / "digits.yaml")))
    assert text == f"{tmp_path / 'digits.yaml'}: the project has a profile with this name; rename the file"


def test_a_changed_init_file_is_another_trial_and_a_moved_one_is_not(small_grid: Path) -> None:
    config = expand(small_grid, "recipe.init=/a.pt")["pairwise_3"].config
    moved = expand(small_grid, "recipe.init=/b.pt")["pairwise_3"].config
    random = expand(small_grid)["pairwise_3"]
    one, same, changed = (
        Trial("g", "digits", "a", 0, each, "digest", digest) for each, digest in ((config, "1"), (moved, "1"), (config, "2"))
    )
    assert one.key == same.key
    assert len({one.key, changed.key, random.key}) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.freeze=[stem]"], "recipe.freeze: needs recipe.init, because random weights would stay random"),
        (["recipe.init=a", "recipe.freeze=[stag1]"], "has no part 'stag1'; did you mean `stage1`? Parts: stem, stage1, stage2"),
        (["recipe.init=a", "recipe.freeze=[stem, stage1, stage2, head]"], "recipe.freeze: freezes the whole model"),
        (["recipe.layer_decay=0.5", "engine.zero_stage=1"], "recipe.layer_decay: cannot be combined with engine.zero_stage=1"),
        (["recipe.layer_decay=2"], "recipe.layer_decay: should be less than or equal to 1, not 2"),
    ],
)
def test_rejects_fine_tuning_that_cannot_work(overrides: list[str], message: str, small_grid: Path) -> None:
    assert message in error_message(lambda: expand(small_grid, *overrides))
