"""The command `san`: bad input is one clear sentence, exit code 2, and nothing half-written."""

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

from experiments.cli import cli, main
from experiments.grids.config import PROJECT_DIR
from experiments.grids.expand import expand, profile_path
from experiments.grids.paper import paper_rows, table_names
from experiments.runs.workspace import default_runs
from san import create_model, list_models, load_checkpoint, save_checkpoint
from san.models.released import save_released_checkpoint
from tests.experiments.conftest import SMALL_GRID

GRIDS_DIR = PROJECT_DIR / "experiments" / "grids"

San = Callable[..., tuple[int, str, str]]


@pytest.fixture
def san(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> San:
    """Runs the command in this process, with its runs in a fresh folder; returns exit code, stdout, stderr."""
    monkeypatch.setenv("SAN_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["san", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["models"],
        ["data"],
        ["data", "prepare"],
        ["run"],
        ["report"],
        ["ui"],
        ["runs"],
        ["plan"],
        ["study"],
        ["complexity"],
        ["convert"],
        ["evaluate"],
        ["robustness"],
        ["show"],
    ],
)
def test_help(command: list[str], san: San) -> None:
    code, out, _ = san(*command, "--help")
    assert code == 0
    assert out.startswith("Usage: san")


def test_models_as_json(san: San) -> None:
    code, out, _ = san("models", "san*_pairwise", "--json")
    assert code == 0
    assert [(model["name"], model["depths"][0], model["relation"]) for model in json.loads(out)] == [
        ("san10_pairwise", 2, "subtraction"),
        ("san15_pairwise", 3, "subtraction"),
        ("san19_pairwise", 3, "subtraction"),
    ]


def test_models_are_shown_as_overrides_are_written(san: San) -> None:
    code, out, _ = san("models", "resnet26")
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


def test_complexity_of_a_grid_as_json(san: San) -> None:
    code, out, _ = san("complexity", "--grid", str(GRIDS_DIR / "relation.yaml"), "--json")
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


def test_complexity_of_a_grid_beside_the_printed_numbers(san: San) -> None:
    grid = str(GRIDS_DIR / "position.yaml")
    code, out, _ = san("complexity", "--grid", grid)
    assert code == 0
    heading, _, none, absolute, relative = out.splitlines()
    assert re.split("  +", heading) == ["model", "params M", "printed", "FLOPs G (paper)", "printed", "FLOPs G (actual)"]
    assert relative.split()[:5] == ["pairwise_relative", "10.532", "10.5", "2.155", "2.2"]
    assert [len(line) for line in (none, absolute, relative)] == [len(heading)] * 3
    for arguments in (["--size", "256"], ["--size", "256", "--stages"]):
        code, out, _ = san("complexity", "--grid", grid, *arguments)
        assert code == 0
        assert "printed" not in out  # the paper's are for 224 pixels
        assert len(out.splitlines()) == (2 + 3 * 8 if "--stages" in arguments else 5)


def test_complexity_of_a_model_tells_its_stages(san: San) -> None:
    code, out, _ = san("complexity", "san10_pairwise", "footprint=9")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == [
        "san10_pairwise",
        "stem",
        *(f"stage{i}" for i in range(1, 6)),
        "head",
    ]
    assert out.splitlines()[2].split()[1:3] == ["10.532", "2.533"]  # table "footprint" prints 10.5 and 2.5


def test_complexity_of_all_variants(san: San) -> None:
    code, out, _ = san("complexity", "--json")
    assert code == 0
    assert [row["id"] for row in json.loads(out)] == list_models()


def test_complexity_does_not_wait_for_what_it_does_not_use() -> None:
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


def test_seeds_come_instead_of_the_grids(san: San) -> None:
    code, out, _ = san("plan", str(SMALL_GRID), "--seeds", "2", "--json")
    assert code == 0
    cells = json.loads(out)
    by_cost = ("patchwise_3", "pairwise_3", "resnet26_3")
    assert [(cell["row"], cell["seed"]) for cell in cells] == [(row, seed) for row in by_cost for seed in (0, 1)]
    assert len({cell["key"] for cell in cells}) == 6
    code, out, _ = san("report", str(SMALL_GRID), "--seeds", "2", "--json")
    assert code == 0
    assert [line["id"] for line in json.loads(out)] == ["pairwise_3", "resnet26_3", "patchwise_3"]


