"""Attempts of an attacker on the same machine or network, or with control over files that a user opens."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from PIL import Image

import cluster.session
from experiments.cli.commands import main
from experiments.runs.store import LocalStore
from pipelines import DataError, Dataset
from pipelines.datasets.pack import pack
from pipelines.datasets.shards import HEADER, _checksum, index_path


@pytest.mark.parametrize("prepared", ["link", "open folder"])
def test_folder_of_another_user_is_not_used(prepared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("cluster.session._LONGEST_TEMPORARY", 1000)
    planted = tmp_path / f"san-{os.getuid()}"
    if prepared == "link":
        (tmp_path / "elsewhere").mkdir()
        planted.symlink_to(tmp_path / "elsewhere")
    else:
        planted.mkdir()
        planted.chmod(0o777)
    folder = cluster.session.private_folder()
    assert folder.parent == tmp_path and folder != planted and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_deleting_a_folder_of_the_runs_leaves_the_target_of_a_link(tmp_path: Path) -> None:
    store, outside = LocalStore(tmp_path / "runs"), tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.tex").write_text("five years of work")
    (tmp_path / "runs" / "sweeps").mkdir(parents=True)
    (tmp_path / "runs" / "sweeps" / "grid").symlink_to(outside)
    store.delete_folder("sweeps/grid")
    assert (outside / "thesis.tex").exists()


def test_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "data/train/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "data/train/cat/1.png")
    for _ in pack(Dataset.scan(tmp_path / "data", "train"), tmp_path / "shards", 10**6, 1):
        pass
    index = index_path(tmp_path / "shards", "train")
    _, shard, *rows = index.read_text().splitlines()
    lines = [shard.replace("train-00000.tar", "../secret.tar"), *rows]
    index.write_text("\n".join([f"{HEADER}{_checksum(lines)}", *lines, ""]))
    (tmp_path / "shards/train-00000.tar").rename(tmp_path / "secret.tar")
    with pytest.raises(DataError, match="this index is damaged"):
        Dataset.open_shards(tmp_path / "shards", "train")


def test_names_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b]0;owned\x07\x1b[2Jgrid.yaml"
    monkeypatch.setattr(sys, "argv", ["san", "plan", str(tmp_path / name)])
    with pytest.raises(SystemExit):
        main()
    output = capsys.readouterr()
    assert "\x1b" not in output.err + output.out and r"\x1b]0;owned\x07" in output.err
