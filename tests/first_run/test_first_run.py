"""Users of a GPU that cannot be used yet get one clear message, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_run.__main__ import SCENES, play


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_a_first_run_says_what_is_wrong_and_what_helps(name: str, tmp_path: Path) -> None:
    scene = SCENES[name]
    code, output = play(scene, tmp_path)
    assert "Traceback" not in output
    assert code == scene.code, output
    for words in scene.expected:
        assert words in output
