"""Folders of trained networks, and the networks that the package contains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import san
from experiments.config.expand import profile_path, read_profile
from san.models.base import BaseModel
from san.models.modules import module_spec
from san.models.pretrained import WEIGHTS_DIR, load_folder, read_config, save_folder
from san.models.registry import VARIANTS

FACTS = {"data": "random images", "accuracy": "10.0% top-1, one crop", "license": "mit"}
IMAGES = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
KINDS = ["resnet26", "san10_scalar", "san10_pairwise", "san10_patchwise"]

every_network = pytest.mark.parametrize("name", [f"{kind}_cifar10" for kind in KINDS])


def trained() -> BaseModel:
    model = san.create_model("san10_patchwise", 5, in_channels=1, width_mult=0.5, num_stages=2, footprint=5)
    model(IMAGES[:, :1])  # running statistics
    return model.eval()


def test_folder_restores_the_model(tmp_path: Path) -> None:
    model = trained()
    save_folder(model, tmp_path / "shared", **FACTS, facts={"pretrained_cfg": {"crop_pct": 1.0}})
    restored = load_folder(tmp_path / "shared")
    assert restored.spec == model.spec and restored.pretrained_cfg == {"crop_pct": 1.0} and not restored.training
    assert torch.equal(restored(IMAGES[:, :1]), model(IMAGES[:, :1]))
    card = (tmp_path / "shared/README.md").read_text()
    assert all(fact in card for fact in ("# shared", "san10_patchwise", "random images", "10.0% top-1", "license: mit"))


def test_names_of_classes_do_not_outlive_the_classifier(tmp_path: Path) -> None:
    model = san.create_model("san10_patchwise_cifar10", pretrained=True)
    model.head = nn.Linear(model.num_features, 3)
    san.save_checkpoint(model, tmp_path / "a.pt")
    assert not san.load_checkpoint(tmp_path / "a.pt").pretrained_cfg.keys() & {"num_classes", "label_names"}


def test_card_of_another_network_names_no_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = module_spec("mine", lambda num_classes, in_channels: nn.Conv2d(in_channels, num_classes, 1))
    monkeypatch.setitem(VARIANTS, "mine", spec)
    save_folder(spec.build(2), tmp_path, **FACTS)
    assert "\nA network for image recognition.\n" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json: cannot read"),
        ("config.json", "{}", "config.json: .*variant"),
        ("config.json", None, "model.safetensors: does not match"),
        ("model.safetensors", "damaged", "model.safetensors: cannot read"),
    ],
)
def test_rejects_a_folder_that_cannot_be_loaded(file: str, content: str | None, message: str, tmp_path: Path) -> None:
    save_folder(trained(), tmp_path, **FACTS)
    path = tmp_path / file
    path.write_text(path.read_text().replace('"footprint": 5', '"footprint": 3') if content is None else content)
    with pytest.raises(san.CheckpointError, match=message):
        load_folder(tmp_path)


def test_rejects_a_backbone(tmp_path: Path) -> None:
    with pytest.raises(san.CheckpointError, match="classifiers"):
        save_folder(san.create_model("resnet26", features_only=True), tmp_path / "shared", **FACTS)


def test_lists_the_included_networks() -> None:
    assert set(san.list_models(pretrained=True)) == {f"{kind}_cifar10" for kind in KINDS}
    assert san.list_models("*cifar10") == san.list_models(pretrained=True)


@every_network
def test_included_network_is_trained_small_and_described(name: str) -> None:
    config = read_config(WEIGHTS_DIR / name)
    assert 60 < config["evaluation"]["top1"] < 100
    assert f"top-1 {config['evaluation']['top1']:.4f} %" in (WEIGHTS_DIR / name / "README.md").read_text()
    assert (WEIGHTS_DIR / name / "model.safetensors").stat().st_size < 3 * 2**20
    data, known = read_profile(profile_path(config["profile"]))["data"], config["pretrained_cfg"]
    assert (known["input_size"][1], known["mean"], known["std"]) == (data["size"], data["mean"], data["std"])
    assert len(known["label_names"]) == config["num_classes"] == 10


@every_network
def test_pretrained_model_with_own_classes_and_as_backbone(name: str) -> None:
    model = san.create_model(name, pretrained=True)
    backbone = san.create_model(name, pretrained=True, features_only=True)
    assert backbone.pretrained_cfg == model.pretrained_cfg and backbone.num_classes == 0
    maps = backbone(IMAGES)
    torch.testing.assert_close(model.forward_features(IMAGES), maps[-1])
    own = san.create_model(name, 3, pretrained=True)
    assert own(IMAGES).shape == (2, 3)
    torch.testing.assert_close(own.forward_features(IMAGES), maps[-1])


@every_network
def test_fresh_model_has_the_structure_of_the_trained_one(name: str) -> None:
    fresh, model = san.create_model(name), san.create_model(name, pretrained=True)
    assert fresh.spec == model.spec and fresh.num_classes == 10
    assert not torch.equal(fresh(IMAGES), model(IMAGES))


def test_pretrained_is_no_file() -> None:
    with pytest.raises(ValueError, match="use load_checkpoint"):
        san.create_model("resnet26_cifar10", pretrained="mine.pt")  # type: ignore[arg-type]