def test_plan_runs_nothing(san: San, tmp_path: Path) -> None:
    code, out, _ = san("plan", str(SMALL_GRID), "--json")
    assert code == 0
    assert [(cell["row"], cell["finished"]) for cell in json.loads(out)] == [
        ("patchwise_3", False),
        ("pairwise_3", False),
        ("resnet26_3", False),
    ]
    assert not (tmp_path / "runs").exists()


def test_report_as_json(san: San) -> None:
    code, out, _ = san("report", str(SMALL_GRID), "--json")
    assert code == 0
    assert [(line["id"], line["paper_top1"], line["top1"]) for line in json.loads(out)] == [
        ("pairwise_3", 75.3, None),
        ("resnet26_3", 76.0, None),
        ("patchwise_3", 77.4, None),
    ]


def test_hints_are_for_the_runs_that_were_asked_for(san: San, tmp_path: Path) -> None:
    command = "san run tests/experiments/small.yaml --profile digits"
    assert f"train the grid with `{command}`, or" in san("report", str(SMALL_GRID))[2]
    elsewhere = tmp_path / "my runs"
    assert (
        f"train the grid with `{command} --runs '{elsewhere}'`, or"
        in san("report", str(SMALL_GRID), "--runs", str(elsewhere))[2]
    )


def test_runs_of_an_empty_store(san: San, tmp_path: Path) -> None:
    code, out, err = san("runs")
    assert (code, out) == (0, "")
    assert err == f"no runs in sqlite:///{tmp_path}/runs/mlflow.db\n"


