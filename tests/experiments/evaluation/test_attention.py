"""`san attention` and the page's samples: the weights that the network used, a description, and clear errors."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import san
from experiments.errors import UserError
from experiments.evaluation.attention import (
    Attention,
    attention_in_words,
    between_channels,
    compute_attention,
    layer_name,
    open_image,
)
from experiments.evaluation.evaluate import LoadedModel, open_checkpoint
from san import ops
from san.models.modules import module_spec
from tests.experiments.conftest import Rejected, San, captured_san

KINDS = {"pairwise": "san10_pairwise", "patchwise": "san10_patchwise", "scalar": "san10_scalar"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind of attention and one without any, with random weights, and a picture."""
    folder = tmp_path_factory.mktemp("show")
    torch.manual_seed(0)
    for name in (*KINDS.values(), "resnet26"):
        san.save_checkpoint(san.create_model(name, 10, num_stages=2, width_mult=0.5), folder / f"{name}.pt")
    colours = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(colours).resize((40, 30), Image.Resampling.BICUBIC).save(folder / "colours.png")
    return folder


def opened(files: Path, kind: str) -> LoadedModel:
    return open_checkpoint(files / f"{KINDS[kind]}.pt", (), "digits")


def look_at(files: Path, kind: str, pixel: tuple[int, int] | None = None, grid: int = 1, layer: str | None = None) -> Attention:
    network = opened(files, kind)
    return compute_attention(network, open_image(network, str(files / "colours.png")), pixel, grid, layer)


def test_draws_weights_and_describes_them(files: Path, tmp_path: Path, run_san: San) -> None:
    """Of our checkpoints, and of a network of the package, whose classes have names."""
    classes = san.create_model("san10_scalar_cifar10", pretrained=True).pretrained_cfg["label_names"]
    out, digits = tmp_path / "picture.png", ("--profile", "digits")
    for network, options, kind, predicted, where in (
        (files / "san10_pairwise.pt", (*digits, "--pixel", "2,20"), "pairwise", r"class \d", "row 0, column 5"),
        (files / "san10_patchwise.pt", (*digits, "--grid", "3"), "patchwise", r"class \d", "3 x 3 grid of pixels"),
        ("san10_scalar_cifar10", ("--grid", "3"), "scalar", rf"({'|'.join(classes)}) \(", "3 x 3 grid of pixels"),
    ):
        _, text, _ = run_san("attention", network, files / "colours.png", "--out", out, *options)
        with Image.open(out) as picture:
            assert picture.info["Description"] == text.removeprefix(f"{out}: ").rstrip("\n"), kind
            assert picture.width == 1200 and picture.height > 800, kind
            assert len(np.unique(np.asarray(picture.convert("L")))) > 100, kind
        assert re.search(rf"san10_{kind}\S* predicts {predicted}", text), text
        assert f"{kind} attention" in text and where in text and "variance of" in text, text


def test_pixel_selects_weights_of_the_layer(files: Path) -> None:
    for kind in KINDS:
        everywhere, one = look_at(files, kind, grid=6), look_at(files, kind, pixel=(9, 20))
        assert everywhere.map == (6, 6), kind
        assert one.pixels == ((2, 5),), kind
        np.testing.assert_array_equal(one.weight_GKn[:, :, 0], everywhere.weight_GKn[:, :, 2 * 6 + 5], kind)
        assert one.between_everywhere == everywhere.between == everywhere.between_everywhere, kind
        assert one.weight_GKn.shape == (8 if kind == "scalar" else 4, 49, 1), kind


def test_footprints_are_reflected_like_those_of_the_operators(files: Path) -> None:
    attention = look_at(files, "pairwise", grid=6)
    patches, outside = attention.footprints()
    image_13HW = torch.from_numpy(attention.image_HW3).permute(2, 0, 1)[None]
    pooled_13HW = torch.nn.functional.avg_pool2d(image_13HW, 4)
    expected = ops.unfold(pooled_13HW, 7)[0].permute(2, 1, 0).unflatten(1, (7, 7))
    np.testing.assert_allclose(patches.mean((3, 4)), expected, atol=1e-6)
    inside = ops.unfold(torch.arange(1.0, 37.0).view(1, 1, 6, 6), 7)[0, 0].T.unflatten(1, (7, 7))
    assert [len(found[~hidden].unique()) for found, hidden in zip(inside, torch.from_numpy(outside), strict=True)] == [
        int((~hidden).sum()) for hidden in outside
    ]


