"""Grids: expansion is pure, every mistake is named with its path."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from experiments.config.config import GRIDS_DIR, DataConfig, ModelConfig, RecipeConfig, TrialConfig
from experiments.config.expand import Expanded, read_grid
from experiments.config.expand import expand as expand_grid
from experiments.config.grid import GridRequest, Trial
from experiments.errors import UserError
from experiments.paper.tables import EPOCHS, INPUT_SIZE, paper_rows, table_names
from experiments.runner.grid_run import open_grid_run
from tests.experiments.conftest import SMALL_GRID, WriteGrid

GRIDS = [path for path in sorted(GRIDS_DIR.glob("*.yaml")) if "table" in read_grid(path)]
"""The grids of the paper's tables."""


def error_message(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


@functools.cache
def trials_of_the_paper(profile: str) -> dict[str, dict[str, Trial]]:
    """The trials of each grid."""
    return {path.stem: expand(path, "data.root=images", profile=profile) for path in GRIDS}


def expand(path: Path, *overrides: str, profile: str = "digits") -> dict[str, Trial]:
    checked = expanded(path, *overrides, profile=profile)
    return {
        row: Trial(path.stem, profile, row, 0, config, "digest", imports=checked.imports)
        for row, config in checked.configs.items()
    }


def expanded(path: Path, *overrides: str, profile: str = "digits", imports: Sequence[str] = ()) -> Expanded:
    return expand_grid(GridRequest(path, profile, overrides, imports=tuple(imports)), table_names())


@pytest.mark.parametrize("profile", ["digits", "folder", "imagenet", "imagenet-1gpu", "imagenet-fast"])
def test_every_grid_has_the_rows_of_its_table(profile: str) -> None:
    for name, trials in trials_of_the_paper(profile).items():
        assert list(trials) == list(paper_rows(name))


def test_layers_profile_base_row_override(write_grid: WriteGrid) -> None:
    path = write_grid("""
        question: Which layer wins?
        table: footprint
        base: {model: {name: san10_pairwise, footprint: 5}, recipe: {lr: 0.2, momentum: 0.5}}
        rows:
          - {id: a}
          - {id: b, model: {footprint: 3}, recipe: {lr: 0.4}}
    """)
    a, b = expand(path, "recipe.momentum=1", "recipe.momentum=0.25", "data.crop_area=[0.5, 1]").values()
    assert a.config.data.crop_area == (0.5, 1)
    assert (a.config.model.overrides["footprint"], b.config.model.overrides["footprint"]) == (5, 3)
    assert (a.config.recipe.lr, b.config.recipe.lr) == (0.2, 0.4)
    assert a.config.recipe.momentum == b.config.recipe.momentum == 0.25
    assert a.config.data.size == 24  # from the profile


def test_key_depends_only_on_what_affects_the_result() -> None:
    keys = {row: trial.key for row, trial in expand(SMALL_GRID).items()}
    assert keys == {row: trial.key for row, trial in expand(SMALL_GRID).items()}
    assert len(set(keys.values())) == 3
    assert expand(SMALL_GRID, "data.source=shards", "data.root=elsewhere")["pairwise_3"].key == keys["pairwise_3"]
    places = ("data.root=elsewhere", "data.lists=elsewhere", "data.val_split_seed=1")
    settings = ("resources.workers=2", "engine.compile=true", "engine.deterministic=true")
    for same in (*places, *settings, "data.synthetic_classes=10", "data.synthetic_per_class=10", "resources.cpus=2"):
        assert expand(SMALL_GRID, same)["pairwise_3"].key == keys["pairwise_3"], same
    for other in ("recipe.lr=0.01", "data.flip=true", "model.width_mult=1"):
        assert expand(SMALL_GRID, other)["pairwise_3"].key != keys["pairwise_3"], other
    first = expand(SMALL_GRID)["pairwise_3"]
    seeds = [Trial(first.grid, first.profile, first.row, seed, first.config, "digest") for seed in (0, 1)]
    assert [seed.name for seed in seeds] == ["pairwise_3", "pairwise_3-seed1"]
    assert seeds[0].key != seeds[1].key
    assert Trial(first.grid, first.profile, first.row, 0, first.config, "other images").key != first.key
    files = [expand(SMALL_GRID, f"recipe.init={path}")["pairwise_3"].config for path in ("/a.pt", "/b.pt")]
    one, moved = (Trial("g", "digits", "a", 0, config, "digest", "content") for config in files)
    changed = Trial("g", "digits", "a", 0, files[0], "digest", "other content")
    assert one.key == moved.key
    assert len({one.key, changed.key, first.key}) == 3


def test_new_fields_of_a_model_do_not_change_the_keys_of_finished_runs() -> None:
    data = DataConfig(source="folder", size=24, resize=24, flip=False, mean=(0, 0, 0), std=(1, 1, 1))
    recipe = RecipeConfig(epochs=1, batch_size=8, lr=0.1, momentum=0, weight_decay=0, label_smoothing=0)

    def key(**overrides: int) -> str:
        model = ModelConfig.model_validate({"name": "san10_pairwise", **overrides})
        return Trial("g", "p", "a", 0, TrialConfig(model=model, data=data, recipe=recipe), "digest").key

    assert key() == key(hidden_reduction=16) == "bbdf2aa60ac7"
    assert key(hidden_reduction=4) != key()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("name: san10_pairwise", "name: san10_pairwise, footprint: 7, relation: subtraction, position: relative"),
        ("name: resnet26, footprint: 3", "name: resnet26, footprint: '3', width_mult: 0.5, num_stages: 2"),  # from the profile
        ("name: san10_patchwise, depths: [2, 1, 2, 4, 1]", "depths: [2, 1, 2, 4, 1], name: san10_patchwise, mapping: LRL"),
    ],
)
def test_equal_models_have_equal_keys(one: str, other: str, write_grid: WriteGrid) -> None:
    path = write_grid(f"{{question: q, rows: [{{id: a, model: {{{one}}}}}, {{id: b, model: {{{other}}}}}]}}")
    a, b = expand(path).values()
    assert a.key == b.key
    assert a.record["model"] == b.record["model"]