def test_convert_there_and_back(san: San, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pth", tmp_path / "theirs.pth"
    model = create_model("san10_patchwise", 3, footprint=5)
    save_checkpoint(model, ours)
    line = f"san10_patchwise footprint=5, 3 classes, {sum(p.numel() for p in model.parameters())} parameters\n"
    assert san("convert", str(ours), str(theirs), "--to", "released") == (0, f"{theirs}: {line}", "")
    written = torch.load(theirs, weights_only=True)["state_dict"]
    assert {"module.conv_in.weight", "module.layer4.0.sam.conv_w.5.bias"} <= written.keys()
    ours.write_text("old")
    assert san("convert", str(theirs), str(ours))[0] == 2
    assert ours.read_text() == "old"
    assert san("convert", str(theirs), str(ours), "--force") == (0, f"{ours}: {line}", "")
    state = load_checkpoint(ours).state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert sorted(os.listdir(tmp_path)) == ["ours.pth", "theirs.pth"]


def test_convert_tells_what_a_released_file_does_not(san: San, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours.pth"), str(tmp_path / "theirs.pth")
    save_checkpoint(create_model("san10_pairwise", 3, footprint=9, num_stages=2, width_mult=0.5), ours)
    code, _, err = san("convert", ours, theirs, "--to", "released")
    hidden = "name=san10_pairwise, num_stages=2, width_mult=0.5, footprint=9"
    assert (code, err) == (
        0,
        f"note: the released format does not store {hidden}; give the missing values as overrides when you load {theirs}\n",
    )
    told = ("--name", "san10_pairwise", "num_stages=2", "width_mult=0.5", "footprint=9")
    assert san("convert", theirs, ours, "--force", *told)[0] == 0
    assert load_checkpoint(ours).spec == create_model("san10_pairwise", 3, footprint=9, num_stages=2, width_mult=0.5).spec
    needless = ("footprint=9", "--name", "san10_pairwise")
    code, _, err = san("convert", ours, theirs, "--force", *needless)
    assert (code, err) == (2, f"san: {ours}: this checkpoint already stores its model; leave out --name, footprint=9\n")


def released_file(tmp_path: Path) -> str:
    path = tmp_path / "released.pth"
    save_released_checkpoint(create_model("san10_pairwise", 3), path)
    return str(path)


def bad_grid(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "question: q\ntable: footprint\nrows: [{id: a, model: {name: resnet26, footprnt: 3}, recipe: {epoch: 1}}]\n"
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


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "a name among the fields of a released file": (
        lambda tmp: ["convert", released_file(tmp), str(tmp / "out.pth"), "name=san10_pairwise"],
        ["override `name`: not a field of a model; set the model with --name"],
    ),
    "a field that a released file's model does not have": (
        lambda tmp: ["convert", released_file(tmp), str(tmp / "out.pth"), "path=x"],
        ["san10_pairwise has no field path; its fields: depths"],
    ),
    "a pattern that nothing matches": (lambda tmp: ["models", "zzz"], ["no model matches 'zzz'"]),
    "an image beyond all sizes": (lambda tmp: ["complexity", "resnet26", "--size", "400000000"], ["--size"]),
    "a stage of a million blocks": (
        lambda tmp: ["complexity", "san10_pairwise", "depths=[1000000,1,1,1,1]"],
        ["a stage may have at most 1000 blocks, not 1000000"],
    ),
    "unknown keys and values, all at once": (
        lambda tmp: ["run", bad_grid(tmp)],
        [
            "row a: recipe.epoch: unknown key; did you mean `recipe.epochs`?",
            "row a: model.footprnt: unknown key; did you mean `model.footprint`?",
        ],
    ),
    "missing grid": (lambda tmp: ["run", "no-such.yaml"], ["no-such.yaml: cannot read", "give the path of a grid"]),
    "unknown profile": (
        lambda tmp: ["run", str(SMALL_GRID), "--profile", "laptop"],
        ["unknown profile 'laptop'; profiles: digits, imagenet, imagenet-1gpu, imagenet-fast, study"],
    ),
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
        ["a cell needs 20 workers with 1 CPU each", ". To fit this", "set `placement.workers=2 recipe.grad_accum_steps=10`"],
    ),
    "more workers than images in a batch": (
        lambda tmp: ["run", str(SMALL_GRID), "placement.workers=2", "recipe.batch_size=1"],
        ["batch"],
    ),
    "footprint larger than a map": (
        lambda tmp: ["run", str(SMALL_GRID), "model.footprint=13"],
        [
            "row pairwise_3: model: stage 2 of san10_pairwise with images of 24 x 24 pixels: a 13x13 footprint with "
            "reflection padding needs a feature map of at least 7x7",
            "row patchwise_3: model: stage 2 of san10_patchwise with images of 24 x 24 pixels: a 13x13 footprint",
        ],
    ),
    "crop that is not one": (lambda tmp: ["run", str(SMALL_GRID), "data.resize=8"], ["data.resize: must be at least size (24"]),
    "runs in a file": (lambda tmp: ["run", str(SMALL_GRID), "--runs", bad_grid(tmp)], ["bad.yaml", "cannot write"]),
    "data in a file": (
        lambda tmp: ["plan", str(SMALL_GRID), f"data.root={bad_grid(tmp)}/x"],
        ["bad.yaml/x: no such folder, and its parent ", "write the dataset there with `san data prepare digits"],
    ),
    "data where nothing can be written": (
        lambda tmp: ["plan", str(SMALL_GRID), "data.root=/proc/x"],
        ["/proc/x: cannot read or write images", "set another data.root"],
    ),
    "digits in a file": (
        lambda tmp: ["data", "prepare", "digits", bad_grid(tmp) + "/x"],
        ["cannot write", "another folder"],
    ),
    "unknown option": (lambda tmp: ["run", str(SMALL_GRID), "--speed", "9"], ["No such option"]),
    "no seeds": (lambda tmp: ["run", str(SMALL_GRID), "--seeds", "0"], ["Invalid value for '--seeds': 0 is not in the range"]),
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
    "complexity with fields that do not fit": (
        lambda tmp: ["complexity", "san10_pairwise", "r1=48"],
        ["san: san10_pairwise: ", "are not divisible by r1=48"],
    ),
    "complexity at a size that is too small": (
        lambda tmp: ["complexity", "--grid", str(SMALL_GRID), "--size", "20"],
        ["pairwise_3: stage 4 of san10_pairwise with images of 20 x 20", "resnet26 needs images of at least 32 x 32"],
    ),
    "complexity of a broken grid": (
        lambda tmp: ["complexity", "--grid", bad_grid(tmp)],
        ["row a: model.footprnt: unknown key; did you mean `model.footprint`?"],
    ),
    "no cluster there": (
        lambda tmp: ["run", str(SMALL_GRID), "--address", "127.0.0.1:9"],
        ["no Ray cluster answers at '127.0.0.1:9'"],
    ),
    "nothing to browse": (lambda tmp: ["ui"], ["no runs yet; train a grid with `san run`"]),
    "weights that are none": (
        lambda tmp: ["convert", bad_grid(tmp), str(tmp / "ours.pth")],
        ["bad.yaml: not a file written by torch.save, or damaged"],
    ),
    "no weights": (
        lambda tmp: ["convert", str(tmp / "no-such.pth"), str(tmp / "ours.pth")],
        ["no-such.pth: cannot read this file (No such file or directory)"],
    ),
    "two models": (
        lambda tmp: ["complexity", "san10_pairwise", "name=resnet26"],
        ["override name=resnet26: the model is already set to san10_pairwise; leave out this override"],
    ),
    "no channels in a stem": (
        lambda tmp: ["complexity", "resnet26", "stem_width=0"],
        ["resnet26: stem and bottlenecks need at least 1 channel, not 0 and 64; increase widths"],
    ),
    "too many channels": (
        lambda tmp: ["complexity", "san10_pairwise", "width_mult=1e9"],
        ["san10_pairwise: a stage may have at most 65536 channels, not 2048000000000"],
    ),
    "weights over a file": (
        lambda tmp: ["convert", "a.pth", bad_grid(tmp)],
        ["bad.yaml: already exists; choose another file, or overwrite this one with --force"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_rejects(what: str, san: San, tmp_path: Path) -> None:
    arguments, sentences = MISTAKES[what]
    code, out, err = san(*arguments(tmp_path))
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for sentence in sentences:
        assert sentence in err
    assert not (tmp_path / "runs").exists()


TAKEN = (
    "not a checkpoint; give a file or folder (local or s3://...), a cell's key (see `san runs`), the id of an MLflow run, "
    "or models:/NAME/VERSION"
)


@pytest.mark.parametrize(
    "arguments", [["evaluate"], ["robustness"], ["show", "3"], ["robustness", "other.pt"], ["convert", "out.pth"]], ids=" ".join
)
@pytest.mark.parametrize("name", ["http://me:secret@host/model.pth", "http://host/model.pth?version=1", ""])
def test_what_is_no_checkpoint_is_told_with_what_is(arguments: list[str], name: str, san: San) -> None:
    command, *others = arguments
    told = "http://..." if name else "''"
    assert san(command, name, *others) == (2, "", f"san: {told}: {TAKEN}\n")


@pytest.mark.parametrize("command", ["evaluate", "robustness", "show"])
def test_a_name_that_is_too_long_is_no_file(command: str, san: San) -> None:
    code, _, err = san(command, 300 * "x", *["3"] * (command == "show"))
    assert (code, err) == (2, f"san: {300 * 'x'}: cannot read this file (File name too long)\n")


@pytest.mark.parametrize("address", ["http://me:secret@host/model.pth", "s3://bucket/model.pth"])
def test_weights_are_written_on_this_machine(address: str, san: San, tmp_path: Path) -> None:
    kind = address.partition(":")[0]
    sentence = f"san: {kind}://...: `san convert` writes local files only; give a local path as TARGET\n"
    assert san("convert", released_file(tmp_path), address) == (2, "", sentence)


def test_runs_that_are_empty_are_not_this_folder(san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = san("runs", "--runs", "")
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
def test_an_empty_address_is_not_taken_for_none(
    command: list[str], san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # which an address comes before
    sentence = "san: --address: empty value (is a shell variable unset?); give an address, or leave out --address\n"
    assert san(*command, "--address", "") == (2, "", sentence)
    assert not (tmp_path / "runs").exists()


def test_an_empty_ray_address_is_none(san: San, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    code, out, _ = san("plan", str(SMALL_GRID))
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
    assert len((command.help or "").partition("\n")[0]) <= 62
    if isinstance(command, click.Group):
        assert "..." not in CliRunner().invoke(cli, [*path, "--help"]).output.partition("Commands:")[2]
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
