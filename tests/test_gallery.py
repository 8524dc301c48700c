"""The pictures of the README and the guides: each exists, has a description, and is made by a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from experiments.runner.job import open_job

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
IMAGE = re.compile(r"^!\[(.*)\]\((.*)\)$", re.MULTILINE)
PAGES = [ROOT / "README.md", DOCS / "index.md", *DOCS.glob("start/*.md"), *DOCS.glob("guides/*.md")]
PICTURES = {
    (page.parent / file).resolve().relative_to(ROOT).as_posix(): words
    for page in PAGES
    for words, file in IMAGE.findall(page.read_text(encoding="utf-8"))
}
GUIDE = (DOCS / "guides/attention.md").read_text(encoding="utf-8")
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", PICTURES)
def test_pictures_exist_and_are_made_by_a_command(file: str) -> None:
    assert (ROOT / file).is_file()
    assert len(PICTURES[file].split()) > 10
    assert file in COMMANDS or file in MAKEFILE


def test_no_picture_is_unused() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in (DOCS / "images").iterdir()} == set(PICTURES)


def test_pictures_say_which_network_they_are_of() -> None:
    """That of the trial whose key is in the command: a key that has changed leaves an old picture behind."""
    job = open_job(DOCS / "gallery.yaml", "digits", ())
    models = {trial.key: trial.config.model.name for trial in job.trials}
    shown = [(key, file) for key, file in re.findall(r"san show (\w{12}) .*--out (\S+)", COMMANDS) if file in PICTURES]
    assert len(shown) >= 5
    assert {key for key, _ in shown} == set(models)
    for key, file in shown:
        with Image.open(ROOT / file) as picture:
            assert re.match(rf"{models[key]} predicts ", picture.info["Description"])