def test_tables_share_their_trials() -> None:
    keys = {
        f"{name}/{row}": trial.key for name, trials in trials_of_the_paper("digits").items() for row, trial in trials.items()
    }
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
    rows = trials_of_the_paper("imagenet")
    assert sum(map(len, rows.values())) == 47 + 2 * 9
    for name, trials in rows.items():
        for trial in trials.values():
            data, recipe, resources = trial.config.data, trial.config.recipe, trial.config.resources
            assert data.split == ("val-original" if name in ("comparison", "rotation", "attack") else "val-split")
            assert (data.val_split_per_class, data.train_per_class) == (50, None)
            assert (data.size, data.resize, data.crop_area, data.flip) == (INPUT_SIZE, 256, (0.08, 1.0), True)
            assert data.crop_ratio == pytest.approx((3 / 4, 4 / 3))
            assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.momentum) == (EPOCHS, 256, 0.1, 0.9)
            assert (recipe.weight_decay, recipe.label_smoothing) == (1e-4, 0.1)
            assert (resources.workers, resources.gpus) == (8, 1)
            assert trial.config.model.spec().num_stages is None and trial.config.model.spec().width_mult == 1


def test_product_multiplies_every_row_in_order(write_grid: WriteGrid) -> None:
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
        ("model.name: [san10_patchwise], model.r1: [4, 16]", ["namesan10_patchwise-r1-4", "namesan10_patchwise-r1-16"]),
        ("model.name: [resnet26, resnet38]", ["nameresnet26", "nameresnet38"]),
        ("model.name: [resnet26], recipe.lr: [0.1, 1e-3, '0.2']", [f"nameresnet26-lr{lr}" for lr in ("0.1", "1e-3", "0.2")]),
        ("model.name: [resnet26], data.flip: [false, true]", ["nameresnet26-flipfalse", "nameresnet26-fliptrue"]),
        ("model.name: [resnet26], model.depths: [[1, 1, 1, 1]]", ["nameresnet26-depths1-1-1-1"]),
        ("model.name: [resnet26], model.num_stages: [2, 3]", ["nameresnet26-num_stages2", "nameresnet26-num_stages3"]),
    ],
)
def test_product_needs_no_rows(product: str, ids: list[str], write_grid: WriteGrid) -> None:
    assert list(expand(write_grid(f"{{question: q, product: {{{product}}}}}"))) == ids


