"""`san show --html`: the weights on the page, and the errors of its options."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from experiments.evaluation.attention import look_everywhere, open_image
from tests.experiments.conftest import San
from tests.experiments.evaluation.test_attention import files, opened  # noqa: F401
from tests.experiments.report.conftest import read_page, text_of


def test_page_contains_the_weights_of_all_layers_and_pixels(files: Path, tmp_path: Path, run_san: San) -> None:  # noqa: F811
    page, picture = tmp_path / "page.html", files / "colours.png"
    options = ("--profile", "digits", "--html", page, "--compare", files / "san10_scalar.pt", "--layer", "0")
    code, _, err = run_san("show", files / "san10_patchwise.pt", picture, *options)
    assert code == 0, err
    root = read_page(page)
    assert [text_of(heading) for heading in root.iter("h1")] == ["Attention weights of san10_patchwise and san10_scalar"]
    (element,) = root.findall(".//script[@id='data']")
    data = json.loads(element.text or "")
    for kind, network in zip(("patchwise", "scalar"), data["networks"], strict=True):
        model = opened(files, kind)
        layers = look_everywhere(model, open_image(model, str(picture)))
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--html", "page.html", "--pixel", "1,1"), "`--pixel`"),
        (("--compare", "other.pt"), "--compare: only for `--html`"),
        (("--html", "missing/page.html"), "missing/page.html: cannot write"),
    ],
)
def test_rejects(options: tuple[str, ...], words: str, files: Path, run_san: San) -> None:  # noqa: F811
    code, _, err = run_san("show", files / "san10_pairwise.pt", files / "colours.png", "--profile", "digits", *options)
    assert code == 2
    assert words in err
