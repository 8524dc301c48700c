"""Checkpoint files: the authors' format, our format, and error messages for all other files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import san
from san.models.base import BaseModel
from san.models.registry import VARIANTS
from san.models.released import released_key

SMALL: dict[str, Any] = {"num_stages": 3, "width_mult": 0.5}
RELEASED = [name for name in VARIANTS if name.startswith("san") and "scalar" not in name]

every_released = pytest.mark.parametrize("name", RELEASED)


def trained(name: str, num_classes: int = 3, **overrides: object) -> BaseModel:
    """A classifier in evaluation mode whose scales, biases, statistics and counts differ from the initial ones."""
    torch.manual_seed(0)
    model = san.create_model(name, num_classes, **overrides)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    logits(model.train())
    return model.eval()


def logits(model: BaseModel) -> Tensor:
    with torch.no_grad():
        return model(torch.randn(2, 3, 40, 48, generator=torch.Generator().manual_seed(1)))


def assert_same(ours: BaseModel, loaded: BaseModel) -> None:
    expected, state = ours.state_dict(), loaded.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert loaded.spec == ours.spec
    assert not loaded.training
    assert torch.equal(logits(loaded), logits(ours))


@every_released
def test_released_files_round_trip(name: str, tmp_path: Path) -> None:
    model = trained(name, **SMALL)
    san.save_released_checkpoint(model, tmp_path / "a.pth")
    assert_same(model, san.load_released_checkpoint(tmp_path / "a.pth", **SMALL))


@pytest.mark.parametrize("name", ["resnet26", "san10_pairwise", "san10_patchwise", "san10_scalar"])
def test_our_files_round_trip(name: str, tmp_path: Path) -> None:
    model = trained(name, footprint=5, **SMALL)
    san.save_checkpoint(model, tmp_path / "a.pth")
    assert_same(model, san.load_checkpoint(tmp_path / "a.pth"))
    assert os.listdir(tmp_path) == ["a.pth"]


@pytest.mark.parametrize("footprint", [3, 5, 9])
def test_recognizes_footprint_of_patchwise_models_only(footprint: int, tmp_path: Path) -> None:
    for name, overrides in (("san10_patchwise", {}), ("san10_pairwise", {"footprint": footprint})):
        model = trained(name, footprint=footprint, **SMALL)
        san.save_released_checkpoint(model, tmp_path / "a.pth")
        assert_same(model, san.load_released_checkpoint(tmp_path / "a.pth", **SMALL, **overrides))


@pytest.mark.parametrize("change", ["prefix", "bare", "old format", "no counts"])
def test_loads_every_form_of_a_released_file(change: str, tmp_path: Path) -> None:
    model = trained("san10_pairwise", **SMALL)
    state = {f"module.{key}": value for key, value in san.released_state_dict(model).items()}
    if change == "bare":
        state = san.released_state_dict(model)
    if change == "no counts":
        state = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    content = state if change == "bare" else {"epoch": 100, "state_dict": state, "scheduler": {"T_max": 100}, "top1_val": 0.75}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=change != "old format")
    loaded = san.load_released_checkpoint(tmp_path / "a.pth", **SMALL)
    assert torch.equal(logits(loaded), logits(model))
    counts = {int(value) for key, value in loaded.state_dict().items() if key.endswith("num_batches_tracked")}
    assert counts == {0 if change == "no counts" else 1}


class Harmful:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def saved(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Returns a function that writes a small san10_pairwise with a changed state dict in the authors' format."""

    def write(path: Path) -> None:
        state = san.released_state_dict(san.create_model("san10_pairwise", 3, **SMALL))
        change(state)
        torch.save({"state_dict": state}, path)

    return write


def resnet(path: Path) -> None:
    torch.save({"state_dict": san.create_model("resnet26", 3, **SMALL).state_dict()}, path)


