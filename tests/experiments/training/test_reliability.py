"""What a trial survives, with real processes: kills at any step and in any write, damaged and foreign files, full disks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from experiments.errors import UserError
from experiments.grids.config import PROJECT_DIR
from experiments.runs.summary import Epoch
from experiments.runs.workspace import Workspace
from experiments.training.checkpoint import Checkpoint, Checkpoints, Origin, only_writer
from experiments.training.engine import Engine
from experiments.training.job import Job
from experiments.training.metrics import RunningEpoch
from experiments.training.trainer import run_trial
from experiments.training.watchdog import EXIT_CODE
from tests.experiments.processes import Kill, ended, start, weights
from tests.experiments.training.test_training import EPOCH

SHORT = ("recipe.epochs=2", "recipe.batch_size=50", "data.train_per_class=20")  # 4 steps an epoch
ORIGIN = Origin("small", "digits", "pairwise_3", 0, {}, "abc-def", ("cat", "dog"))
ALWAYS = ("reliability.check_every_n_steps=1", "reliability.checkpoint_every_n_minutes=1e-9")


def of_step(epoch: int, step: int = 0, value: float = 0.0, top1: float = 50.0, key: str = "abc") -> Checkpoint:
    """A checkpoint of two workers with something in it."""
    history = tuple(replace(EPOCH, epoch=number, top1=top1 - number) for number in range(epoch))
    return Checkpoint(
        key,
        ORIGIN,
        history,
        RunningEpoch(epoch, 0.1, step, 1.5),
        {"model": {"w": torch.full((1000,), value)}, "workers": [{"buffers": {}}, {"buffers": {}}]},
    )


def kept(folder: Path, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder / "deep" / "abc", "abc", keep, 600)
    checkpoints.prepare()
    return checkpoints


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    assert checkpoints.load() is None
    saved = of_step(2, 7, value=3.0)
    checkpoints.save(saved)
    loaded = checkpoints.load()
    assert loaded is not None
    assert (loaded.history, loaded.running, loaded.workers) == (saved.history, saved.running, 2)
    assert torch.equal(loaded.engine["model"]["w"], torch.full((1000,), 3.0))


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    for epoch in range(4):  # the first is the best
        for step in (0, 10, 20):
            if epoch or step:
                checkpoints.save(of_step(epoch, step))
    names = [path.name for path in sorted(checkpoints.folder.iterdir())]
    assert names == ["epoch-0001-step-0000000.pt", "epoch-0003-step-0000010.pt", "epoch-0003-step-0000020.pt"]


def test_a_checkpoint_of_another_trial_is_refused(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    checkpoints.save(of_step(1, key="other"))
    with pytest.raises(UserError, match=r"epoch-0001-step-0000000.pt: a checkpoint of cell other, not of abc; move the file"):
        checkpoints.load()


def of_another_version(path: Path) -> None:
    torch.save({"key": "abc", "history": [{"epoch": 0, "renamed": 1.0}], "running": {}}, path)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (Path.mkdir, r"cannot read this checkpoint \(Is a directory\); check the disk"),
        (of_another_version, "intact, but written by another ver"),
    ],
)
def test_a_checkpoint_that_is_not_damaged_is_not_set_aside(what: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    checkpoints.save(of_step(1))
    path = checkpoints.folder / of_step(2).name
    what(path)
    with pytest.raises(UserError, match=rf"epoch-0002-step-0000000.pt: {reason}"):
        checkpoints.load()
    assert path.exists()


def flip_a_bit(content: bytes) -> bytes:
    at = content.index(b"\x00\x00\x80\x3f" * 100) + 40  # in the weights: 1.0
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: b"not a checkpoint", lambda content: content[:-700], flip_a_bit]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = kept(tmp_path)
    for epoch in (1, 2):
        checkpoints.save(of_step(epoch, value=1.0))
    for epoch, before in (
        (2, "resuming from epoch-0001-step-0000000.pt"),
        (1, "no earlier checkpoint, so training starts from the beginning"),
    ):
        path = checkpoints.folder / of_step(epoch).name
        path.write_bytes(damage(path.read_bytes()))
        loaded = checkpoints.load()
        assert (loaded and loaded.running.number) == (1 if epoch == 2 else None)
        assert f"renamed to {path.stem}.broken" in caplog.text
        assert before in caplog.text
        assert path.with_suffix(".broken").exists()


def lose_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def fill_the_disk(folder: Path) -> None:
    """No file may grow beyond 1000 bytes."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(
    ("fault", "reason", "good"),
    [(lose_the_folder, "No such file or directory", 0), (fill_the_disk, "File too large", 1)],
)
def test_a_disk_that_fails_gives_a_sentence_and_keeps_the_last_checkpoint(
    fault: Callable[[Path], None], reason: str, good: int, tmp_path: Path
) -> None:
    import resource

    checkpoints = kept(tmp_path)
    checkpoints.save(of_step(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fault(checkpoints.folder)
    try:
        with pytest.raises(UserError) as raised:
            checkpoints.save(of_step(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = "the last good checkpoint is epoch-0001-step-0000000.pt" if good else "there is no earlier checkpoint"
    assert str(raised.value) == (
        f"{checkpoints.folder / 'epoch-0002-step-0000000.pt'}: cannot write this checkpoint ({reason}); {told}; "
        "check the disk, then run the same command again to resume"
    )
    assert [path.name for path in checkpoints.folder.glob("*")] == ["epoch-0001-step-0000000.pt"] * good


def test_a_kill_while_checkpoints_are_written_leaves_one_that_can_be_read(tmp_path: Path) -> None:
    """Twenty writers, each killed at a moment of its own."""
    code = """
import os, random, signal, sys, time
from pathlib import Path
from tests.experiments.training.test_reliability import kept, of_step
folder = Path(sys.argv[1])
written = partials = 0
for round in range(20):
    checkpoints = kept(folder)
    assert not list(checkpoints.folder.glob("*.partial"))
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(written + 1, written + 10_000):
            checkpoints.save(of_step(1, step, value=float(step)))
            os.write(say, step.to_bytes(4, "big"))
    os.close(say)
    os.read(said, 4)
    time.sleep(random.Random(round).uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b""
    while piece := os.read(said, 65536):
        rest += piece
    os.close(said)
    partials += len(list(checkpoints.folder.glob("*.partial")))
    acknowledged = int.from_bytes(rest[-4:], "big") if rest else written + 1
    loaded = checkpoints.load()
    assert loaded.running.steps in (acknowledged, acknowledged + 1), (loaded.running, acknowledged)
    assert float(loaded.engine["model"]["w"][0]) == loaded.running.steps
    assert not list(checkpoints.folder.glob("*.broken"))
    written = loaded.running.steps
print(written, partials)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT_DIR, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written, partials = map(int, done.stdout.split())
    assert written > 20
    assert partials > 0, "no kill hit a write"


def test_two_processes_do_not_write_the_same_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is about to end is waited for, one that stays is told of."""
    with only_writer(tmp_path / "abc"):
        with pytest.raises(UserError, match=r"abc: another process has been training this cell for more than 0 s; wait until"):
            with only_writer(tmp_path / "abc", seconds=0.2):
                pass
        leaving = ExitStack()
        leaving.enter_context(only_writer(tmp_path / "def"))
        timer = threading.Timer(0.3, leaving.close)
        timer.start()
        with only_writer(tmp_path / "def"):
            assert timer.finished.is_set()
    assert "def: another process is training this cell; waiting up to 300 s for that process" in caplog.text


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGSTOP)", "ctypes.PyDLL(None).sleep(30)"])
def test_a_process_whose_threads_cannot_run_is_killed(how: str) -> None:
    """It is stopped, or keeps the interpreter's lock."""
    code = f"""
import ctypes, os, signal, sys, time
from experiments.training.watchdog import Watchdog
with Watchdog(30, sys.stderr):
    pass
with Watchdog(1, sys.stderr) as watchdog:
    for step in range(15):
        time.sleep(0.1)
        watchdog.step_ended()
    print("steps", flush=True)
    {how}
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-9, "steps\n", "")
    assert time.monotonic() - began < 20


def without_times(history: tuple[Epoch, ...]) -> list[tuple[float, ...]]:
    return [astuple(replace(epoch, images_per_second=0.0, wait_share=0.0)) for epoch in history]


def last(job: Job, workspace: Workspace) -> Checkpoint:
    (trial,) = (trial for trial in job.trials if trial.row == "resnet26_3")
    path = Checkpoints(workspace.checkpoints(trial), trial.key, 2, 600).newest()
    assert path is not None
    return Checkpoint.read(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "kills"),
    [
        (1, [Kill("step", 3), Kill("step", 8), Kill("write", 3), Kill("write", 10)]),
        # Before its third step a worker has done the second with the other, which then has saved the first.
        (2, [Kill("step", 3), Kill("step", 7)]),
    ],
)
def test_a_killed_trial_ends_as_the_uninterrupted_one(
    world: int, kills: list[Kill], open_small_job: Callable[..., Job], place: Callable[[str], Workspace]
) -> None:
    job = open_small_job(*SHORT, *ALWAYS)
    (trial,) = (trial for trial in job.trials if trial.row == "resnet26_3")
    whole = place("whole")
    assert ended(start(whole, trial, world)) == [0] * world
    for kill in kills:
        killed = place(f"{kill.what}{kill.when}")
        assert ended(start(killed, trial, world, kill))[-1] == -9
        assert not (killed.runs / "rank0.pt").exists()
        begun = last(job, killed).running
        assert ended(start(killed, trial, world)) == [0] * world
        assert f"resuming from epoch-{begun.number:04d}-step-{begun.steps:07d}.pt" in killed.log(trial).read_text()
        for rank in range(world):
            resumed = weights(killed, rank)
            for name, value in weights(whole, rank).items():
                assert torch.equal(value, resumed[name]), (kill, rank, name)
        assert without_times(last(job, killed).history) == without_times(last(job, whole).history), kill
        assert not list(killed.checkpoints(trial).glob("*.partial"))


@pytest.mark.slow
def test_a_trial_goes_on_with_another_number_of_workers(
    open_small_job: Callable[..., Job], place: Callable[[str], Workspace]
) -> None:
    job = open_small_job(*SHORT, *ALWAYS)
    (trial,) = (trial for trial in job.trials if trial.row == "resnet26_3")
    workspace = place("runs2")
    assert ended(start(workspace, trial, 2, Kill("step", 7)))[-1] == -9
    begun = last(job, workspace)
    assert (begun.workers, begun.running.number) == (2, 1)
    assert begun.running.steps in (1, 2)  # the first is written before they do the second together, which may not be any more
    assert ended(start(workspace, trial, 1)) == [0]
    assert "the number of workers changed from 2 to 1: BatchNorm resumes from the mean" in workspace.log(trial).read_text()
    finished = last(job, workspace)
    assert (finished.workers, len(finished.history)) == (1, 2)


def test_a_loss_that_is_not_finite_stops_the_trial(open_small_job: Callable[..., Job], process_group: None) -> None:
    """Within `check_every_n_steps`, and what is told is the step that it was, not the one at which it was found."""
    job = open_small_job(
        *SHORT, "recipe.lr=1e30", "reliability.check_every_n_steps=3", "reliability.checkpoint_every_n_minutes=1e-9"
    )
    with pytest.raises(
        FloatingPointError,
        match=r"^non-finite loss in step [23] of epoch 0 at learning rate .*e\+\d\d; "
        r"last good checkpoint: .*/epoch-0000-step-0000001.pt; try a lower recipe.lr$",
    ):
        run_trial(job.workspace, job.trials[0], lambda metrics: None)


def test_a_validation_loss_that_is_not_finite_stops_the_trial(
    open_small_job: Callable[..., Job], process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is neither saved nor logged."""
    job = open_small_job(*SHORT)
    trial = job.trials[0]
    monkeypatch.setattr("experiments.training.loop.evaluate", lambda *arguments: (float("nan"), 10.0, 50.0, 360))
    with pytest.raises(FloatingPointError, match=r"^non-finite validation loss after epoch 0; last good checkpoint: none;"):
        run_trial(job.workspace, trial, lambda metrics: None)
    assert not list(job.workspace.checkpoints(trial).glob("*.pt"))
    assert not job.tracker.results()[trial.key].metrics.keys() & {"val/loss", "val/top1"}


def test_weights_that_are_not_finite_are_not_saved(
    open_small_job: Callable[..., Job], process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step's loss is finite, what it does to the weights is not; the checkpoint of the first stays."""
    job = open_small_job(*SHORT, *ALWAYS)
    trial = job.trials[0]
    step, calls = Engine.train_step, []

    def ruining(engine: Engine, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        loss = step(engine, images_NCHW, labels_N)
        calls.append(loss)
        if len(calls) == 2:
            next(engine.model.parameters()).data[0] = float("inf")
        return loss

    monkeypatch.setattr(Engine, "train_step", ruining)
    with pytest.raises(
        FloatingPointError,
        match=r"^non-finite weights after 2 steps of epoch 0; last good checkpoint: .*/epoch-0000-step-0000001.pt; try a lower",
    ):
        run_trial(job.workspace, trial, lambda metrics: None)
    assert [path.name for path in job.workspace.checkpoints(trial).glob("*.pt")] == ["epoch-0000-step-0000001.pt"]


def hang_in_the_second_step() -> None:
    step, calls = Engine.train_step, []

    def hanging(engine: Engine, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        calls.append(step(engine, images_NCHW, labels_N))
        if len(calls) == 2 and os.environ["RANK"] == "0":
            time.sleep(600)
        return calls[-1]

    Engine.train_step = hanging  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_worker_that_hangs_is_ended(
    world: int, open_small_job: Callable[..., Job], place: Callable[[str], Workspace]
) -> None:
    job = open_small_job(*SHORT, *ALWAYS, "reliability.hang_timeout_minutes=0.3")
    (trial,) = (trial for trial in job.trials if trial.row == "resnet26_3")
    workspace = place("hangs")
    workers = start(workspace, trial, world, body=hang_in_the_second_step)
    for worker in workers:
        worker.join(60)
    assert workers[0].exitcode == EXIT_CODE
    assert all(worker.exitcode for worker in workers)  # the others end with their watchdog or with what gloo says
    said = workspace.log(trial).read_text()
    assert "worker 0: no step finished for 0.3 minutes; stopping this worker. Stack of each thread:" in said
    assert "in hanging" in said
    assert last(job, workspace).running.steps == 1
