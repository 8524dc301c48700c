"""Fine-tuning: initial weights from files of each kind, frozen parts, learning rates by part."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import san
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.runner.execute import execute
from experiments.runner.grid_run import open_grid_run
from experiments.runner.plan import plan
from experiments.runs.workspace import Workspace, open_workspace
from experiments.training.checkpoint import Checkpoint
from experiments.training.fine_tuning import init_digest, initialize
from experiments.training.trainer import run_trial
from san.models.base import BaseModel
from san.models.modules import module_spec
from san.models.pretrained import save_folder
from san.models.registry import VARIANTS
from tests.experiments.conftest import HELD_OUT, Trained, WriteGrid
from tests.experiments.samples import SHORT, silent

FIELDS: dict[str, Any] = {"num_stages": 2, "width_mult": 0.5, "footprint": 3}


def network(seed: int, classes: int = 10, name: str = "san10_pairwise", **fields: Any) -> BaseModel:
    torch.manual_seed(seed)
    return san.create_model(name, num_classes=classes, **FIELDS | fields)


def started(
    model: BaseModel, init: Path | str, workspace: Workspace | None = None, classes: Sequence[str] = tuple("0123456789")
) -> str:
    workspace = workspace or open_workspace()
    return initialize(model, str(init), init_digest(str(init), workspace), workspace, classes)


def equal(one: BaseModel, other: BaseModel, except_for: str = "none") -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[key]) for key, value in one.state_dict().items() if not key.startswith(except_for))


@pytest.mark.parametrize("save", [san.save_checkpoint, san.save_released_checkpoint])
def test_takes_weights_from_our_files_and_from_those_of_the_authors(
    save: Callable[[BaseModel, Path], None], tmp_path: Path
) -> None:
    theirs, mine = network(1), network(2)
    save(theirs, tmp_path / "weights.pt")
    assert str(tmp_path / "weights.pt") in started(mine, tmp_path / "weights.pt")
    assert equal(mine, theirs)


def test_takes_the_weights_of_a_trial(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its file, its folder (the best epoch), or by its key or run, also on a node that does not know the tracker."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    for init in (trained.folder / trained.best.name, trained.folder, trained.trial.key, trained.result.run_id):
        mine = network(2)
        started(mine, init, trained.grid_run.workspace)
        assert equal(mine, trained.best.model()), init


def test_takes_the_weights_of_a_folder_of_the_hub_or_of_an_included_network(tmp_path: Path) -> None:
    theirs = san.create_model("san10_patchwise_cifar10", pretrained=True)
    save_folder(theirs, tmp_path / "shared", data="", accuracy="", license="mit")
    for init in ("san10_patchwise_cifar10", tmp_path / "shared", tmp_path / "shared/model.safetensors"):
        mine = san.create_model("san10_patchwise_cifar10")
        started(mine, init, classes=theirs.pretrained_cfg["label_names"])
        assert equal(mine, theirs), init


def test_grid_continues_from_the_key_of_a_trial(trained: Trained) -> None:
    """A relative path would be resolved from the current folder, but this is a name."""
    request = trained.grid_run.request
    init = f"recipe.init={trained.trial.key}"
    again = open_grid_run(replace(request, overrides=(*request.overrides, "recipe.epochs=7", init), only=("pairwise_3",)))
    (trial,) = again.selected
    assert trial.config.recipe.init == trained.trial.key and trial.init_digest and trial.key != trained.trial.key
    with pytest.raises(UserError, match=r"recipe\.init=0123456789ab: .* no such file, and no checkpoints of trial"):
        open_grid_run(replace(request, overrides=(*request.overrides, "recipe.init=0123456789ab")))


def test_only_training_and_plans_load_the_weights(write_grid: WriteGrid, tmp_path: Path) -> None:
    """A report needs the digest of the file, because it is part of the keys."""
    (tmp_path / "a.pt").write_text("no weights")
    path = write_grid("question: q\nrows: [{id: a, model: {name: resnet26}}]")
    grid_run = open_grid_run(GridRequest(path, "digits", (f"recipe.init={tmp_path / 'a.pt'}",), tmp_path / "runs", serial=True))
    assert {trial.init_digest for trial in grid_run.trials} == {hashlib.sha256(b"no weights").hexdigest()[:16]}
    for command in (plan, lambda grid_run: execute(grid_run, None)):
        with pytest.raises(UserError, match=r"row a: recipe\.init=.*a\.pt"):
            command(grid_run)


@pytest.mark.parametrize("classes", [("a", "b", "c"), ("b", "a")], ids=["number", "names"])
def test_classifier_is_new_if_the_classes_differ(classes: tuple[str, ...], tmp_path: Path) -> None:
    theirs, mine, fresh = network(1, classes=2), network(2, classes=len(classes)), network(2, classes=len(classes))
    theirs.pretrained_cfg = {"label_names": ["a", "b"]}
    san.save_checkpoint(theirs, tmp_path / "a.pt")
    assert "with a new classifier" in started(mine, tmp_path / "a.pt", classes=classes)
    with pytest.raises(UserError, match=r"recipe\.freeze: `head` would stay random"):
        initialize(mine, str(tmp_path / "a.pt"), None, open_workspace(), classes, ("head",))
    assert equal(mine, theirs, except_for="head.")
    assert torch.equal(mine.head.weight, fresh.head.weight)  # type: ignore[union-attr, arg-type]


def test_classifier_of_a_registered_model_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = module_spec("linear", lambda num_classes, in_channels: nn.Linear(in_channels, num_classes))
    monkeypatch.setitem(VARIANTS, "linear", spec)
    theirs = spec.build(2)
    theirs.pretrained_cfg = {"label_names": ["a", "b"]}
    san.save_checkpoint(theirs, tmp_path / "a.pt")
    started(spec.build(2), tmp_path / "a.pt", classes=("a", "b"))
    with pytest.raises(UserError, match="the classifier of linear is not known"):
        started(spec.build(2), tmp_path / "a.pt", classes=("b", "a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relation": "summation"}, "relation=subtraction.*relation=summation"),
        ({"name": "resnet26"}, "does not match the model resnet26"),
    ],
)
def test_rejects_weights_of_another_model(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    san.save_checkpoint(network(1), tmp_path / "a.pt")
    with pytest.raises(UserError, match=message):
        started(network(2, **fields), tmp_path / "a.pt")


def test_rejects_files_that_are_missing_or_changed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.pt: .*No such file"):
        init_digest(str(tmp_path / "none.pt"), open_workspace())
    san.save_checkpoint(network(1), tmp_path / "a.pt")
    with pytest.raises(UserError, match="changed since"):
        initialize(network(2), str(tmp_path / "a.pt"), "another digest", open_workspace(), ())


def test_frozen_parts_keep_weights_and_statistics(
    write_grid: WriteGrid, runs: Path, tmp_path: Path, process_group: None
) -> None:
    theirs = network(1)
    san.save_checkpoint(theirs, tmp_path / "a.pt")
    tuned = (f"recipe.init={tmp_path / 'a.pt'}", "recipe.freeze=[stem, stage1]", "recipe.layer_decay=0.5", "recipe.epochs=1")
    path = write_grid("question: q\nrows: [{id: a, model: {name: san10_pairwise, footprint: 3}}]")
    grid_run = open_grid_run(GridRequest(path, "digits", (*SHORT, *HELD_OUT, *tuned), runs))
    grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
    trial = grid_run.trials[0]
    mine = run_trial(grid_run.workspace, trial, silent)
    before, after = theirs.state_dict(), mine.state_dict()
    kept = {key for key in before if torch.equal(before[key], after[key])}
    assert {key.split(".")[0] for key in kept} == {"stem", "stem_norm", "stage1"}
    assert {key for key in before if key.startswith(("stem", "stage1"))} == kept
    (saved,) = grid_run.workspace.checkpoints(trial).glob("epoch-0001-*.pt")
    groups = Checkpoint.read(saved).engine["optimizer"]["param_groups"]
    assert [group["initial_lr"] for group in groups] == [trial.config.recipe.lr_used * scale for scale in (1, 0.5)]
    run_trial(grid_run.workspace, trial, silent)  # a finished trial loads its state again
