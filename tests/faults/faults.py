"""Injects faults into real `san run` processes and prints a line of docs/results/faults.md for each.

    make faults, or python -m tests.faults.faults [--only TEXT]

Each row trains a small trial on digits, disturbs it, and runs the same command again unless the trial recovers by itself. A row
passes if no more steps were repeated than lie between two checkpoints (twice as many, if one is damaged), MLflow has one run
with each epoch once, and the table equals that of an undisturbed `san run`; with one worker the weights must be bit-identical
too. The command fails if a row fails. Needs Linux. The full disk needs root and is skipped without it.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from experiments.config.grid import GridRequest
from experiments.runner.grid_run import open_grid_run
from experiments.training.checkpoint import Checkpoint
from tests.cluster.processes import AGENTS, MARK, kill_ray, marked
from tests.experiments.drivers import PATIENCE, Driver
from tests.experiments.samples import logged_epochs
from tests.experiments.servers import Server
from tests.faults.witness import Step, steps_of

GRID = Path(__file__).parent / "grid.yaml"
LOOK = 5
"""Steps between two checkpoints."""
EPOCHS = 12
SETTINGS = (
    *(f"recipe.epochs={EPOCHS}", "recipe.batch_size=30"),  # 20 steps an epoch
    *(f"checkpointing.check_every_n_steps={LOOK}", "checkpointing.checkpoint_every_n_minutes=1e-9"),
)


class ImpossibleHereError(Exception):
    """This fault cannot be injected here; the text gives the reason."""


class Scene:
    """A folder of runs, and the `san run`s that were started on it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.runs, self.overrides = folder / "runs", (*SETTINGS, *overrides)
        self.environment: dict[str, str] = {MARK: str(folder)}
        self.drivers: list[Driver] = []
        self.server: Server | None = None
        self.damaged = 0
        """Checkpoints that were made useless."""
        self.runs.mkdir(parents=True, exist_ok=True)

    def start(self, **environment: str) -> Driver:
        self.drivers.append(Driver(GRID, self.runs, self.overrides, self.environment | environment, "tests.faults.witness"))
        return self.drivers[-1]

    def kill_driver(self) -> None:
        self.drivers[-1].process.kill()
        self.drivers[-1].process.wait()

    def wait(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + PATIENCE
        while not holds():
            said = "\n---\n".join(driver.said for driver in self.drivers)
            assert time.monotonic() < limit, f"not within {PATIENCE} s; said until then:\n{said}"
            time.sleep(0.02)

    def step(self, number: int) -> Step:
        """Waits for a step of training; returns the last that was done."""
        self.wait(lambda: (steps := steps_of(self.runs)) and steps[-1].number >= number)
        return steps_of(self.runs)[-1]

    def finish(self, code: int = 0) -> str:
        """Waits for the last `san run`; returns what it said."""
        driver = self.drivers[-1]
        ended = driver.finish()
        assert ended == code, f"exit code {ended}, not {code}:\n{driver.said}"
        assert "Traceback" not in driver.said, driver.said
        return driver.said

    def go_on(self) -> str:
        """The same command again, to the end."""
        self.start()
        return self.finish()

    def newest(self) -> Path:
        return max(self.runs.glob("checkpoints/*/epoch-*.pt"))

    def close(self) -> None:
        for driver in self.drivers:
            if driver.process.poll() is None:
                driver.process.kill()
                driver.process.wait()
        for pid in marked(self.environment[MARK]):
            with suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(pid, signal.SIGKILL)
        if self.server is not None:
            self.server.kill()
        if self.runs.is_mount():
            subprocess.run(["umount", "--lazy", self.runs], check=True)


# A fault disturbs a scene and brings it to its end.


def worker_killed(scene: Scene) -> None:
    scene.start()
    os.kill(scene.step(133).pid, signal.SIGKILL)
    assert "resumes after a failure" in scene.finish()


def driver_killed(scene: Scene) -> None:
    scene.start()
    scene.step(133)
    scene.kill_driver()
    scene.start()  # at once, while the old trial may still be there
    scene.finish()


def driver_killed_and_left(scene: Scene) -> None:
    scene.start()
    scene.step(133)
    scene.kill_driver()
    scene.wait(lambda: not marked(scene.environment[MARK], AGENTS))
    scene.go_on()


def killed_in_a_write(scene: Scene) -> None:
    scene.start(WITNESS_KILL_AT_WRITE="26")
    scene.finish()
    assert (scene.runs / "killed").exists()


def server_stopped(scene: Scene) -> None:
    folder = scene.runs.parent / "server"
    folder.mkdir()
    scene.server = Server(folder, f"sqlite:///{folder / 'mlflow.db'}")
    scene.server.launch()
    scene.server.wait()
    scene.environment["MLFLOW_TRACKING_URI"] = scene.server.uri
    scene.start(WITNESS_PAUSE="0.5")
    before = scene.step(30)
    scene.server.kill()
    time.sleep(60)
    assert scene.drivers[-1].process.poll() is None, scene.drivers[-1].said
    assert steps_of(scene.runs)[-1].number > before.number + LOOK, "training did not go on"
    scene.server.launch()
    scene.server.wait()
    scene.finish()


def disk_full(scene: Scene) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(scene.runs)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise ImpossibleHereError("no tmpfs can be mounted here")
    scene.start()
    scene.step(133)
    ballast = scene.runs / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):  # a buffer could not be written at the end
        while True:
            file.write(bytes(65536))
    driver = scene.drivers[-1]
    code = driver.finish()
    assert code in (1, 2), f"exit code {code}\n{driver.said}"
    assert "No space left" in driver.said or "full" in driver.said, driver.said
    ballast.unlink()
    scene.go_on()


