"""`san show --html`: the page in a browser, its weights, and the errors of its options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from experiments.evaluation.attention import look_everywhere, open_image
from tests.browser import Browser, browser
from tests.experiments.conftest import San
from tests.experiments.evaluation.test_attention import files, opened  # noqa: F401
from tests.experiments.report.page_checks import faults

STRONGEST = "[...document.querySelectorAll('figure canvas')].map(tile => tile.ariaLabel)"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def open_page(shown: Browser, path: Path) -> None:
    shown.open(path.as_uri())
    shown.wait_for("document.querySelector('figure') !== null")


def click(shown: Browser, row: float, column: float) -> None:
    """Clicks the image at a place given as fractions of its height and width."""
    left, top, width = shown.evaluate(
        "(box => [box.left, box.top, box.width])(document.querySelector('#image').getBoundingClientRect())"
    )
    place = {"x": left + column * width, "y": top + row * width, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        shown.call("Input.dispatchMouseEvent", type=kind, **place)


@pytest.mark.slow
def test_page_shows_the_weights_of_the_selected_pixel(
    files: Path,  # noqa: F811
    shown: Browser,
    tmp_path: Path,
    run_san: San,
) -> None:
    page, picture = tmp_path / "page.html", files / "colours.png"
    options = ("--profile", "digits", "--html", page, "--compare", files / "san10_scalar.pt")
    _, out, _ = run_san("show", files / "san10_patchwise.pt", picture, *options)
    assert out == f"{page}: open this file in a browser\n"
    for width in (1280, 400):
        for dark in (False, True):
            shown.show(width, dark)
            open_page(shown, page)
            assert shown.complaints == shown.requests == []
            assert faults(shown, width) == {}
            shown.screenshot(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
    shown.show(1280, False)
    open_page(shown, page)

    network = opened(files, "patchwise")
    layers = look_everywhere(network, open_image(network, str(picture)))
    assert shown.evaluate("[...document.querySelectorAll('option')].map(option => option.value)") == list(layers)
    attention = layers["stage2.blocks.0.attention"]  # a map of 6 x 6 pixels
    click(shown, 1.5 / 6, 4.5 / 6)
    shown.wait_for("document.querySelector('#pixel').textContent.startsWith('Pixel in row 1, column 4')")
    shown.evaluate("document.querySelector('#image').focus()")
    for key in ("ArrowDown", "ArrowLeft"):
        shown.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    shown.wait_for("document.querySelector('#pixel').textContent.startsWith('Pixel in row 2, column 3')")
    weight_GK = attention.weight_GKn[:, :, 2 * 6 + 3]
    strongest = np.take_along_axis(weight_GK, np.abs(weight_GK).argmax(1)[:, None], 1)[:, 0]
    shown.wait_for("document.querySelector('#networks').dataset.shown === '2,3'")
    words = shown.evaluate(STRONGEST)[2 : 2 + len(strongest)]
    found = [float(text.split("strongest ")[1].split(",")[0]) for text in words]
    np.testing.assert_allclose(found, strongest, atol=attention.limit / 50)

    shown.evaluate("document.querySelector('select').value = 'stage1.blocks.0.attention'")
    shown.evaluate("document.querySelector('select').dispatchEvent(new Event('change'))")
    shown.wait_for("document.querySelector('#pixel').textContent.endsWith('12 x 12 feature map')")
    assert "san10_scalar: predicts" in shown.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--html", "page.html", "--pixel", "1,1"), "`--html` shows all pixels; leave out `--pixel` and `--grid`"),
        (("--compare", "other.pt"), "--compare: only for `--html`; add `--html FILE.html`"),
        (("--html", "missing/page.html"), "missing/page.html: cannot write this file (No such file or directory)"),
    ],
    ids=["a pixel", "comparison of PNG files", "missing folder"],
)
def test_rejects(options: tuple[str, ...], message: str, files: Path, run_san: San) -> None:  # noqa: F811
    code, _, err = run_san("show", files / "san10_pairwise.pt", files / "colours.png", "--profile", "digits", *options)
    assert code == 2
    assert message in err
