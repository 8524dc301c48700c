"""Commands of `san` that train nothing, and the error messages for invalid input."""

import functools
import json
import os
import pwd
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
import torch
from click.testing import CliRunner

from cluster.session import private_folder
from experiments.cli.commands import cli
from experiments.config.config import GRIDS_DIR, PROJECT_DIR
from experiments.config.expand import expand, profile_path
from experiments.config.grid import GridRequest
from experiments.paper.tables import paper_rows, table_names
from experiments.report import counts
from experiments.runs.workspace import default_runs
from experiments.training import images
from san import create_model, load_checkpoint, save_checkpoint
from san.models.released import save_released_checkpoint
from tests.experiments.conftest import SMALL_GRID, Printed, Rejected, San


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAN_RUNS", str(tmp_path / "runs"))


def test_models_are_listed_with_their_fields(printed: Printed) -> None:
    out = printed("models", "san*_pairwise", "--json")
    assert [(model["name"], model["depths"][0], model["relation"]) for model in json.loads(out)] == [
        ("san10_pairwise", 2, "subtraction"),
        ("san15_pairwise", 3, "subtraction"),
        ("san19_pairwise", 3, "subtraction"),
    ]
    assert printed("models", "resnet26").split()[:2] == ["resnet26", "depths=[1,2,4,1]"]


