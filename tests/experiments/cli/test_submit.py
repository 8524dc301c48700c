"""`san submit`: what it uploads, and the errors that it finds before. `tests/cluster/test_submit.py` has a real head."""

from pathlib import Path

import pytest
import yaml

from cuda_ext import build
from experiments.cli import submit
from experiments.config.expand import expand
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.paper.tables import table_names
from experiments.runs.provenance import git_commit

GRID = """\
question: Does it run?
rows:
  - {id: only, model: {name: san10_pairwise, footprint: 3}, recipe: {batch_size: 128}}
"""
ODD_NAME = 'it\'s; $(touch gotcha) "x" -- `y`.yaml'


def test_uploads_only_the_packages_and_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / ODD_NAME).write_text(GRID)
    size = submit.stage(GridRequest(tmp_path / ODD_NAME), tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {*submit.PACKAGES, "job"}
    assert yaml.safe_load((tmp_path / "copy" / "job" / ODD_NAME).read_text()) == yaml.safe_load(GRID)
    junk = [
        path for path in (tmp_path / "copy").rglob("*") if path.name.startswith(".") or path.suffix in (".pyc", ".so", ".jpg")
    ]
    assert junk == [] and size < 15e6
    # Kernels that the node has built for another copy are reused.
    name = build.digest()
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "copy" / "cuda_ext")
    assert build.digest() == name


@pytest.mark.parametrize(
    ("profile", "overrides", "runs", "message"),
    [
        ("digits", ["recipe.epoch=1"], None, "recipe.epoch"),
        ("digits", [], "runs", "--runs runs: a relative path"),
        ("imagenet", [], None, r"data\.root=data/imagenet: a relative path"),
        ("mine.yaml", [], None, r"data\.root=images: a relative path"),
        ("digits", ["recipe.init=weights.pt"], None, r"recipe\.init=weights\.pt: a relative path"),
        ("digits", ["data.lists=lists"], None, r"data\.lists=lists: a relative path"),
    ],
)
def test_finds_errors_before_uploading(
    profile: str, overrides: list[str], runs: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: folder\ndata: {root: images}\n")
    grid = tmp_path / "small.yaml"
    grid.write_text(GRID)
    submit.check(GridRequest(grid, "imagenet", ("data.root=/images",), "/runs"))
    with pytest.raises(UserError, match=message):
        submit.check(GridRequest(grid, profile, tuple(overrides), runs))


def test_environment_of_the_job_has_no_secrets_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("NOT_SET", "--env NOT_SET: not set"), ("PASSWORD=hunter2", r"--env PASSWORD=\.\.\.: ")):
        with pytest.raises(UserError, match=message) as caught:
            submit.environment([name])
        assert "hunter2" not in str(caught.value)
    for uri, message in (
        ("https://ada:hunter2@mlflow.example.org", "contains a password"),
        ("sqlite:///runs/mlflow.db", "a relative path"),
        ("runs/mlflow.db", "a relative path"),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(UserError, match=f"MLFLOW_TRACKING_URI=.*{message}"):
            submit.environment([])
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    for uri in ("sqlite:////srv/san/runs/mlflow.db", "https://mlflow.example.org"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        expected = {"MLFLOW_TRACKING_URI": uri, "SAN_GIT_COMMIT": git_commit(), "MY_PASSWORD": "hunter2"}
        assert submit.environment(["MY_PASSWORD"]) == expected


@pytest.mark.parametrize(
    ("name", "profile", "beginning"),
    [
        ("small.yaml", "digits", "small-digits-"),
        (ODD_NAME, "digits", "it-s-touch-gotcha-x-y-digits-"),
        ("-x.yaml", "my profile", "x-my-profile-"),
        ("é.yaml", "digits", "digits-"),
    ],
)
def test_job_ids_have_only_plain_characters(name: str, profile: str, beginning: str) -> None:
    made = submit.new_id(Path(name), profile)
    assert made.startswith(beginning) and len(made) == len(beginning) + 8


def test_job_has_a_copy_of_a_profile_file(tmp_path: Path) -> None:
    """With the values of the profile that it extends."""
    (tmp_path / "small.yaml").write_text(GRID)
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: folder\ndata: {root: /images}\n")
    request = GridRequest(tmp_path / "small.yaml", str(profile))
    submit.stage(request, tmp_path / "copy")
    command = submit.run_command(request)
    copied = yaml.safe_load((tmp_path / "copy" / command[command.index("--profile") + 1]).read_text())
    assert (copied["data"]["root"], copied["data"]["size"]) == ("/images", 64)


def test_job_has_copies_of_the_imports(tmp_path: Path) -> None:
    """Files with the same name do not replace each other."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"# {folder}\n")
    (tmp_path / "small.yaml").write_text(f"{GRID}imports: [a/mine.py]\n")
    submit.stage(GridRequest(tmp_path / "small.yaml", imports=(str(tmp_path / "b" / "mine.py"),)), tmp_path / "copy")
    copied = expand(GridRequest(tmp_path / "copy" / "job" / "small.yaml"), table_names())
    assert [file.source for file in copied.imports] == ["# a\n", "# b\n"]
