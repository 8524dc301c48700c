"""docs/gallery.md: every picture is there, says what it shows, and is made by a command that stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from experiments.job import open_job

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "gallery.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"^!\[(.*)\]\((.*)\)$", PAGE, re.MULTILINE)
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(("words", "file"), PICTURES, ids=[file for _, file in PICTURES])
def test_pictures_are_there_and_made_by_a_command(words: str, file: str) -> None:
    assert (DOCS / file).is_file()
    assert len(words.split()) > 10
    assert f"docs/{file}" in COMMANDS or (file.startswith("figures/") and "docs/figures/draw.py" in COMMANDS)


def test_pictures_of_the_readme_are_in_the_gallery() -> None:
    shown = re.findall(r"^!\[.*\]\(docs/(.*)\)$", (DOCS.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown and set(shown) <= {file for _, file in PICTURES}


def test_pictures_say_which_network_they_are_of() -> None:
    """That of the trial whose key is in the command: a key that has changed leaves an old picture behind."""
    job = open_job(DOCS / "gallery.yaml", "digits", ())
    models = {trial.key: trial.config.model.name for trial in job.trials}
    shown = re.findall(r"san show (\w{12}) .*--out (\S+)", COMMANDS)
    assert len(shown) >= 4
    assert {key for key, _ in shown} == set(models)
    for key, file in shown:
        with Image.open(DOCS.parent / file) as picture:
            assert picture.info["Description"].startswith(f"{models[key]} takes ")
