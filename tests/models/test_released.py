"""Files of weights: the authors' load and compute what theirs compute, ours come back bit by bit, others are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import san
from san.models.base import BaseModel
from san.models.released import from_released_key, from_released_state_dict, released_key
from tests.golden.fill import batch, fill

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SMALL: dict[str, Any] = {"num_stages": 3, "width_mult": 0.5}
RELEASED = [name for name in san.list_models("san*") if "scalar" not in name]

every_variant = pytest.mark.parametrize("name", san.list_models())
every_released = pytest.mark.parametrize("name", RELEASED)


def trained(name: str, num_classes: int = 3, **overrides: object) -> BaseModel:
    """A classifier in evaluation mode in which no two scales, biases, statistics or counts are those of a fresh one."""
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


@every_variant
def test_our_files_round_trip(name: str, tmp_path: Path) -> None:
    model = trained(name, footprint=5, **SMALL)
    san.save_checkpoint(model, tmp_path / "a.pth")
    assert_same(model, san.load_checkpoint(tmp_path / "a.pth"))
    assert os.listdir(tmp_path) == ["a.pth"]


@every_released
def test_variant_and_classes_are_seen(name: str, tmp_path: Path) -> None:
    torch.save(san.released_state_dict(san.create_model(name, 3)), tmp_path / "a.pth")
    loaded = san.load_released_checkpoint(tmp_path / "a.pth")
    assert loaded.spec == san.models.model_spec(name)
    assert san.released_state_dict(loaded)["fc.bias"].shape == (3,)


@pytest.mark.parametrize("footprint", [3, 5, 9])
def test_patchwise_footprint_is_seen_and_pairwise_is_told(footprint: int, tmp_path: Path) -> None:
    for name, told in (("san10_patchwise", {}), ("san10_pairwise", {"footprint": footprint})):
        model = trained(name, footprint=footprint, **SMALL)
        san.save_released_checkpoint(model, tmp_path / "a.pth")
        assert_same(model, san.load_released_checkpoint(tmp_path / "a.pth", **SMALL, **told))


@every_released
def test_names_round_trip(name: str) -> None:
    with torch.device("meta"):
        ours = san.create_model(name).state_dict()
    theirs = {released_key(key): value for key, value in ours.items()}
    assert len(theirs) == len(ours)
    assert list(from_released_state_dict(theirs)) == list(ours)


@pytest.mark.parametrize("change", ["prefix", "bare", "old format", "no counts"])
def test_forms_of_a_released_file(change: str, tmp_path: Path) -> None:
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


def test_a_released_file_computes_the_recorded_logits(tmp_path: Path) -> None:
    """Written under the names that the released code gave, without a look at ours."""
    keys = json.loads((GOLDEN / "san10_pairwise.json").read_text())["keys"]
    counts = [key for key in keys if key.endswith("num_batches_tracked")]
    state = {key: torch.zeros(shape, dtype=torch.int64 if key in counts else None) for key, shape in keys.items()}
    fill(state)
    content = {"epoch": 100, "state_dict": {f"module.{key}": value for key, value in state.items()}, "optimizer": {}}
    torch.save(content, tmp_path / "model_best.pth")
    model = san.load_released_checkpoint(tmp_path / "model_best.pth").double()
    assert model.spec.name == "san10_pairwise"
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    images = batch()[0].double()
    with torch.no_grad():
        model.train()(images)
        recorded = np.load(GOLDEN / "san10_pairwise.npz")["eval_logits"]
        np.testing.assert_allclose(model.eval()(images).numpy(), recorded, rtol=1e-9, atol=1e-9)


class Harmful:
    """Leaves a mark where a pickle of it is run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def saved(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Writes a small san10_pairwise, its released state dict changed."""

    def write(path: Path) -> None:
        state = san.released_state_dict(san.create_model("san10_pairwise", 3, **SMALL))
        change(state)
        torch.save({"state_dict": state}, path)

    return write


def resnet(path: Path) -> None:
    torch.save({"state_dict": san.create_model("resnet26", 3, **SMALL).state_dict()}, path)


unchanged = saved(lambda state: None)

# What stands at the path, name and overrides that are given with it, and the sentence after the path.
REFUSALS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "missing key": (
        saved(lambda state: state.pop("fc.bias")), SMALL, "does not match san10_pairwise with 3 classes; 1 missing: fc.bias"
    ),
    "left-over key": (
        saved(lambda state: state.update({"fc.scale": torch.ones(3)})), SMALL,
        "does not match san10_pairwise with 3 classes; 1 unexpected: fc.scale",
    ),
    "other shape": (
        saved(lambda state: state.update({"bn0.weight": torch.ones(5)})), SMALL,
        "does not match san10_pairwise with 3 classes; 1 of the wrong shape: bn0.weight [5] instead of [32]",
    ),
    "other kind of numbers": (
        saved(lambda state: state.update({"fc.bias": torch.ones(3, dtype=torch.int64)})), SMALL,
        "does not match san10_pairwise with 3 classes; 1 of the wrong type: fc.bias torch.int64",
    ),
    "prefix on some keys": (
        saved(lambda state: state.update({"module.fc.bias": state.pop("fc.bias")})), SMALL,
        "does not match san10_pairwise with 3 classes; 1 missing: fc.bias; 1 unexpected: module.fc.bias",
    ),
    "other depths asked": (
        unchanged, {"name": "san15_pairwise", **SMALL},
        "does not match san15_pairwise with 3 classes; 87 missing: layer0.2.bn1.weight, layer0.2.bn1.bias, "
        "layer0.2.bn1.running_mean, layer0.2.bn1.running_var, layer0.2.sam.conv1.weight, layer0.2.sam.conv1.bias, "
        "layer0.2.sam.conv2.weight, layer0.2.sam.conv2.bias and 79 more",
    ),
    "other attention asked": (unchanged, {"name": "san10_patchwise", **SMALL}, "10 unexpected: layer0.0.sam.conv_p.weight, "),
    "other widths": (unchanged, {"num_stages": 3}, "of the wrong shape: conv_in.weight [32, 3, 1, 1] instead of"),
    "unknown depths": (
        unchanged, {"width_mult": 0.5}, "(2, 1, 2) blocks per stage match none of san10_pairwise (2, 1, 2, 4, 1), "
    ),
    "no released form": (
        unchanged, {"relation": "summation", **SMALL},
        "with relation='summation' cannot be converted to the authors' format, which requires relation='subtraction'",
    ),
    "ResNet": (resnet, {}, "not one of the authors' SANs; expected keys such as layer0.0.sam.conv1.weight"),
    "ResNet asked": (resnet, {"name": "resnet26"}, "resnet26 cannot be converted to the authors' format, which has only "),
    "ours": (
        lambda path: san.save_checkpoint(san.create_model("san10_pairwise", 3, **SMALL), path), {},
        "in this project's format, not the authors'; use load_checkpoint",
    ),
    "nothing": (lambda path: None, {}, "cannot read this file (No such file or directory)"),
    "a directory": (Path.mkdir, {}, "cannot read this file (Is a directory)"),
    "an empty file": (Path.touch, {}, "not a file written by torch.save, or damaged"),
    "a text": (lambda path: path.write_text("hello\n" * 9), {}, "not a file written by torch.save, or damaged"),
    "half a file": (
        lambda path: (unchanged(path), path.write_bytes(path.read_bytes()[:4000])), SMALL,
        "not a file written by torch.save, or damaged",
    ),
    "code": (
        lambda path: torch.save({"state_dict": Harmful(path.with_name("mark"))}, path), {},
        "rejected because loading this file would run code (posix.mkdir); ",
    ),
    "a list": (lambda path: torch.save([torch.ones(3)], path), {}, "expected a dict of weights, not list"),
    "an empty dict": (lambda path: torch.save({}, path), {}, "no state dict found, neither at the top level nor under"),
    "no tensors": (
        lambda path: torch.save({"state_dict": {"fc.bias": 3}}, path), {},
        "no state dict found, neither at the top level nor under",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_rejects(what: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write, asked, sentence = REFUSALS[what]
    path = tmp_path / "a.pth"
    write(path)
    with pytest.raises(san.CheckpointError) as refusal:
        san.load_released_checkpoint(path, **asked)
    told = str(refusal.value)
    assert sentence in told
    assert "\n" not in told
    assert told.startswith(f"{path}: ") or "authors' format" in told
    assert not (tmp_path / "mark").exists()
    assert not recwarn.list


OTHER_FORMS = {
    "resnet26": {},
    "san10_scalar": {},
    "san10_pairwise": {"relation": "summation"},
    "san15_pairwise": {"mapping": "LRLRL"},
    "san19_pairwise": {"position": "none"},
    "san10_patchwise": {"transformation": "phi_eq_psi"},
    "san15_patchwise": {"relation": "star"},
    "san19_patchwise": {"group_size": 4},
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_models_without_a_released_form(name: str, tmp_path: Path) -> None:
    model = san.create_model(name, 3, **OTHER_FORMS[name], **SMALL)
    with pytest.raises(san.CheckpointError, match=f"{name}.* cannot be converted to the authors' format"):
        san.save_released_checkpoint(model, tmp_path / "a.pth")
    san.save_checkpoint(model, tmp_path / "a.pth")
    assert san.load_checkpoint(tmp_path / "a.pth").spec == model.spec


def test_images_of_other_channels_have_no_released_form(tmp_path: Path) -> None:
    model = san.create_model("san10_pairwise", 3, in_channels=1, **SMALL)
    with pytest.raises(
        san.CheckpointError, match="with in_channels=1 cannot be converted to the authors' format, which requires in_channels=3"
    ):
        san.save_released_checkpoint(model, tmp_path / "a.pth")


def test_our_files_of_before_are_of_rgb_images(tmp_path: Path) -> None:
    san.save_checkpoint(san.create_model("resnet26", 3, **SMALL), tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt")
    assert content.pop("in_channels") == 3
    torch.save(content, tmp_path / "a.pt")
    assert san.load_checkpoint(tmp_path / "a.pt").in_channels == 3


def test_unknown_keys_have_no_other_name() -> None:
    with pytest.raises(ValueError, match=r"'layer1.0.conv1.weight' is not a parameter of the authors' network"):
        from_released_key("layer1.0.conv1.weight")
    with pytest.raises(ValueError, match=r"'fc.weight' is not a parameter of a SAN model"):
        released_key("fc.weight")


def ours_with(**changes: object) -> dict[str, object]:
    state = san.create_model("resnet26", 3, **SMALL).state_dict()
    return {"name": "resnet26", "overrides": SMALL, "num_classes": 3, "state_dict": state} | changes


OURS: dict[str, tuple[Callable[[], object], str]] = {
    "released": (lambda: {"state_dict": {"fc.bias": torch.ones(3)}}, "use load_released_checkpoint for the authors' files"),
    "unknown name": (
        lambda: ours_with(name="resnet27"),
        "the model described in this file cannot be built (unknown model 'resnet27'; did you",
    ),
    "unknown field": (
        lambda: ours_with(overrides={"depth": 3}),
        "the model described in this file cannot be built (resnet26 has no field dep",
    ),
    "no fields": (lambda: ours_with(overrides=3), "the model described in this file cannot be built"),
    "other classes": (
        lambda: ours_with(num_classes=4),
        "does not match resnet26 with 4 classes; 2 of the wrong shape: fc.weight [3",
    ),
    "no weights": (lambda: ours_with(state_dict={}), "not written by save_checkpoint or `san convert`"),
}


@pytest.mark.parametrize("what", OURS)
def test_rejects_as_ours(what: str, tmp_path: Path) -> None:
    content, sentence = OURS[what]
    torch.save(content(), tmp_path / "a.pth")
    with pytest.raises(san.CheckpointError) as refusal:
        san.load_checkpoint(tmp_path / "a.pth")
    assert sentence in str(refusal.value)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pth"
    path.write_text("old")
    model = san.create_model("san10_pairwise", 3, **SMALL)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(san.CheckpointError, match=r"a.pth: cannot write this file \(No space left on device\)"):
        san.save_checkpoint(model, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.pth"]


def grey_stem(model: BaseModel) -> None:
    model.stem = nn.Conv2d(1, 32, 1, bias=False)


def no_norm(model: BaseModel) -> None:
    model.stage1.blocks[0].norm1 = nn.Identity()


CHANGES: dict[str, tuple[Callable[[BaseModel], None], str]] = {
    "another stem": (grey_stem, "1 of the wrong shape: stem.weight [32, 1, 1, 1] instead of [32, 3, 1, 1]"),
    "a layer less": (no_norm, "missing: stage1.blocks.0.norm1.weight, "),
    "a layer more": (lambda model: model.add_module("extra", nn.Linear(1, 1)), "2 unexpected: extra.weight, extra.bias"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_models_that_could_not_be_loaded_again_are_not_written(what: str, tmp_path: Path) -> None:
    change, told = CHANGES[what]
    model = san.create_model("san10_pairwise", 3, **SMALL)
    change(model)
    for save in (san.save_checkpoint, san.save_released_checkpoint):
        with pytest.raises(san.CheckpointError) as refusal:
            save(model, tmp_path / "a.pth")
        assert str(refusal.value).startswith(f"{tmp_path / 'a.pth'}: not saved, because the model no longer matches ")
        assert told in str(refusal.value)
    assert not os.listdir(tmp_path)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    model = san.create_model("san10_pairwise", 3, **SMALL)
    with pytest.raises(san.CheckpointError, match="exists and is not a regular file; choose another path"):
        san.save_checkpoint(model, tmp_path)
    with pytest.raises(san.CheckpointError, match=r"cannot write this file \(No such file or directory\)"):
        san.save_checkpoint(model, tmp_path / "nowhere" / "a.pth")
    for save in (san.save_checkpoint, san.save_released_checkpoint):
        with pytest.raises(san.CheckpointError, match="only classifiers can be saved, not backbones"):
            save(san.create_model("san10_pairwise", features_only=True, **SMALL), tmp_path / "a.pth")
    assert not os.listdir(tmp_path)
