"""Commands of `san` that train nothing, and the error messages for invalid input."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from experiments.cli import cli
from experiments.grids.config import PROJECT_DIR
from experiments.grids.expand import expand, profile_path
from experiments.paper.tables import paper_rows, table_names
from experiments.runs.workspace import default_runs
from san import create_model, list_models, load_checkpoint, save_checkpoint
from san.models.released import save_released_checkpoint
from tests.experiments.conftest import SMALL_GRID, San

GRIDS_DIR = PROJECT_DIR / "experiments" / "grids"


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAN_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_models_as_json(run_san: San) -> None:
    code, out, _ = run_san("models", "san*_pairwise", "--json")
    assert code == 0
    assert [(model["name"], model["depths"][0], model["relation"]) for model in json.loads(out)] == [
        ("san10_pairwise", 2, "subtraction"),
        ("san15_pairwise", 3, "subtraction"),
        ("san19_pairwise", 3, "subtraction"),
    ]


def test_models_are_listed_with_their_fields(run_san: San) -> None:
    code, out, _ = run_san("models", "resnet26")
    assert code == 0
    assert out.split() == [
        "resnet26",
        "depths=[1,2,4,1]",
        "widths=[256,512,1024,2048]",
        "num_stages=null",
        "width_mult=1.0",
        "footprint=3",
        "stem_width=64",
    ]


def test_complexity_of_a_grid_as_json(run_san: San) -> None:
    code, out, _ = run_san("complexity", "--grid", str(GRIDS_DIR / "relation.yaml"), "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["id"] for row in rows] == list(paper_rows("relation"))
    by_id = {row["id"]: row for row in rows}
    assert by_id["pairwise_subtraction"]["flops_paper"] == 2_155_268_622
    assert by_id["patchwise_concatenation"]["params"] == 11_841_124
    for row in rows:
        assert row.keys() == {"id", "params", "flops_paper", "flops_actual", "stages"}
        for count in ("params", "flops_paper", "flops_actual"):
            assert type(row[count]) is int
            assert sum(stage[count] for stage in row["stages"]) == row[count], (row["id"], count)


def test_complexity_of_a_grid_next_to_the_numbers_of_the_paper(run_san: San) -> None:
    grid = str(GRIDS_DIR / "position.yaml")
    code, out, _ = run_san("complexity", "--grid", grid)
    assert code == 0
    heading, _, none, absolute, relative = out.splitlines()
    assert re.split("  +", heading) == ["model", "params M", "printed", "FLOPs G (paper)", "printed", "FLOPs G (actual)"]
    assert relative.split()[:5] == ["pairwise_relative", "10.532", "10.5", "2.155", "2.2"]
    assert [len(line) for line in (none, absolute, relative)] == [len(heading)] * 3
    for arguments in (["--size", "256"], ["--size", "256", "--stages"]):
        code, out, _ = run_san("complexity", "--grid", grid, *arguments)
        assert code == 0
        assert "printed" not in out  # the paper's are for 224 pixels
        assert len(out.splitlines()) == (2 + 3 * 8 if "--stages" in arguments else 5)


def test_complexity_of_a_model_by_stage(run_san: San) -> None:
    code, out, _ = run_san("complexity", "san10_pairwise", "footprint=9")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == [
        "san10_pairwise",
        "stem",
        *(f"stage{i}" for i in range(1, 6)),
        "head",
    ]
    assert out.splitlines()[2].split()[1:3] == ["10.532", "2.533"]  # table "footprint" prints 10.5 and 2.5


def test_complexity_without_arguments_lists_all_models(run_san: San) -> None:
    code, out, _ = run_san("complexity", "--json")
    assert code == 0
    assert [row["id"] for row in json.loads(out)] == list_models()


def test_complexity_imports_no_heavy_packages() -> None:
    heavy = ["ray", "deepspeed", "mlflow", "nvidia.dali", "matplotlib"]
    code = f"""