def test_image_is_preprocessed_as_in_validation(files: Path) -> None:
    """A number selects the image at this place of the split. Files and numbers are preprocessed alike."""
    network = opened(files, "pairwise")
    images = open_image(network, "40")
    file = images.root / images.paths[0]
    by_number, by_name = (compute_attention(network, open_image(network, image)) for image in ("40", str(file)))
    assert images.paths[0].startswith("val/1/")
    assert "true class" in by_number.prediction and "true class" not in by_name.prediction
    np.testing.assert_array_equal(by_number.image_HW3, by_name.image_HW3)
    np.testing.assert_array_equal(by_number.weight_GKn, by_name.weight_GKn)
    with Image.open(file) as picture:
        small = np.asarray(picture.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR)) / 255
    np.testing.assert_allclose(by_number.image_HW3, small, atol=0.02)


def test_split_is_an_error_with_a_file(files: Path) -> None:
    with pytest.raises(UserError, match="--split val: has no effect"):
        open_image(opened(files, "pairwise"), str(files / "colours.png"), "val")


def test_image_needs_no_suffix(files: Path, tmp_path: Path) -> None:
    network, expected = opened(files, "pairwise"), look_at(files, "pairwise").image_HW3
    shutil.copy(files / "colours.png", tmp_path / "colours")
    found = compute_attention(network, open_image(network, str(tmp_path / "colours")))
    np.testing.assert_array_equal(found.image_HW3, expected)


def test_layer_by_default_number_and_name(files: Path) -> None:
    for layer, name in (
        (None, "stage2.blocks.0"),
        ("0", "stage1.blocks.0"),
        ("stage1.blocks.1.attention", "stage1.blocks.1"),
    ):
        attention = look_at(files, "pairwise", layer=layer)
        assert attention.layer == f"{name}.attention"
        is_narrow = name.startswith("stage1")
        assert ("only one channel" in attention_in_words(attention)) == (len(attention.weight_GKn) == 1) == is_narrow, layer


@given(st.integers(1, 4), st.integers(2, 9), st.integers(1, 3), st.integers(0, 99))
def test_variance_between_channels(G: int, K: int, P: int, seed: int) -> None:
    weight_GKP = torch.randn(G, K, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)
    found = between_channels(weight_GKP)
    assert 0 <= found <= 100
    assert found == pytest.approx(between_channels(weight_GKP.flip(0)))
    assert found == pytest.approx(between_channels(3 * weight_GKP + 1))
    assert between_channels(weight_GKP[:1].expand(5, K, P)) == pytest.approx(0, abs=1e-9)
    uncorrelated_GK1 = torch.tensor([[1.0, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).unsqueeze(2) / 8 + 0.25
    assert between_channels(uncorrelated_GK1) == pytest.approx(100 * (1 - 1 / 3))
    mirrored = torch.cat((weight_GKP, 2 / K - weight_GKP))  # every channel has an opposite one
    assert between_channels(mirrored) == pytest.approx(100)


def test_rejects_other_images(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures file descriptors, because DALI prints its own messages about broken images before ours."""
    (tmp_path / "text.png").write_bytes(b"a text")
    (tmp_path / "cut.png").write_bytes((files / "colours.png").read_bytes()[:200])
    for image, words in (
        ("none.png", "cannot read this file (No such file or directory)"),
        (".", "not a file, but a folder"),
        ("/dev/null", "not a file, but a folder, a pipe or a device"),
        ("text.png", "not an image in a known format"),
        ("cut.png", "damaged"),
    ):
        command = ("attention", files / "san10_pairwise.pt", tmp_path / image, "--profile", "digits")
        code, out, err = captured_san(monkeypatch, capfd, *command)
        assert (code, out) == (2, ""), image
        assert f"san: {tmp_path / image}: {words}" in err


def test_rejects_a_network_with_other_stages(files: Path) -> None:
    mine = module_spec("mine", lambda num_classes, in_channels: san.create_model("san10_pairwise", num_classes)).build(10)
    with pytest.raises(UserError, match="mine has no attention layers that can be drawn"):
        layer_name(replace(opened(files, "pairwise"), model=mine), None)


def test_rejects(files: Path, rejected: Rejected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    for arguments, words in (
        (["san10_pairwise.pt", "360"], "360 images"),
        (["san10_pairwise.pt", "colours.png", "--pixel", "3,24"], "--pixel 3,24: outside"),
        (["san10_pairwise.pt", "colours.png", "--pixel", "3"], "--pixel 3: not ROW,COL"),
        (["san10_pairwise.pt", "colours.png", "--pixel", "3,3", "--grid", "2"], "both `--pixel` and `--grid`"),
        (["san10_pairwise.pt", "colours.png", "--grid", "7"], "at most 6"),
        (["san10_pairwise.pt", "colours.png", "--layer", "stage1.block.1"], "did you mean `stage1.blocks.1.attention`?"),
        (["san10_pairwise.pt", "colours.png", "--out", "a.jpg"], "--out a.jpg: "),
        (["san10_pairwise.pt", "colours.png", "--out", "none/a.png"], "none/a.png: cannot write"),
        (["resnet26.pt", "colours.png"], "resnet26 has no attention layers"),
    ):
        assert words in rejected("attention", *arguments, "--profile", "digits")
