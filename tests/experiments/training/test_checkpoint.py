"""Checkpoints are written atomically and checked when they are read."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.errors import UserError
from experiments.grids.config import PROJECT_DIR
from experiments.runs.store import StorageError
from tests.experiments.samples import flip_a_bit, full_disk, of_step, opened_checkpoints


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints/abc").glob("epoch-*"))


def test_round_trip(tmp_path: Path) -> None:
    checkpoints = opened_checkpoints(tmp_path)
    assert checkpoints.newest is None
    saved = of_step(2, 7, value=3.0)
    checkpoints.save(saved)
    loaded = opened_checkpoints(tmp_path).load()
    assert loaded is not None
    assert (loaded.history, loaded.running, loaded.workers) == (saved.history, saved.running, 2)
    assert torch.equal(loaded.engine["model"]["w"], torch.full((1000,), 3.0))


def test_keeps_the_last_checkpoints_and_the_best(tmp_path: Path) -> None:
    checkpoints = opened_checkpoints(tmp_path)
    for epoch in range(4):  # the first is the best
        for step in (0, 10, 20):
            if epoch or step:
                checkpoints.save(of_step(epoch, step))
    assert files(tmp_path) == ["epoch-0001-step-0000000.pt", "epoch-0003-step-0000010.pt", "epoch-0003-step-0000020.pt"]


def unreadable(path: Path) -> None:
    path.symlink_to(path)


def of_another_version(path: Path) -> None:
    torch.save({"key": "abc", "history": [{"epoch": 0, "renamed": 1.0}], "running": {}}, path)


def of_another_trial(path: Path) -> None:
    path.write_bytes(of_step(2, key="other").as_bytes())


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (unreadable, "Too many levels of symbolic links"),
        (of_another_version, "another version"),
        (of_another_trial, "trial other, not of abc"),
    ],
)
def test_rejects_a_foreign_or_unreadable_checkpoint(create: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    checkpoints = opened_checkpoints(tmp_path)
    checkpoints.save(of_step(1))
    create(Path(checkpoints.uri(of_step(2).name)))
    with pytest.raises((UserError, StorageError), match=rf"epoch-0002-step-0000000.pt: .*{reason}"):
        checkpoints.load()
    assert files(tmp_path) == ["epoch-0001-step-0000000.pt", "epoch-0002-step-0000000.pt"]


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: b"not a checkpoint", lambda content: content[:-700], flip_a_bit]
)
def test_damaged_checkpoint_is_renamed_and_the_previous_one_loaded(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = opened_checkpoints(tmp_path)
    for epoch in (1, 2):
        checkpoints.save(of_step(epoch, value=1.0))
    for epoch, left, then in ((2, 1, "resuming from epoch-0001-step-0000000.pt"), (1, None, "no earlier checkpoint")):
        path = Path(checkpoints.uri(of_step(epoch).name))
        path.write_bytes(damage(path.read_bytes()))
        loaded = checkpoints.load()
        assert (loaded and loaded.running.number) == left
        assert f"renamed to {path.stem}.broken; {then}" in caplog.text
        assert path.with_suffix(".broken").exists() and not path.exists()


def test_full_disk_keeps_the_last_good_checkpoint_and_names_it(tmp_path: Path) -> None:
    checkpoints = opened_checkpoints(tmp_path)
    checkpoints.save(of_step(1))
    with full_disk(), pytest.raises(StorageError, match="last good checkpoint is epoch-0001-"):
        checkpoints.save(of_step(2))
    assert files(tmp_path) == ["epoch-0001-step-0000000.pt"]


def test_kill_during_a_write_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    """Twenty writers, each killed at a random moment."""
    code = """
import os, random, signal, sys, time
from pathlib import Path
from tests.experiments.samples import of_step, opened_checkpoints
folder = Path(sys.argv[1])
written = partials = 0
for round in range(20):
    checkpoints = opened_checkpoints(folder)
    assert not list(folder.rglob("*.partial"))
    output, said = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(written + 1, written + 10_000):
            checkpoints.save(of_step(1, step, value=float(step)))
            os.write(said, step.to_bytes(4, "big"))
    os.close(said)
    os.read(output, 4)
    time.sleep(random.Random(round).uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b""
    while piece := os.read(output, 65536):
        rest += piece
    os.close(output)
    partials += len(list(folder.rglob("*.partial")))
    confirmed = int.from_bytes(rest[-4:], "big") if rest else written + 1
    loaded = checkpoints.load()
    assert loaded.running.steps in (confirmed, confirmed + 1), (loaded.running, confirmed)
    assert float(loaded.engine["model"]["w"][0]) == loaded.running.steps
    assert not list(folder.rglob("*.broken"))
    written = loaded.running.steps
assert written > 20
assert partials > 0, "no kill hit a write"
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT_DIR, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