def _damaged(scene: Scene, how: Callable[[bytes], bytes]) -> None:
    driver = scene.start()
    scene.step(133)
    os.killpg(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    scene.wait(lambda: not marked(scene.environment[MARK], AGENTS))
    newest = scene.newest()
    newest.write_bytes(how(newest.read_bytes()))
    scene.damaged = 1
    scene.go_on()
    log = "".join(path.read_text() for path in scene.runs.glob("logs/*.log"))
    assert f"{newest.name}: damaged" in log and "resuming from epoch-" in log, log


def a_bit_flipped(scene: Scene) -> None:
    def flip(content: bytes) -> bytes:
        archive = zipfile.ZipFile(io.BytesIO(content))  # its padding may change without damage
        largest = archive.read(max(archive.infolist(), key=lambda part: part.file_size))
        place = content.index(largest) + len(largest) // 2
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    _damaged(scene, flip)


def cut(scene: Scene) -> None:
    _damaged(scene, lambda content: content[: 2 * len(content) // 3])


def two_at_once(scene: Scene) -> None:
    first = scene.start()
    worker = scene.step(50).pid
    os.kill(worker, signal.SIGSTOP)  # it might end before the second has begun
    scene.start()
    said = scene.finish(2)
    os.kill(worker, signal.SIGCONT)
    assert "another `san run` is training this grid" in said
    scene.drivers.append(first)
    scene.finish()


def stopped(scene: Scene, number: signal.Signals) -> None:
    driver = scene.start()
    scene.step(133)
    if number == signal.SIGINT:  # Ctrl-C reaches all processes of a terminal
        os.killpg(driver.process.pid, number)
    else:
        driver.process.send_signal(number)
    scene.finish(1)
    scene.wait(lambda: not marked(scene.environment[MARK]))
    scene.go_on()


def ray_killed(scene: Scene, process: str) -> None:
    scene.start()
    scene.step(30)
    kill_ray(process, scene.environment[MARK])
    scene.finish(os.EX_TEMPFAIL)
    scene.go_on()


def hung(scene: Scene) -> None:
    scene.start()
    scene.step(133)
    (scene.runs / "hang").touch()
    scene.wait(lambda: "resumes after a failure" in scene.drivers[-1].said)
    scene.finish()


FAULTS: dict[str, tuple[Callable[[Scene], None], tuple[str, ...]]] = {
    "a trial's only worker is killed": (worker_killed, ()),
    "one of two workers is killed": (worker_killed, ("resources.workers=2",)),
    "`san run` is killed and run again immediately": (driver_killed, ()),
    "`san run` is killed and run again later": (driver_killed_and_left, ()),
    "a trial is killed while it writes a checkpoint": (killed_in_a_write, ()),
    "the tracking server is down for 60 s": (server_stopped, ()),
    "the disk is full": (disk_full, ()),
    "the last checkpoint has a flipped bit": (a_bit_flipped, ()),
    "the last checkpoint is truncated": (cut, ()),
    "a second `san run` trains the same grid": (two_at_once, ()),
    "`san run` is terminated": (partial(stopped, number=signal.SIGTERM), ()),
    "`san run` is interrupted with Ctrl-C": (partial(stopped, number=signal.SIGINT), ()),
    "Ray's raylet is killed": (partial(ray_killed, process="raylet"), ("recipe.epochs=40",)),
    "Ray's head (GCS) is killed": (partial(ray_killed, process="gcs_server"), ("recipe.epochs=40",)),
    "Ray's raylet is killed while a trial has two workers": (
        partial(ray_killed, process="raylet"),
        ("resources.workers=2", "recipe.epochs=40"),
    ),
    "a trial's only worker hangs": (hung, ("checkpointing.hang_timeout_minutes=0.3",)),
    "one of two workers hangs": (hung, ("checkpointing.hang_timeout_minutes=0.3", "resources.workers=2")),
}


TABLE = f"{GRID.stem}-digits+*/table.csv"


def undisturbed(folder: Path, overrides: tuple[str, ...]) -> Scene:
    """Returns what a disturbed scene is compared with; trained once for all rows with the same recipe and workers."""
    told = [override for override in overrides if not override.startswith("checkpointing.")]
    scene = Scene(folder / "-".join(["undisturbed", *told]), *told)
    if not list(scene.runs.glob(TABLE)):
        try:
            scene.go_on()
        finally:
            scene.close()
    return scene


def steps_lost(name: str, folder: Path) -> int:
    """Runs a row and returns the number of steps that were trained twice.

    Raises:
        AssertionError: the row does not hold.
    """
    fault, overrides = FAULTS[name]
    whole = undisturbed(folder, overrides)
    scene = Scene(folder / "".join(letter if letter.isalnum() else "-" for letter in name), *overrides)
    try:
        fault(scene)
        return _judged(scene, whole)
    finally:
        scene.close()


def _judged(scene: Scene, whole: Scene) -> int:
    numbers = [step.number for step in steps_of(scene.runs) if step.rank == 0]
    lost = len(numbers) - len(set(numbers))
    assert set(numbers) == {step.number for step in steps_of(whole.runs)}, "steps are missing"
    assert lost <= LOOK * (1 + scene.damaged), f"{lost} steps were trained twice"
    epochs = range(len(Checkpoint.read(scene.newest()).history))
    assert _tracked_epochs(scene) == [list(epochs)], f"epochs of the runs in MLflow: {_tracked_epochs(scene)}"
    assert _table(scene) == _table(whole), f"{_table(scene)} is not {_table(whole)}"
    ours, theirs = (Checkpoint.read(each.newest()).engine["model"] for each in (scene, whole))
    equal = all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert equal or "resources.workers=2" in scene.overrides, "other weights"
    return lost


def _tracked_epochs(scene: Scene) -> list[list[int]]:
    """Returns the epochs of each run in MLflow."""
    with patch.dict(os.environ, {"MLFLOW_TRACKING_URI": scene.server.uri} if scene.server else {}):
        grid_run = open_grid_run(GridRequest(GRID, "digits", scene.overrides, scene.runs))
        return [sorted(epochs) for epochs in logged_epochs(grid_run).values()]


def _table(scene: Scene) -> str:
    (table,) = scene.runs.glob(TABLE)
    return table.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only faults whose name contains this")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make programs in the background ignore it
    failed = 0
    print("| fault | steps trained twice | seconds |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in FAULTS if options.only in name):
            began = time.monotonic()
            try:
                result = str(steps_lost(name, Path(folder)))
            except ImpossibleHereError as reason:
                result = f"skipped: {reason}"
            except Exception as error:
                failed += 1
                result = f"FAILED: {error!r}"
            print(f"| {name} | {result} | {time.monotonic() - began:.0f} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
