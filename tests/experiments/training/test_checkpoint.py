"""Checkpoints are written atomically and checked when they are read."""

import itertools
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.errors import UserError
from experiments.runs.store import StorageError
from tests.experiments.processes import SERVER
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


def save_until_killed(folder: Path, when: int) -> None:
    """Saves one checkpoint after the other, and dies before a file or folder is written to disk for the `when`-th time. Half of
    the file is lost."""
    fsync, calls, checkpoints = os.fsync, 0, opened_checkpoints(folder)

    def deadly(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = deadly  # type: ignore[assignment]
    for step in itertools.count(1):
        checkpoints.save(of_step(1, step, value=float(step)))
        (folder / "saved").write_text(str(step))


def test_kill_during_a_write_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    kinds = set()
    for when in range(3, 9):
        folder = tmp_path / str(when)
        folder.mkdir()
        process = SERVER.Process(target=save_until_killed, args=(folder, when))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        saved, kind = int((folder / "saved").read_text()), "file" if list(folder.rglob("*.partial")) else "folder"
        kinds.add(kind)
        checkpoints = opened_checkpoints(folder)
        assert not list(folder.rglob("*.partial"))
        loaded = checkpoints.load()
        assert loaded is not None and loaded.running.steps in (saved, saved + 1), (when, kind)
        assert float(loaded.engine["model"]["w"][0]) == loaded.running.steps
        assert not list(folder.rglob("*.broken"))
    assert kinds == {"file", "folder"}