unchanged = saved(lambda state: None)
# Writes a file; arguments of load_released_checkpoint; words of the message.
REFUSALS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "missing key": (saved(lambda state: state.pop("fc.bias")), SMALL, "1 missing: fc.bias"),
    "left-over key": (saved(lambda state: state.update({"fc.scale": torch.ones(3)})), SMALL, "1 unexpected: fc.scale"),
    "other shape": (
        saved(lambda state: state.update({"bn0.weight": torch.ones(5)})),
        SMALL,
        "bn0.weight [5] instead of [32]",
    ),
    "other dtype": (
        saved(lambda state: state.update({"fc.bias": torch.ones(3, dtype=torch.int64)})),
        SMALL,
        "fc.bias torch.int64",
    ),
    "other depths": (unchanged, {"name": "san15_pairwise", **SMALL}, "87 missing: layer0.2.bn1.weight, "),
    "other attention": (unchanged, {"name": "san10_patchwise", **SMALL}, "10 unexpected: layer0.0.sam.conv_p.weight, "),
    "other widths": (unchanged, {"num_stages": 3}, "conv_in.weight [32, 3, 1, 1] instead of"),
    "unknown variant": (unchanged, {"width_mult": 0.5}, "(2, 1, 2) blocks per stage"),
    "no released form": (unchanged, {"relation": "summation", **SMALL}, "relation='summation'"),
    "ResNet": (resnet, {}, "not one of the authors' SANs"),
    "ResNet requested": (resnet, {"name": "resnet26"}, "resnet26 cannot be converted"),
    "our format": (
        lambda path: san.save_checkpoint(san.create_model("san10_pairwise", 3, **SMALL), path),
        {},
        "use load_checkpoint",
    ),
    "missing": (lambda path: None, {}, "No such file"),
    "a directory": (Path.mkdir, {}, "Is a directory"),
    "text": (lambda path: path.write_text("hello\n" * 9), {}, "damaged"),
    "half a file": (
        lambda path: (unchanged(path), path.write_bytes(path.read_bytes()[:4000])),
        SMALL,
        "damaged",
    ),
    "a changed weight": (
        lambda path: (unchanged(path), path.write_bytes(path.read_bytes().replace(b"\x00\x00\x80\x3f", b"\x00\x00\x80\x7f"))),
        SMALL,
        "damaged",
    ),
    "code": (
        lambda path: torch.save({"state_dict": Harmful(path.with_name("mark"))}, path),
        {},
        "would run code (posix.mkdir)",
    ),
    "a list": (lambda path: torch.save([torch.ones(3)], path), {}, "not list"),
    "no tensors": (lambda path: torch.save({"state_dict": {"fc.bias": 3}}, path), {}, "no state dict"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_rejects(what: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write, arguments, words = REFUSALS[what]
    path = tmp_path / "a.pth"
    write(path)
    with pytest.raises(san.CheckpointError) as caught:
        san.load_released_checkpoint(path, **arguments)
    message = str(caught.value)
    assert words in message and "\n" not in message
    assert message.startswith(f"{path}: ") or "authors' format" in message
    assert not (tmp_path / "mark").exists()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("resnet26", {}),
        ("san10_scalar", {}),
        ("san10_pairwise", {"relation": "summation"}),
        ("san10_pairwise", {"hidden_reduction": 8}),
        ("san19_pairwise", {"position": "none"}),
        ("san19_patchwise", {"in_channels": 1}),
    ],
)
def test_other_models_cannot_be_saved_in_the_authors_format(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = san.create_model(name, 3, **overrides, **SMALL)
    changes = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
    with pytest.raises(san.CheckpointError, match=f"{name}.*{changes}"):
        san.save_released_checkpoint(model, tmp_path / "a.pth")
    san.save_checkpoint(model, tmp_path / "a.pth")
    assert san.load_checkpoint(tmp_path / "a.pth").spec == model.spec


def test_rejects_unknown_keys() -> None:
    with pytest.raises(ValueError, match=r"fc\.weight"):
        released_key("fc.weight")


OURS: dict[str, tuple[dict[str, object], str]] = {
    "unknown name": ({"name": "resnet27"}, "import this file first"),
    "unknown field": ({"overrides": {"depth": 3}}, "no field dep"),
    "no fields": ({"overrides": 3}, "cannot be built"),
    "other classes": ({"num_classes": 4}, "2 of the wrong shape: fc.weight"),
    "no weights": ({"state_dict": {}}, "save_checkpoint"),
    "no channels": ({"in_channels": None}, "not written by save_checkpoint"),
    "the authors' file": ({"name": None}, "load_released_checkpoint"),
}


@pytest.mark.parametrize("what", OURS)
def test_rejects_changed_files_in_our_format(what: str, tmp_path: Path) -> None:
    changes, words = OURS[what]
    state = san.create_model("resnet26", 3, **SMALL).state_dict()
    content = {"name": "resnet26", "overrides": SMALL, "num_classes": 3, "in_channels": 3, "state_dict": state} | changes
    torch.save({key: value for key, value in content.items() if value is not None}, tmp_path / "a.pth")
    with pytest.raises(san.CheckpointError, match=re.escape(words)):
        san.load_checkpoint(tmp_path / "a.pth")


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pth"
    path.write_text("old")
    model = san.create_model("san10_pairwise", 3, **SMALL)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(san.CheckpointError, match="No space left"):
        san.save_checkpoint(model, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.pth"]


CHANGES: dict[str, tuple[Callable[[BaseModel], object], str]] = {
    "another stem": (lambda model: setattr(model, "stem", nn.Conv2d(1, 32, 1, bias=False)), "stem.weight [32, 1, 1, 1]"),
    "removed layer": (
        lambda model: model.set_submodule("stage1.blocks.0.norm1", nn.Identity()),
        "missing: stage1.blocks.0.norm1.weight",
    ),
    "added layer": (lambda model: model.add_module("extra", nn.Linear(1, 1)), "2 unexpected: extra.weight"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("save", [san.save_checkpoint, san.save_released_checkpoint])
def test_changed_models_are_not_saved(what: str, save: Callable[[BaseModel, Path], None], tmp_path: Path) -> None:
    change, words = CHANGES[what]
    model, path = san.create_model("san10_pairwise", 3, **SMALL), tmp_path / "a.pth"
    change(model)
    with pytest.raises(san.CheckpointError, match=re.escape(words)):
        save(model, path)
    assert not path.exists()


def test_rejects_paths_and_backbones_that_cannot_be_saved(tmp_path: Path) -> None:
    model = san.create_model("san10_pairwise", 3, **SMALL)
    with pytest.raises(san.CheckpointError, match="not a regular file"):
        san.save_checkpoint(model, tmp_path)
    with pytest.raises(san.CheckpointError, match="No such file"):
        san.save_checkpoint(model, tmp_path / "nowhere" / "a.pth")
    for save in (san.save_checkpoint, san.save_released_checkpoint):
        with pytest.raises(san.CheckpointError, match="backbones"):
            save(san.create_model("san10_pairwise", features_only=True, **SMALL), tmp_path / "a.pth")
    for wrapped, inner in ((nn.DataParallel(model), "model.module"), (torch.compile(model), "model._orig_mod")):
        for call in (partial(san.save_checkpoint, path=tmp_path / "a.pth"), san.released_state_dict):
            with pytest.raises(san.CheckpointError, match=inner):
                call(wrapped)  # type: ignore[arg-type]
    with pytest.raises(san.CheckpointError, match=r"not saved.*numpy"):
        san.save_checkpoint(san.create_model("resnet26", 3, num_stages=2, width_mult=np.float64(0.5)), tmp_path / "a.pth")
    assert not os.listdir(tmp_path)
