"""`san attention-page`: the weights on the page, and the errors of its options."""

import base64
import json
import math
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

import san
from experiments.evaluation.attention import compute_all_attention, open_image
from tests.experiments.conftest import Rejected, San
from tests.experiments.drivers import PATIENCE
from tests.experiments.evaluation.test_attention import files, opened  # noqa: F401
from tests.experiments.report.conftest import read_page, text_of


def test_page_contains_the_weights_of_all_layers_and_pixels(files: Path, tmp_path: Path, run_san: San) -> None:  # noqa: F811
    page, picture = tmp_path / "page.html", shutil.copy(files / "colours.png", tmp_path / "not UTF-8 \udcff.png")
    options = ("--profile", "digits", "--out", page, "--compare", files / "san10_scalar.pt", "--layer", "0")
    code, _, err = run_san("attention-page", files / "san10_patchwise.pt", picture, *options)
    assert code == 0, err
    root = read_page(page)
    assert [text_of(heading) for heading in root.iter("h1")] == ["Attention weights of san10_patchwise and san10_scalar"]
    (element,) = root.findall(".//script[@id='data']")
    data = json.loads(element.text or "")
    for kind, network in zip(("patchwise", "scalar"), data["networks"], strict=True):
        model = opened(files, kind)
        layers = compute_all_attention(model, open_image(model, str(picture)))
        assert [layer["name"] for layer in network["layers"]] == list(layers)
        for attention, layer in zip(layers.values(), network["layers"], strict=True):
            channels, positions, pixels = attention.weight_GKn.shape
            codes = np.frombuffer(zlib.decompress(base64.b64decode(layer["weights"])), np.uint8).astype(float)
            share = (codes - 127) / 127 if layer["signed"] else (codes / 255) ** 2
            weights = layer["limit"] * share.reshape(pixels, channels, positions).transpose(1, 2, 0)
            np.testing.assert_allclose(weights, attention.weight_GKn, atol=attention.limit / 100)
            assert (layer["side"], layer["channels"], layer["footprint"] ** 2) == (attention.map[0], channels, positions)
    image = np.frombuffer(base64.b64decode(data["image"]), np.uint8).reshape(data["size"], data["size"], 3)
    np.testing.assert_allclose(image / 255, attention.image_HW3, atol=1 / 255)


@pytest.mark.slow
def test_script_shows_the_weights_of_the_pixel_in_the_middle(files: Path, tmp_path: Path, run_san: San) -> None:  # noqa: F811
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("a browser is missing: no chromium on PATH (Debian's package chromium)")
    page, picture = tmp_path / "page.html", files / "colours.png"
    run_san("attention-page", files / "san10_patchwise.pt", picture, "--profile", "digits", "--out", page)
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout
    network = opened(files, "patchwise")
    attention = compute_all_attention(network, open_image(network, str(picture)))["stage2.blocks.0.attention"]
    weight_GK = attention.weight_GKn[:, :, 3 * 6 + 3]  # a map of 6 x 6 pixels
    strongest = np.take_along_axis(weight_GK, np.abs(weight_GK).argmax(1)[:, None], 1)[:, 0]
    labels = [float(label) for label in re.findall(r'aria-label="channel \d+: strongest ([-.\de]+)', shown)]
    np.testing.assert_allclose(labels, strongest, atol=attention.limit / 50)


def test_rejects(files: Path, rejected: Rejected, tmp_path: Path) -> None:  # noqa: F811
    command = ("attention-page", files / "san10_pairwise.pt", files / "colours.png", "--profile", "digits")
    network, (whole, part) = san.load_checkpoint(files / "san10_pairwise.pt"), (tmp_path / "whole.pt", tmp_path / "part.pt")
    for path, share in ((whole, 1.0), (part, 0.5)):
        network.pretrained_cfg = {"input_size": (3, 24, 24), "crop_pct": share}
        san.save_checkpoint(network, path)
    said = rejected("attention-page", whole, files / "colours.png", "--compare", part, "--out", tmp_path / "page.html")
    assert "it prepares the image in another way" in said
    next(network.parameters()).data.fill_(math.nan)
    san.save_checkpoint(network, part)
    assert "not finite" in rejected("attention", part, *command[2:])
    said = rejected(*command, "--out", "missing/page.html")
    assert "missing/page.html: cannot write" in said and "--out" in said