def test_long_id_of_a_product_ends_with_a_digest(write_grid: WriteGrid) -> None:
    text = "{{question: q, rows: [{{id: {}, model: {{name: resnet26}}}}], product: {{recipe.lr: [0.1, 0.2]}}}}"
    one, other = expand(write_grid(text.format(120 * "a")))
    assert one[:111] == other[:111] == 111 * "a" and len(one) == len(other) == 120 and one != other
    assert "rows[0].id: " in error_message(lambda: expand(write_grid(text.format(121 * "a"))))


# By the step that finds them.
MISTAKES: dict[str, tuple[str, list[str]]] = {
    "file": (
        """
        foo: 1
        rows: [{id: a, modl: {}}, {id: 3}]
        seeds: [-1]
        product: {recipe.momentum: 0.9}
        base: {recipe: {lr: 1,5}}
        """,
        [
            "base.recipe: has the key 5, which is not text",
            "foo: unknown key",
            "rows[0].modl: unknown key; did you mean `rows[0].model`?",
            "rows[1].id: ",
            "seeds[0]: ",
            "product.rec",
        ],
    ),
    "product": (
        """
        rows: [{id: a, model: {name: resnet26, footprint: 3}}]
        product: {lr: [0.1], resources.workers: [1, 2], recipe.lr.x: [1], data.flip: [], model.footprint: [3, 5]}
        """,
        [
            "product.lr: ",
            "product.resources.workers: ",
            "product.recipe.lr.x: ",
            "product.data.flip: empty list",
            "product.model.footprint: also set in row a",
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
          - {id: f, model: {name: san10_pairwise, footprint: 4}, recipe: {lr: 1}}
        """,
        [
            "row a, e: recipe.lr: should be a valid number",
            "row b: model.footprnt: unknown key; did you mean `model.footprint`?",
            "row c: model: stage 2 of san10_pairwise with images of 24 x 24 pixels",
            "row d: model.footprint: should be a valid integer",
            "row e: data.source: should be 'folder', ",
            "row e: recipe.epoch: unknown key; did you mean `recipe.epochs`?",
            "row f: model: the footprint must be odd and positive (1, 3, 5, ...), not 4",
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
def test_lists_every_mistake_of_a_step_once(step: str, write_grid: WriteGrid) -> None:
    text, expected = MISTAKES[step]
    path = write_grid("question: What is wrong?\n" + dedent(text))
    lines = error_message(lambda: expand(path)).splitlines()
    for start in expected:
        assert sum(line.startswith(f"{path}: {start}") for line in lines) == 1, start
    assert len(lines) == len(expected)
    assert not any("odd" in line and "pixels" in line for line in lines)  # no advice on sizes where they are not the problem


def test_full_size_models_follow_row_and_override_not_profile() -> None:
    spec = expanded(SMALL_GRID, "model.footprint=5").full_size["pairwise_3"].spec()
    assert (spec.footprint, spec.num_stages, spec.width_mult) == (5, None, 1.0)  # type: ignore[attr-defined]


def test_merge_keys_follow_yaml(write_grid: WriteGrid) -> None:
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


def test_grid_takes_missing_keys_from_the_grid_it_extends(write_grid: WriteGrid) -> None:
    write_grid("question: q\nseeds: [1, 2]\nrows: [{id: a, model: {name: resnet26}}]", "parent.yaml")
    path = write_grid("extends: parent.yaml\nbase: {recipe: {epochs: 3}}\nseeds: [3]")
    grid = expanded(path).grid
    assert (grid.question, grid.seeds) == ("q", (3,))
    assert expand(path)["a"].config.recipe.epochs == 3


def test_rows_have_seeds_of_their_own(write_grid: WriteGrid, tmp_path: Path) -> None:
    path = write_grid(
        "question: q\nseeds: [1, 2]\nproduct: {recipe.lr: [0.1, 0.2]}\n"
        "rows: [{id: a, model: {name: resnet26}, seeds: [5]}, {id: b, model: {name: resnet38}}]"
    )
    trials = open_grid_run(GridRequest(path, "digits", (), tmp_path / "runs")).trials
    named = {row: [trial.seed for trial in trials if trial.row == row] for row in ("a-lr0.1", "a-lr0.2", "b-lr0.1")}
    assert named == {"a-lr0.1": [5], "a-lr0.2": [5], "b-lr0.1": [1, 2]}
    assert {trial.seed for trial in open_grid_run(GridRequest(path, "digits", (), tmp_path / "runs", seeds=1)).trials} == {0}


def test_profile_extends_another() -> None:
    paper, one = (expand(SMALL_GRID, profile=name)["pairwise_3"].config for name in ("imagenet", "imagenet-1gpu"))
    assert one.data == paper.data
    assert (one.resources.workers, one.recipe.grad_accum_steps) == (1, 8)
    assert one.recipe.batch_size // one.recipe.grad_accum_steps == paper.recipe.batch_size // paper.resources.workers == 32
    fast = expand(SMALL_GRID, profile="imagenet-fast")["pairwise_3"].config.recipe
    assert (fast.lr_used, fast.precision, fast.warmup_epochs) == (pytest.approx(0.4), "bfloat16", 5)


def test_profile_can_name_the_model(write_grid: WriteGrid, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: digits\nmodel: {name: resnet26}")
    path = write_grid("question: q\nproduct: {recipe.lr: [0.1, 0.2]}")
    assert {row.config.model.name for row in expand(path, profile=str(profile)).values()} == {"resnet26"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("extends: 3", "extends: must be the name or the path of a profile, not 3"),
        ("extends: mine.yaml", "extends itself"),
        ("extends: none", "mine.yaml: extends: unknown profile 'none'"),
        ("extends: folder.yaml", "give 'folder'"),
        ("model: {num_stages: 2}", "mine.yaml: data.source: missing"),
        ("recipie: {epochs: 3}", "recipie: unknown key; did you mean `recipe`?"),
        ("extends: digits\ndata:", "data: must be a mapping"),
        ("true: {epochs: 3}", "True: unknown key"),
    ],
)
def test_rejects_a_profile(content: str, message: str, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(content)
    found = error_message(lambda: expand(SMALL_GRID, profile=str(profile)))
    assert message in found and found.startswith(str(profile))


def test_rejects_a_profile_in_place_of_a_grid(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: digits\ndata: {root: photos}")
    assert "this is a profile, not a grid" in error_message(lambda: expand(tmp_path / "mine.yaml"))


PROFILE = "extends: folder\ndata: {root: photos}\nrecipe: {epochs: 7}\n"


def test_profile_can_be_a_file_whose_paths_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "laptop.yaml").write_text(PROFILE)
    (tmp_path / "mine" / "longer.yaml").write_text("extends: laptop.yaml\nrecipe: {epochs: 9}\n")
    monkeypatch.chdir(tmp_path)
    for name, epochs in (("laptop", 7), ("longer", 9)):
        config = expand(SMALL_GRID, profile=f"mine/{name}.yaml")["pairwise_3"].config
        assert (config.data.root, config.recipe.epochs) == (str(tmp_path / "mine" / "photos"), epochs)
        assert config.data.size == 64


def test_relative_paths_of_grid_and_overrides_are_relative_to_the_current_folder(
    write_grid: WriteGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_grid("question: q\nbase: {data: {source: folder, root: here}}\nrows: [{id: a, model: {name: resnet26}}]")
    assert expand(path)["a"].config.data.root == str(tmp_path / "here")
    assert expand(path, "data.root=there")["a"].config.data.root == str(tmp_path / "there")
    for root in ("/there", "~/there"):
        assert expand(path, f"data.root={root}")["a"].config.data.root == os.path.expanduser(root)


def test_text_of_an_override_is_not_yaml(write_grid: WriteGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_grid("question: q\nbase: {data: {source: folder}}\nrows: [{id: a, model: {name: resnet26}}]")
    for name in ("images #2", "2024-05-01", "2024", "[raw]", "a: b", "no", "'", "~no-such-user"):
        assert expand(path, f"data.root={name}")["a"].config.data.root == str(tmp_path / name)
    assert expand(path, "data.root='a b'")["a"].config.data.root == str(tmp_path / "a b")
    assert expand(path, "data.root=x", "data.lists=null")["a"].config.data.lists is None


MODEL = "{id: a, model: {name: resnet26}}"
PLOT = "plot: {x: model.footprint, series: model.name, label: l}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question: [", r"grid.yaml:\d: not valid YAML"),
        ("- a list", "must be a mapping"),
        ("question: q\nquestion: q", "grid.yaml:1: .*duplicate key 'question'"),
        ("question: q\nrows: [{id: a, model: {<<: {name: b}, x: 1, x: 2}}]", "grid.yaml:2: .*duplicate key 'x'"),
        ("question: q\nrows: [{id: a, model: {<<: 3}}]", "grid.yaml:2: .*expected a mapping"),
        (
            "question: q\nseeds: [0]\nrows: [{id: a, recipe: {epochs: 010}, model: {name: resnet26}}]",
            "yaml:3: .*010 would be read as 8",
        ),
        (f"question: q\nseeds: [0, 1:30]\nrows: [{MODEL}]", "yaml:2: .*1:30 would be read as 90"),
        ("question: " + 3000 * "[", "not valid YAML"),
        ("extends: none.yaml", "grid.yaml: extends: .*none.yaml: cannot read"),
        ("extends: 3", "extends: .*not 3"),
        ("extends: grid.yaml", "grid.yaml: extends: .*itself"),
        (f"question: q\nseeds: []\nrows: [{MODEL}]", r"seeds: list should have at least 1 item, not \[\]"),
        (f"question: q\nseeds: [1, 1]\nrows: [{MODEL}]", "unique.*: 1"),
        ("question: q\nrows: [{id: a, model: {name: resnet26}, seeds: [3, 3]}]", "seed of a must be unique.*: 3"),
        ("question: q\nrows: [{id: 'a b'}]", r'rows\[0\].id: .*"a b"'),
        ("question: q\nrows: [{id: a, model: resnet26}]", r'rows\[0\].model: .*"resnet26"'),
        ("question: q", "rows: missing"),
        ("question: q\nrows: []\nproduct: {model.name: [resnet26]}", "rows: .*at least 1"),
        (f"question: q\nrows: [{MODEL}, {{id: a-lr1}}]\nproduct: {{recipe.lr: [1, 2, 1]}}", "unique.*: a-lr1, a-lr1-lr1"),
        (f"question: q\ntable: footprint\nrobustness: rotation\nrows: [{MODEL}]", "table: 'footprint'.*rotation"),
        (f"question: q\ntable: rotation\nrows: [{MODEL}]", "robustness: missing"),
        (f"question: q\ntable: footprnt\nrows: [{MODEL}]", "did you mean `footprint`"),
        (
            f"question: q\n{PLOT}\nrows: [{MODEL}, {{id: b, model: {{name: resnet26}}, recipe: {{lr: 1}}}}]",
            "plot: rows a and b",
        ),
        (f"question: q\n{PLOT.replace('footprint', 'footprnt')}\nrows: [{MODEL}]", "plot.x: row a .*`model.footprnt`"),
        (f"question: q\n{PLOT.replace('model.name', 'no.where')}\nrows: [{MODEL}]", "plot.series: row a .*`no.where`"),
        ("question: q\nrows: [{id: a, model: {}}]", "model.name: missing"),
    ],
)
def test_rejects_a_broken_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        expand(path)


@pytest.mark.parametrize(
    ("rows", "stopping", "message"),
    [
        ("table: footprint, rows: [{id: pairwise_3, model: {name: resnet26}}]", "grace_epochs: 1", ".*table 'footprint'"),
        ("product: {model.name: [resnet26], recipe.epochs: [4, 8]}", "grace_epochs: 1", ".*4 in row .* and 8 in row"),
        (f"rows: [{MODEL}]", "grace_epochs: 18", ".*recipe.epochs=18"),
        (f"rows: [{MODEL}]", "grace_epochs: 0", ".grace_epochs: .*not 0"),
        (f"rows: [{MODEL}]", "grace_epochs: 1, reduction: 1", ".reduction: .*not 1"),
        (
            f"base: {{recipe: {{validate_every_n_epochs: 2}}}}, rows: [{MODEL}]",
            "grace_epochs: 1",
            ".*validation after each epoch",
        ),
    ],
)
def test_rejects_early_stopping(rows: str, stopping: str, message: str, write_grid: WriteGrid) -> None:
    path = write_grid(f"{{question: q, {rows}, early_stopping: {{{stopping}}}}}")
    with pytest.raises(UserError, match=f"^{path}: early_stopping{message}"):
        expand(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.lr"], "not KEY=VALUE"),
        (["recipe..epochs=3"], "recipe..epochs=3"),
        (["recipe.lr=[1"], "recipe.lr=[1"),
        (["recipe.init="], "override 'recipe.init=': no value"),
        (["recipe=3"], "override 'recipe=3': recipe: "),
        (["model=resnet26"], "override 'model=resnet26': model: "),
        (["data.flip=perhaps"], "override 'data.flip=perhaps': data.flip: "),
        (["data.source=folder"], "override 'data.source=folder': data.source: folder needs data.root"),
        (["recipe.epochs=10000"], "9999"),
        (["recipe.ema_decay=1"], "less than 1"),
        (["recipe.precision=float16"], "'bfloat16'"),
        (["recipe.optimizer=lion"], "'sgd' or 'adamw'"),
        (["recipe.sync_batchnorm=true"], "resources.gpus=1"),
        (["recipe.optimizer=adamw", "recipe.nesterov=true"], "recipe.optimizer=sgd"),
        (["resources.gpus=8"], "resources.workers"),
        (["resources.gpus=0.5", "resources.workers=2"], "0 or 1"),
        (["data.resize=20"], "must be at least data.size=24 (a larger size needs a larger resize), not 20"),
        (["data.crop_area=[0.9, 0.1]"], "increasing"),
        (["data.crop_ratio=[2, 1]"], "increasing"),
        (["recipe.grad_accum_steps=64"], "at most 32"),
        (["recipe.init=a", "recipe.freeze=[stag1]"], "did you mean `stage1`?"),
        (["recipe.init=a", "recipe.freeze=[stem, stage1, stage2, head]"], "recipe.freeze: freezes the whole model"),
        (["recipe.layer_decay=2"], "recipe.layer_decay: "),
    ],
)
def test_rejects_an_override(overrides: list[str], message: str) -> None:
    assert message in error_message(lambda: expand(SMALL_GRID, *overrides))


def test_rejects_an_override_of_a_product_axis(write_grid: WriteGrid) -> None:
    path = write_grid("{question: q, rows: [{id: a, model: {name: resnet26}}], product: {recipe.lr: [0.1, 0.2]}}")
    assert "product.recipe.lr: cannot be changed by override" in error_message(lambda: expand(path, "recipe.lr=0.5"))


def test_rejects_a_profile_that_is_unknown_or_has_the_name_of_ours(tmp_path: Path) -> None:
    for name in ("laptop", "../grids/footprint"):
        message = error_message(lambda name=name: expand(SMALL_GRID, profile=name))
        assert f"{name!r}" in message and "imagenet-1gpu" in message
    (tmp_path / "digits.yaml").write_text(PROFILE)
    mine = str(tmp_path / "digits.yaml")
    assert f"{mine}: the project has a profile" in error_message(lambda: expand(SMALL_GRID, profile=mine))