def test_user_without_a_home_folder(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a number instead of a user."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    printed("models", "resnet26")
    assert Path.home() == private_folder()


def test_complexity_as_json(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grid's rows, or of all named models."""
    rows = json.loads(printed("complexity", "--grid", "position", "--json"))
    assert [row["id"] for row in rows] == list(paper_rows("position"))
    by_id = {row["id"]: row for row in rows}
    assert (by_id["pairwise_relative"]["params"], by_id["pairwise_relative"]["flops_paper"]) == (10_531_848, 2_155_268_622)
    monkeypatch.setattr(counts, "VARIANTS", ["resnet26", "san10_pairwise"])
    assert [row["id"] for row in json.loads(printed("complexity", "--json"))] == ["resnet26", "san10_pairwise"]


def test_complexity_as_text_shows_the_numbers_of_the_paper_for_its_image_size(printed: Printed) -> None:
    grid = GRIDS_DIR / "position.yaml"
    out = printed("complexity", "--grid", grid)
    assert out.splitlines()[-1].split()[:5] == ["pairwise_relative", "10.532", "10.5", "2.155", "2.2"]
    out = printed("complexity", "--grid", grid, "--size", "256")
    assert "printed" not in out
    assert "FLOPs M (paper)" in printed("complexity", "resnet26", "num_stages=2", "--size", "24")
    out = printed("complexity", "san10_pairwise", "model.footprint=9")
    stages = ["stem", *(f"stage{i}" for i in range(1, 6)), "head"]
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["san10_pairwise", *stages]
    assert out.splitlines()[2].split()[1:3] == ["10.532", "2.533"]  # the paper's table "footprint": 10.5 and 2.5


def test_plan_of_some_rows_and_seeds_as_json(printed: Printed) -> None:
    only = ("--only", "resnet26_3", "--only", "pairwise_3")
    trials = json.loads(printed("plan", SMALL_GRID, "--seeds", "2", *only, "--json"))
    expected = [(row, seed) for row in ("resnet26_3", "pairwise_3") for seed in (0, 1)]  # the shortest first
    assert [(trial["row"], trial["seed"]) for trial in trials] == expected
    assert len({trial["key"] for trial in trials}) == 4
    assert not any(trial["finished"] for trial in trials)


def test_plan_leaves_no_file_behind(tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a missing dataset in a mistyped `data.root`, nor temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which it remembers
    monkeypatch.setattr(images, "_temporary", functools.cache(images._temporary.__wrapped__))
    monkeypatch.chdir(tmp_path)
    said = printed("plan", SMALL_GRID, f"data.root={tmp_path / 'imagnet'}")
    assert "3 trials, 3 to train" in said and said.count("to train") == 4
    assert Path(images._temporary().name).parent == tmp_path / "temporary"
    images._temporary().cleanup()  # Python does so at the end of a process
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_shells_complete_commands(run_san: San, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_SAN_COMPLETE": "bash_complete", "COMP_WORDS": "san del", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run_san()[1] == "plain,delete\n"


def test_full_disk_under_the_output_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "experiments", "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1) and done.stderr.startswith("san: no space left")


def test_report_and_runs_of_an_empty_store(run_san: San, printed: Printed, rejected: Rejected, tmp_path: Path) -> None:
    out = printed("report", SMALL_GRID, "--json")
    assert [(line["id"], line["paper_top1"], line["top1"]) for line in json.loads(out)] == [
        ("pairwise_3", 75.3, None),
        ("resnet26_3", 76.0, None),
        ("patchwise_3", 77.4, None),
    ]
    suggestion = rejected("report", SMALL_GRID, "--runs", tmp_path / "my runs")
    assert f"--runs '{tmp_path}/my runs'" in suggestion
    assert run_san("runs") == (0, "", f"no runs in sqlite:///{tmp_path}/runs/mlflow.db\n")


def test_convert_keeps_model_and_weights(run_san: San, tmp_path: Path) -> None:
    """Of a file of the authors, with the fields that it does not store."""
    ours, theirs = tmp_path / "ours.pth", tmp_path / "theirs.pth"
    fields = ("model.name=san10_pairwise", "model.num_stages=2", "model.width_mult=0.5", "model.footprint=9")
    model = create_model("san10_pairwise", 3, footprint=9, num_stages=2, width_mult=0.5)
    save_released_checkpoint(model, theirs)
    ours.write_text("old")
    assert run_san("convert", theirs, ours, *fields)[0] == 2
    assert ours.read_text() == "old"
    code, out, err = run_san("convert", theirs, ours, "--force", *fields)
    assert (code, err) == (0, "")
    assert f"3 classes, {sum(p.numel() for p in model.parameters())} parameters" in out
    restored = load_checkpoint(ours)
    assert restored.spec == model.spec
    assert all(torch.equal(restored.state_dict()[key], value) for key, value in model.state_dict().items())
    assert sorted(os.listdir(tmp_path)) == ["ours.pth", "theirs.pth"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and the weights of a model in both formats."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("a text")
    model = create_model("san10_pairwise", 3, num_stages=2, width_mult=0.5)
    save_checkpoint(model, folder / "own.pth")
    save_released_checkpoint(model, folder / "released.pth")
    return folder


# Errors of other parts are tested next to the functions that raise them; here, that commands print them and write nothing.
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert {files}/released.pth {files}/new.pth footprint=9", ["footprint", "model.*"]),
        ("convert {files}/own.pth {files}/new.pth model.footprint=9", ["own.pth", "model.footprint"]),
        ("convert {files}/a.txt {files}/new.pth", ["a.txt"]),
        ("convert a.pth s3://bucket/model.pth", ["s3://...", "local"]),
        ("evaluate http://me:secret@host/model.pth", ["http://...", "MLflow run"]),
        ("attention '' 3", ["''"]),
        (f"attention ./{300 * 'x'} 3", ["File name too long"]),
        ("models zzz", ["'zzz'"]),
        ("plan footprnt", ["footprnt", "did you mean `footprint`?"]),
        (f"run {{grid}} --serial --runs {300 * 'x'}", ["File name too long", "--runs"]),
        ("plan {grid} --only resnet26", ["--only resnet26", "did you mean `resnet26_3`?"]),
        ("run {grid} resources.workers=2 recipe.batch_size=1", ["batch"]),
        ("runs --runs {files}/a.txt", ["a.txt", "--runs"]),
        ("pln {grid}", ["Did you mean 'plan'?"]),
        ("trian {grid}", ["'trian'", "Choose from: ", "run"]),
        ("run {grid} data.root=/proc/x", ["/proc/x", "data.root"]),
        ("data prepare digits {files}/a.txt/x", ["a.txt/x"]),
        ("data prepare digits --from {files}/a.txt", ["--from"]),
        ("complexity resnet26 --grid {grid}", ["'resnet26'", "--grid"]),
        ("plan {grid} --profile {grid}", ["small.yaml: this is a grid, not a profile"]),
        ("complexity san10_pairwize", ["did you mean `san10_pairwise`?"]),
        ("complexity resnet26 footprnt=5 relation=dot", ["resnet26: footprnt", "`footprint`", "resnet26: relation"]),
        ("complexity san10_pairwise name=resnet26", ["name=resnet26"]),
        ("complexity --grid {grid} --size 20", ["pairwise_3", "20 x 20"]),
        ("runs --runs ''", ["--runs: empty"]),
        ("submit {grid} --address ''", ["--address: empty"]),
        ("run {grid} --address 127.0.0.1:9", ["'127.0.0.1:9'"]),
        ("ui", ["no runs yet"]),
        ("report {grid} --json --format csv", ["--json", "--format csv"]),
        ("report {grid} --json --csv -", ["`--json` and `--csv -`"]),
        ("report {grid} --csv {grid}", ["--csv", "small.yaml", "overwrite a grid"]),
        ("attention own.pth {files}/a.png --out {files}/a.png", ["--out", "overwrite the image"]),
        ("predict san10_patchwise {files}/a.png", ["did you mean `san10_patchwise_cifar10`?"]),
        ("evaluate own.pth --split ''", ["--split: empty"]),
    ],
)
def test_rejects(command: str, words: list[str], files: Path, rejected: Rejected, tmp_path: Path) -> None:
    message = rejected(*(part.format(files=files, grid=SMALL_GRID) for part in shlex.split(command)))
    assert all(word in message for word in words), message
    assert "secret" not in message
    assert not (tmp_path / "runs").exists() and not (files / "new.pth").exists()


def test_empty_variables_are_ignored(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert "\nthis machine has " in printed("plan", SMALL_GRID)
    monkeypatch.setenv("SAN_RUNS", "")
    assert default_runs() == str(PROJECT_DIR / "runs")


def _commands(command: click.Command, *path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it, each with the words that call it."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _commands(below, *path, name)


def test_help_lists_every_command() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert not [name for name in cli.commands if not re.search(rf"^  {name} +\S", shown, re.MULTILINE)]


@pytest.mark.parametrize(("path", "command"), _commands(cli))
def test_help_describes_every_option_and_its_example_parses(path: str, command: click.Command) -> None:
    """Parses the example without running it; the grid and the profile must exist."""
    shown = CliRunner().invoke(cli, [*path.split(), "--help"])
    assert shown.exit_code == 0 and shown.output.startswith("Usage: ")
    assert not [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
    found = re.search(r"(?:Example|Start with): san (.+)", f"{command.help}\n{command.epilog or ''}")
    assert found, "no example"
    assert found[1].startswith(path)
    words = shlex.split(found[1])
    context, command = click.Context(cli, info_name="san"), cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
        rest = words[:1] if isinstance(command, click.Group) else list(words)
        context = command.make_context(command.name, rest, context)
    grid, profile = context.params.get("grid"), context.params.get("profile")
    if isinstance(grid, Path):
        request = GridRequest(PROJECT_DIR / grid, profile or "digits", context.params.get("overrides", ()))
        expand(request, table_names())
    if profile is not None:
        profile_path(profile)


def test_doctor_shows_which_kernels_run(printed: Printed) -> None:
    out = printed("doctor")
    assert re.search(r"^cpu kernels run from .*\.so$", out, re.MULTILINE)
    assert re.search(r"^cuda kernels (run from|not available: )", out, re.MULTILINE)
    assert "g++: " in out and "torch " in out


def test_tilde_is_the_home_folder_in_every_argument(run_san: San, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home := tmp_path / "home").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    (home / "grid.yaml").write_text("{extends: ~/base.yaml, question: q, imports: [~/mine.py]}")
    (home / "base.yaml").write_text("rows: [{id: a, model: {name: resnet26}, data: {root: ~/digits}}]")
    (home / "profile.yaml").write_text("{extends: digits, data: {root: ~/photos}}")
    (home / "mine.py").touch()
    (home / "other.py").touch()
    options = ("--profile=~/profile.yaml", "--import=~/other.py", "--runs=~/runs")
    code, _, err = run_san("report", "~/grid.yaml", *options, "recipe.init=~/weights.pt")
    assert code == 2 and err.startswith(f"san: recipe.init={home}/weights.pt: ")
    assert f"sqlite:///{home}/runs/mlflow.db" in run_san("report", "~/grid.yaml", *options)[2]
    assert run_san("complexity", "--grid=~/grid.yaml")[0] == 0
    assert list(elsewhere.iterdir()) == []