import sys
from experiments.cli import main
for arguments in (["resnet26"], ["--grid", {str(SMALL_GRID)!r}], ["resnet27"]):
    sys.argv = ["san", "complexity", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 2
assert not [name for name in {heavy} if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT_DIR)


def test_plan_lists_the_cheapest_trials_first_and_writes_nothing(run_san: San, tmp_path: Path) -> None:
    code, out, _ = run_san("plan", SMALL_GRID, "--seeds", "2", "--json")
    assert code == 0
    cells = json.loads(out)
    by_cost = ("patchwise_3", "pairwise_3", "resnet26_3")
    assert [(cell["row"], cell["seed"]) for cell in cells] == [(row, seed) for row in by_cost for seed in (0, 1)]
    assert len({cell["key"] for cell in cells}) == 6
    assert not any(cell["finished"] for cell in cells)
    assert not (tmp_path / "runs").exists()


def test_only_selects_rows(run_san: San) -> None:
    _, out, _ = run_san("plan", SMALL_GRID, "--only", "resnet26_3", "--only", "pairwise_3", "--json")
    assert {cell["row"] for cell in json.loads(out)} == {"resnet26_3", "pairwise_3"}
    code, _, err = run_san("plan", SMALL_GRID, "--only", "resnet26")
    assert code == 2
    assert "--only resnet26: " in err and "did you mean resnet26_3? Rows: pairwise_3, resnet26_3, patchwise_3" in err


def test_shells_complete_commands() -> None:
    words = {"_SAN_COMPLETE": "bash_complete", "COMP_WORDS": "san del", "COMP_CWORD": "1", "PYTHONPATH": str(PROJECT_DIR)}
    done = subprocess.run([sys.executable, "-m", "experiments"], env=os.environ | words, capture_output=True, text=True)
    assert done.stdout == "plain,delete\n"


def test_plan_leaves_no_file_behind(tmp_path: Path) -> None:
    """Neither a missing dataset in a mistyped `data.root`, nor temporary files."""
    places = {name: tmp_path / name for name in ("TMPDIR", "SAN_RUNS")}
    for folder in places.values():
        folder.mkdir()
    variables = os.environ | {name: str(folder) for name, folder in places.items()} | {"PYTHONPATH": str(PROJECT_DIR)}
    command = [sys.executable, "-m", "experiments", "plan", str(SMALL_GRID), f"data.root={tmp_path / 'imagnet'}"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 trials, 3 to train" in done.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_report_of_an_untrained_grid(run_san: San, tmp_path: Path) -> None:
    code, out, err = run_san("report", SMALL_GRID, "--seeds", "2", "--json")
    assert code == 0
    assert [(line["id"], line["paper_top1"], line["top1"]) for line in json.loads(out)] == [
        ("pairwise_3", 75.3, None),
        ("resnet26_3", 76.0, None),
        ("patchwise_3", 77.4, None),
    ]
    for options, hint in (((), ""), (("--runs", tmp_path / "my runs"), f" --runs '{tmp_path}/my runs'")):
        _, _, err = run_san("report", SMALL_GRID, *options)
        assert f"train the grid with `san run tests/experiments/small.yaml --profile digits{hint}`, or" in err


def test_runs_of_an_empty_store(run_san: San, tmp_path: Path) -> None:
    assert run_san("runs") == (0, "", f"no runs in sqlite:///{tmp_path}/runs/mlflow.db\n")


def test_convert_round_trip(run_san: San, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pth", tmp_path / "theirs.pth"
    model = create_model("san10_patchwise", 3, footprint=5)
    save_checkpoint(model, ours)
    line = f"san10_patchwise footprint=5, 3 classes, {sum(p.numel() for p in model.parameters())} parameters\n"
    assert run_san("convert", str(ours), str(theirs), "--to", "released") == (0, f"{theirs}: {line}", "")
    written = torch.load(theirs, weights_only=True)["state_dict"]
    assert {"module.conv_in.weight", "module.layer4.0.sam.conv_w.5.bias"} <= written.keys()
    ours.write_text("old")
    assert run_san("convert", str(theirs), str(ours))[0] == 2
    assert ours.read_text() == "old"
    assert run_san("convert", str(theirs), str(ours), "--force") == (0, f"{ours}: {line}", "")
    state = load_checkpoint(ours).state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert sorted(os.listdir(tmp_path)) == ["ours.pth", "theirs.pth"]


def test_convert_reports_fields_that_the_released_format_does_not_store(run_san: San, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pth", tmp_path / "theirs.pth"
    fields = ("num_stages=2", "width_mult=0.5", "footprint=9")
    model = create_model("san10_pairwise", 3, footprint=9, num_stages=2, width_mult=0.5)
    save_checkpoint(model, ours)
    hidden = ", ".join(("name=san10_pairwise", *fields))
    note = f"note: the released format does not store {hidden}; give the missing values as overrides when you load {theirs}\n"
    code, _, err = run_san("convert", ours, theirs, "--to", "released")
    assert (code, err) == (0, note)
    assert run_san("convert", theirs, ours, "--force", "--name", "san10_pairwise", *fields)[0] == 0
    assert load_checkpoint(ours).spec == model.spec


def released_file(tmp_path: Path) -> str:
    path = tmp_path / "released.pth"
    save_released_checkpoint(create_model("san10_pairwise", 3), path)
    return str(path)


def own_file(tmp_path: Path) -> str:
    path = tmp_path / "own.pth"
    save_checkpoint(create_model("san10_pairwise", 3), path)
    return str(path)


def bad_grid(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "question: q\ntable: footprint\nrows: [{id: a, model: {name: resnet26}, recipe: {epoch: 1}, data: {flips: true}}]\n"
    )
    return str(path)


def image_folder(root: Path, classes: tuple[str, ...], empty: tuple[str, ...] = ()) -> str:
    for split in ("train", "val"):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            if name not in empty:
                (folder / "1.jpg").write_bytes(b"never decoded here")
    return f"data.root={root}"


# Each error message is tested next to the function that raises it; here, that the command prints it and writes nothing.
MISTAKES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "name as a field of a released file": (
        lambda tmp: ["convert", released_file(tmp), str(tmp / "out.pth"), "name=san10_pairwise"],
        ["override `name`: not a field of a model; set the model with --name"],
    ),
    "fields for a checkpoint that stores its model": (
        lambda tmp: ["convert", own_file(tmp), str(tmp / "out.pth"), "footprint=9", "--name", "san10_pairwise"],
        ["own.pth: this checkpoint already stores its model; leave out --name, footprint=9\n"],
    ),
    "pattern without a match": (lambda tmp: ["models", "zzz"], ["no model matches 'zzz'"]),
    "image size over the limit": (lambda tmp: ["complexity", "resnet26", "--size", "400000000"], ["--size"]),
    "a million blocks": (
        lambda tmp: ["complexity", "san10_pairwise", "depths=[1000000,1,1,1,1]"],
        ["a stage may have at most 1000 blocks, not 1000000"],
    ),
    "several unknown keys": (
        lambda tmp: ["run", bad_grid(tmp)],
        [
            "row a: recipe.epoch: unknown key; did you mean `recipe.epochs`?",
            "row a: data.flips: unknown key; did you mean `data.flip`?",
        ],
    ),
    "missing grid": (lambda tmp: ["run", "no-such.yaml"], ["no-such.yaml: cannot read", "give the path of a YAML file"]),
    "missing data folder": (
        lambda tmp: ["run", str(SMALL_GRID), "data.source=folder", f"data.root={tmp / 'nowhere'}"],
        ["nowhere"],
    ),
    "empty class folders": (
        lambda tmp: [
            "run", str(SMALL_GRID), "data.source=folder", image_folder(tmp / "images", ("cat", "dog", "owl"), ("dog", "owl"))
        ],
        ["dog", "owl"],
    ),
    "more workers than CPUs": (
        lambda tmp: ["run", str(SMALL_GRID), "placement.workers=20"],
        ["a trial needs 20 workers with 1 CPU each", ". To fit this", "set `placement.workers=2 recipe.grad_accum_steps=10`"],
    ),
    "more workers than images in a batch": (
        lambda tmp: ["run", str(SMALL_GRID), "placement.workers=2", "recipe.batch_size=1"],
        ["batch"],
    ),
    "footprint larger than a feature map": (
        lambda tmp: ["run", str(SMALL_GRID), "model.footprint=13"],
        [
            "row pairwise_3: model: stage 2 of san10_pairwise with images of 24 x 24 pixels: a 13x13 footprint with "
            "reflection padding needs a feature map of at least 7x7",
            "row patchwise_3: model: stage 2 of san10_patchwise with images of 24 x 24 pixels: a 13x13 footprint",
        ],
    ),
    "runs in a file": (lambda tmp: ["run", str(SMALL_GRID), "--runs", bad_grid(tmp)], ["bad.yaml", "cannot write"]),
    "data in a file": (
        lambda tmp: ["plan", str(SMALL_GRID), f"data.root={bad_grid(tmp)}/x"],
        ["bad.yaml/x: no such folder, and its parent ", "write the dataset there with `san data prepare digits"],
    ),
    "data in a read-only folder": (
        lambda tmp: ["run", str(SMALL_GRID), "data.root=/proc/x"],
        ["/proc/x: cannot read or write images", "set another data.root"],
    ),
    "digits in a file": (
        lambda tmp: ["data", "prepare", "digits", bad_grid(tmp) + "/x"],
        ["cannot write", "another folder"],
    ),
    "complexity of a model and a grid": (
        lambda tmp: ["complexity", "resnet26", "--grid", str(SMALL_GRID)],
        ["both a model and a grid: 'resnet26' and `--grid "],
    ),
    "complexity of an unknown model": (
        lambda tmp: ["complexity", "san10_pairwize"],
        ["san: unknown model 'san10_pairwize'; did you mean 'san10_pairwise'? Choose from: san10_pairwise, "],
    ),
    "complexity with unknown fields": (
        lambda tmp: ["complexity", "resnet26", "footprnt=5", "relation=dot"],
        ["resnet26: footprnt: unknown key; did you mean `footprint`?", "resnet26: relation: unknown key"],
    ),
    "complexity of two models": (
        lambda tmp: ["complexity", "san10_pairwise", "name=resnet26"],
        ["override name=resnet26: the model is already set to san10_pairwise; leave out this override"],
    ),
    "complexity of small images": (
        lambda tmp: ["complexity", "--grid", str(SMALL_GRID), "--size", "20"],
        ["pairwise_3: stage 4 of san10_pairwise with images of 20 x 20", "resnet26 needs images of at least 32 x 32"],
    ),
    "address without a cluster": (
        lambda tmp: ["run", str(SMALL_GRID), "--address", "127.0.0.1:9"],
        ["cannot join a Ray cluster at '127.0.0.1:9'"],
    ),
    "pages of an empty store": (lambda tmp: ["ui"], ["no runs yet; train a grid with `san run`"]),
    "weights in an unknown format": (
        lambda tmp: ["convert", bad_grid(tmp), str(tmp / "ours.pth")],
        ["bad.yaml: not a file written by torch.save, or damaged"],
    ),
    "missing weights": (
        lambda tmp: ["convert", str(tmp / "no-such.pth"), str(tmp / "ours.pth")],
        ["no-such.pth: cannot read this file (No such file or directory)"],
    ),
    "a file name that is too long": (lambda tmp: ["show", 300 * "x", "3"], ["cannot read this file (File name too long)"]),
    "target that exists": (
        lambda tmp: ["convert", "a.pth", bad_grid(tmp)],
        ["bad.yaml: already exists; choose another file, or overwrite this one with --force"],
    ),
    "target in a bucket": (
        lambda tmp: ["convert", released_file(tmp), "s3://bucket/model.pth"],
        ["san: s3://...: `san convert` writes local files only; give a local path as TARGET\n"],
    ),
    "target on a web server": (
        lambda tmp: ["convert", released_file(tmp), "http://me:secret@host/model.pth"],
        ["san: http://...: `san convert` writes local files only; give a local path as TARGET\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects(mistake: str, run_san: San, tmp_path: Path) -> None:
    arguments, messages = MISTAKES[mistake]
    code, out, err = run_san(*arguments(tmp_path))
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err
    assert not (tmp_path / "runs").exists()


ACCEPTED = (
    "not a checkpoint; give a file or folder (local or s3://...), a trial's key (see `san runs`), the id of an MLflow run, "
    f"models:/NAME/VERSION, or a network with weights ({', '.join(list_models(pretrained=True))})"
)


@pytest.mark.parametrize(
    "arguments", [["evaluate"], ["robustness"], ["show", "3"], ["robustness", "other.pt"], ["convert", "out.pth"]], ids=" ".join
)
@pytest.mark.parametrize("name", ["http://me:secret@host/model.pth", "http://host/model.pth?version=1", ""])
def test_rejects_an_invalid_checkpoint_name(arguments: list[str], name: str, run_san: San) -> None:
    command, *others = arguments
    shown = "http://..." if name else "''"
    assert run_san(command, name, *others) == (2, "", f"san: {shown}: {ACCEPTED}\n")


def test_rejects_an_empty_runs_option(run_san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run_san("runs", "--runs", "")
    assert (code, err) == (
        2,
        "san: --runs: empty value (is a shell variable unset?); give a folder or a URI, or leave out --runs\n",
    )
    monkeypatch.setenv("SAN_RUNS", "")
    assert default_runs() == str(PROJECT_DIR / "runs")


@pytest.mark.parametrize(
    "command",
    [["plan", str(SMALL_GRID)], ["run", str(SMALL_GRID)], ["study"], ["submit", str(SMALL_GRID)]],
    ids=lambda command: command[0],
)
def test_rejects_an_empty_address(command: list[str], run_san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # would be used without --address
    sentence = "san: --address: empty value (is a shell variable unset?); give an address, or leave out --address\n"
    assert run_san(*command, "--address", "") == (2, "", sentence)
    assert not (tmp_path / "runs").exists()


def test_an_empty_ray_address_is_ignored(run_san: San, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    code, out, _ = run_san("plan", str(SMALL_GRID))
    assert code == 0
    assert "\nthis machine has " in out


def _commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name)


def _command(path: Sequence[str]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


COMMANDS = list(_commands(cli))


def test_every_command_has_a_heading_and_a_whole_summary() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert "..." not in shown.partition("Options:")[2]
    listed = [name for names in type(cli).headings.values() for name in names]
    assert sorted(listed) == sorted(cli.commands)


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_help_is_complete(path: tuple[str, ...]) -> None:
    command = _command(path)
    shown = CliRunner().invoke(cli, [*path, "--help"])
    assert shown.exit_code == 0 and shown.output.startswith("Usage: ")
    assert len((command.help or "").partition("\n")[0]) <= 62
    if isinstance(command, click.Group):
        assert "..." not in shown.output.partition("Commands:")[2]
    unfinished = [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not re.search(r"\.(  \[default: .*\])?$", option.help or "")
    ]
    assert not unfinished, "options without help, or whose help has no full stop"


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_example_in_help_parses(path: tuple[str, ...]) -> None:
    """Parses it without running it; the grid and the profile must exist."""
    command = _command(path)
    found = re.search(r"(?:Example|Start with): san (.+)", f"{command.help}\n{command.epilog or ''}")
    assert found, "no example"
    words = shlex.split(found[1])
    assert words[: len(path)] == list(path)
    context, command = click.Context(cli, info_name="san"), cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
        rest = words[:1] if isinstance(command, click.Group) else list(words)
        context = command.make_context(command.name, rest, context)
    grid, profile = context.params.get("grid"), context.params.get("profile")
    if isinstance(grid, Path):
        expand(PROJECT_DIR / grid, profile or "digits", context.params.get("overrides", ()), table_names())
    if profile is not None:
        profile_path(profile)


def test_grid_can_be_given_by_name(run_san: San) -> None:
    code, out, err = run_san("plan", "footprint")
    assert (code, "pairwise_3 " in out) == (0, True), err
    assert run_san("plan", "footprnt") == (2, "", "san: footprnt: no such file or grid; did you mean footprint?\n")


def test_doctor_shows_which_kernels_run(run_san: San) -> None:
    code, out, _ = run_san("doctor")
    assert code == 0
    assert re.search(r"^cpu kernels run from .*\.so$", out, re.MULTILINE)
    assert re.search(r"^cuda kernels (run from|not available: )", out, re.MULTILINE)
    assert "g++: " in out and "torch " in out
