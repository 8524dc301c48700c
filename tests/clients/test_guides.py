"""The Python blocks of guides that need clients, including those that tests/docs does not run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

for package in ("torchvision", "lightning"):
    pytest.importorskip(package, reason=f"{package} is missing: run `make test-clients`")

GUIDES = Path(__file__).parents[2] / "docs/guides"


def test_the_guide_to_other_tools_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (GUIDES / "pytorch.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "<guide>", "exec"), names)
    (right,) = re.findall(r"epoch 3: (\d+)% right", capsys.readouterr().out)
    assert int(right) > 80
    assert names["trainer"].callback_metrics["accuracy"] > 0.5
    assert all(loss.isfinite() for loss in names["losses"].values())
    assert names["detector"].backbone.body.stage2.linear.weight.grad.abs().sum() > 0
    assert set(names["predictions"][0]) == {"boxes", "labels", "scores"}
