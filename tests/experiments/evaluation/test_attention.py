"""`san show` and the page's samples: the weights that the network used, a description, and clear errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import san
from experiments.evaluation.attention import Attention, between_channels, in_words, look, open_image
from experiments.evaluation.evaluate import LoadedModel, open_checkpoint
from experiments.report.attention_plot import save
from pipelines import prepare_digits
from san import ops
from tests.experiments.conftest import San, captured_san

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
    return look(network, open_image(network, str(files / "colours.png")), pixel, grid, layer)


@pytest.mark.parametrize(
    ("where", "whose"),
    [(("--pixel", "2,20"), "row 0, column 5"), (("--grid", "3"), "3 x 3 grid of pixels")],
    ids=["pixel", "grid"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_weights_and_describes_them(
    kind: str, where: Sequence[str], whose: str, files: Path, tmp_path: Path, run_san: San
) -> None:
    out = tmp_path / "picture.png"
    options = ("--profile", "digits", "--out", out, *where)
    _, text, _ = run_san("show", files / f"{KINDS[kind]}.pt", files / "colours.png", *options)
    with Image.open(out) as picture:
        assert picture.info["Description"] == text.removeprefix(f"{out}: ").rstrip("\n")
        assert picture.width == 1200 and picture.height > 800
        assert len(np.unique(np.asarray(picture.convert("L")))) > 100
    for words in (f"san10_{kind} predicts class ", f"{kind} attention", whose, "variance of"):
        assert words in text


@pytest.mark.parametrize("kind", KINDS)
def test_pixel_selects_weights_of_the_layer(kind: str, files: Path) -> None:
    everywhere, one = look_at(files, kind, grid=6), look_at(files, kind, pixel=(9, 20))
    assert everywhere.map == (6, 6)
    assert one.pixels == ((2, 5),)
    np.testing.assert_array_equal(one.weight_GKn[:, :, 0], everywhere.weight_GKn[:, :, 2 * 6 + 5])
    assert one.between_everywhere == everywhere.between == everywhere.between_everywhere
    assert one.weight_GKn.shape == (8 if kind == "scalar" else 4, 49, 1)


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


def test_image_is_preprocessed_as_in_validation(files: Path, tmp_path: Path) -> None:
    """A number selects the image at this place of the split. Files and numbers are preprocessed alike."""
    root = prepare_digits(tmp_path / "digits")
    network = open_checkpoint(files / "san10_pairwise.pt", (f"data.root={root}",), "digits")
    images = open_image(network, "40")
    by_number, by_name = (look(network, open_image(network, image)) for image in ("40", str(root / images.paths[0])))
    assert images.paths[0].startswith("val/1/")
    np.testing.assert_array_equal(by_number.image_HW3, by_name.image_HW3)
    np.testing.assert_array_equal(by_number.weight_GKn, by_name.weight_GKn)
    with Image.open(root / images.paths[0]) as picture:
        small = np.asarray(picture.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR)) / 255
    np.testing.assert_allclose(by_number.image_HW3, small, atol=0.02)


@pytest.mark.parametrize(
    ("name", "options"), [("a.bmp", {}), ("a.tiff", {}), ("a.webp", {"lossless": True}), ("no_suffix", {"format": "PNG"})]
)
def test_image_format_does_not_matter(name: str, options: dict[str, Any], files: Path, tmp_path: Path) -> None:
    with Image.open(files / "colours.png") as picture:
        picture.save(tmp_path / name, **options)
    network = opened(files, "pairwise")
    image_HW3 = look(network, open_image(network, str(tmp_path / name))).image_HW3
    np.testing.assert_array_equal(image_HW3, look_at(files, "pairwise").image_HW3)


def test_number_means_an_image_even_if_a_folder_has_that_name(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = open_checkpoint(files / "san10_pairwise.pt", (f"data.root={prepare_digits(tmp_path / 'digits')}",), "digits")
    monkeypatch.chdir(tmp_path / "digits/val")
    assert open_image(network, "3").paths[0].startswith("val/0/")


@pytest.mark.parametrize(
    ("layer", "name"),
    [(None, "stage2.blocks.0"), ("0", "stage1.blocks.0"), ("stage1.blocks.1.attention", "stage1.blocks.1")],
)
def test_layer_by_default_number_and_name(layer: str | None, name: str, files: Path) -> None:
    assert look_at(files, "pairwise", layer=layer).layer == f"{name}.attention"


def test_layer_with_one_channel(files: Path, tmp_path: Path) -> None:
    attention = look_at(files, "pairwise", layer="0")
    save(attention, tmp_path / "one.png")
    assert "attention, 1 weight channel) " in in_words(attention)
    assert in_words(attention).endswith("There is only one channel, so all value channels share one map of weights.")


def test_draws_only_some_of_many_channels(files: Path, tmp_path: Path) -> None:
    """All weights of the layer are equal here, as after zero initialization."""
    torch.manual_seed(0)
    san.save_checkpoint(
        san.create_model("san10_patchwise", 10, num_stages=2, group_size=1, width_mult=2.0), tmp_path / "wide.pt"
    )
    network = open_checkpoint(tmp_path / "wide.pt", (), "digits")
    for parameter in network.model.parameters():
        parameter.data.zero_()
    attention = look(network, open_image(network, str(files / "colours.png")))
    save(attention, tmp_path / "wide.png")
    assert "attention, 128 weight channels)" in in_words(attention)
    assert (attention.between, attention.between_everywhere) == (0.0, 0.0)


@given(st.integers(1, 4), st.integers(2, 9), st.integers(1, 3), st.integers(0, 99))
def test_variance_between_channels(G: int, K: int, P: int, seed: int) -> None:
    weight_GKP = torch.randn(G, K, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)
    found = between_channels(weight_GKP)
    assert 0 <= found <= 100
    assert found == pytest.approx(between_channels(weight_GKP.flip(0)))
    assert found == pytest.approx(between_channels(3 * weight_GKP + 1))
    assert between_channels(weight_GKP[:1].expand(5, K, P)) == pytest.approx(0, abs=1e-9)
    mirrored = torch.cat((weight_GKP, 2 / K - weight_GKP))  # every channel has an opposite one
    assert between_channels(mirrored) == pytest.approx(100)


def test_variance_between_channels_with_nothing_in_common() -> None:
    uncorrelated_GK1 = torch.tensor([[1.0, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).unsqueeze(2) / 8 + 0.25
    assert between_channels(uncorrelated_GK1) == pytest.approx(100 * (1 - 1 / 3))


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def gif(files: Path, tmp: Path) -> str:
    with Image.open(files / "colours.png") as picture:
        picture.save(tmp / "a.gif")
    return str(tmp / "a.gif")


def cut(files: Path, tmp: Path, name: str) -> str:
    with Image.open(files / "colours.png") as picture:
        picture.save(tmp / name)
    content = (tmp / name).read_bytes()
    return written(tmp / name, content[: len(content) // 2])


def pairwise(files: Path, *arguments: str) -> list[str]:
    return [str(files / "san10_pairwise.pt"), *arguments]


def colours(files: Path, *arguments: str) -> list[str]:
    return pairwise(files, str(files / "colours.png"), *arguments)


MISTAKES: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "missing file": (
        lambda files, tmp: pairwise(files, str(tmp / "none.png")),
        "{tmp}/none.png: no such file; expected one JPEG or PNG image\n",
    ),
    "text file": (
        lambda files, tmp: pairwise(files, written(tmp / "a.png", b"a text")),
        "{tmp}/a.png: not a JPEG or PNG image; give a valid JPEG or PNG file\n",
    ),
    "format that DALI cannot decode": (
        lambda files, tmp: pairwise(files, gif(files, tmp)),
        "{tmp}/a.gif: a GIF image, which DALI cannot decode; give a valid JPEG or PNG file\n",
    ),
    "folder": (
        lambda files, tmp: pairwise(files, str(tmp)),
        "{tmp}: a folder; expected one JPEG or PNG image\n",
    ),
    "device file": (
        lambda files, tmp: pairwise(files, "/dev/null"),
        "/dev/null: not a regular file; expected one JPEG or PNG image\n",
    ),
    "name that is too long": (
        lambda files, tmp: pairwise(files, 300 * "x"),
        "xxx: no such file; expected one JPEG or PNG image\n",
    ),
    "empty file": (lambda files, tmp: pairwise(files, written(tmp / "a.png", b"")), "{tmp}/a.png: empty file; give"),
    "truncated PNG": (lambda files, tmp: pairwise(files, cut(files, tmp, "cut.png")), "{tmp}/cut.png: damaged: "),
    "truncated JPEG": (lambda files, tmp: pairwise(files, cut(files, tmp, "cut.jpg")), "{tmp}/cut.jpg: damaged: "),
    "number outside the split": (
        lambda files, _: pairwise(files, "360"),
        "digits/val has 360 images; give a number from 0 to 359, or a file",
    ),
    "pixel outside the image": (
        lambda files, _: colours(files, "--pixel", "3,24"),
        "--pixel 3,24: outside the model's input of 24 x 24 pixels; give a row and a column from 0 to 23",
    ),
    "invalid pixel": (
        lambda files, _: colours(files, "--pixel", "3"),
        "--pixel 3: not ROW,COL; give two integers, for example 12,8",
    ),
    "pixel and grid": (
        lambda files, _: colours(files, "--pixel", "3,3", "--grid", "2"),
        "both `--pixel` and `--grid`; give only one of these options",
    ),
    "grid finer than the feature map": (
        lambda files, _: colours(files, "--grid", "7"),
        "--grid 7: the feature map of stage2.blocks.0.attention has 6 x 6 pixels; give at most 6",
    ),
    "unknown layer": (
        lambda files, _: colours(files, "--layer", "3"),
        "--layer 3: no such attention layer in san10_pairwise; "
        "give a number or one of these names: 0 stage1.blocks.0.attention, 1 stage1.blocks.1.attention, 2 stage2.blocks",
    ),
    "network without attention": (
        lambda files, _: [str(files / "resnet26.pt"), str(files / "colours.png")],
        "resnet26.pt: resnet26 has no attention layers; give a checkpoint of a self-attention network",
    ),
    "output file that is not a PNG": (
        lambda files, tmp: colours(files, "--out", str(tmp / "a.jpg")),
        "--out {tmp}/a.jpg: the picture is a PNG; give a file name that ends in .png",
    ),
    "output folder that does not exist": (
        lambda files, tmp: colours(files, "--out", str(tmp / "none" / "a.png")),
        "{tmp}/none/a.png: cannot write this file (No such file or directory); choose another file with --out",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_show_command_rejects_wrong_arguments(
    mistake: str, files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures file descriptors, because DALI prints its own messages about broken images before ours."""
    arguments, message = MISTAKES[mistake]
    code, out, err = captured_san(monkeypatch, capfd, "show", *arguments(files, tmp_path), "--profile", "digits")
    assert (code, out) == (2, "")
    assert err.startswith("san: ") or "\nsan: " in err
    assert message.format(tmp=tmp_path) in err[err.rindex("san: ") :] and "Traceback" not in err
