"""Injects faults into real `san run` processes and writes the table of docs/results/faults.md.

    make faults, or python -m tests.faults.faults [--only TEXT] [--folder DIR] [--page docs/results/faults.md]

Each row trains a small trial on digits, disturbs it, and runs the same command again unless the trial recovers by itself. A row
passes if no more steps were repeated than lie between two checkpoints (three, if one is damaged), MLflow has one run with
each epoch once, and the table equals that of an undisturbed `san run`; with one worker the weights must be bit-identical too.
The command fails if a row fails. Finished rows are kept in the folder and not run again; the page is written once all rows
are finished. Needs Linux. Users other than root need `unshare -rm` for the small disk; that row is skipped without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from experiments.grids.config import PROJECT_DIR
from experiments.runner.job import Job, open_job
from experiments.training.checkpoint import Checkpoint
from tests.cluster.test_signals import AGENTS, MARK, marked
from tests.experiments.drivers import Driver
from tests.experiments.servers import Server
from tests.faults.witness import Step, steps_of

GRID = Path(__file__).parent / "grid.yaml"
LOOK = 5
"""Steps between two checkpoints."""
EPOCHS = 12
SETTINGS = (
    *(f"recipe.epochs={EPOCHS}", "recipe.batch_size=30"),  # 20 steps an epoch
    *(f"reliability.check_every_n_steps={LOOK}", "reliability.checkpoint_every_n_minutes=1e-9"),
)
BEGIN, END = "<!-- faults: written by `make faults` -->", "<!-- /faults -->"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    fault: str
    done: str
    lost: int
    """Steps that were trained twice."""
    runs: int
    epochs: str
    same: str
    """What is equal to the undisturbed trial's."""
    seconds: float


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
        self.began = time.monotonic()
        self.runs.mkdir(parents=True, exist_ok=True)

    def start(self, **environment: str) -> Driver:
        self.drivers.append(Driver(GRID, self.runs, self.overrides, self.environment | environment, "tests.faults.witness"))
        return self.drivers[-1]

    def wait(self, holds: Callable[[], object], seconds: float = 120) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        while not holds():
            said = "\n---\n".join(driver.said for driver in self.drivers)
            assert time.monotonic() - began < seconds, f"not within {seconds} s; said until then:\n{said}"
            time.sleep(0.02)
        return time.monotonic() - began

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

    def trial_log(self) -> str:
        return "".join(path.read_text() for path in self.runs.glob("logs/*.log"))

    def job(self) -> Job:
        return open_job(GRID, "digits", self.overrides, self.runs)

    def close(self) -> None:
        for driver in self.drivers:
            if driver.process.poll() is None:
                driver.process.kill()
                driver.process.wait()
        for pid in marked(self.environment[MARK]):
            os.kill(pid, signal.SIGKILL)
        if self.server is not None:
            self.server.kill()
        if self.runs.is_mount():
            subprocess.run(["umount", "--lazy", self.runs], check=True)


# A fault disturbs a scene, brings it to its end, and tells what was done and seen.


def worker_killed(scene: Scene) -> str:
    scene.start()
    os.kill(scene.step(133).pid, signal.SIGKILL)
    assert "resumes after a failure" in scene.finish()
    return "the worker gets SIGKILL at step 133; `san run` retries the trial, without being restarted itself"


def driver_killed(scene: Scene) -> str:
    scene.start()
    scene.step(133)
    scene.drivers[-1].process.kill()
    scene.drivers[-1].process.wait()
    scene.start()  # at once, while the old trial may still be there
    gone = scene.wait(lambda: len({step.pid for step in steps_of(scene.runs)}) > 1)
    scene.finish()
    _no_two_at_once(steps_of(scene.runs))
    return f"`san run` gets SIGKILL at step 133; after an immediate restart, training continues within {gone:.0f} s"


def driver_killed_and_left(scene: Scene) -> str:
    scene.start()
    scene.step(133)
    scene.drivers[-1].process.kill()
    scene.drivers[-1].process.wait()
    gone = scene.wait(lambda: not marked(scene.environment[MARK], AGENTS), 60)
    scene.go_on()
    return (
        f"`san run` gets SIGKILL at step 133; its processes, except idle agents, end within {gone:.0f} s; "
        "then the command is run again"
    )


def killed_in_a_write(scene: Scene) -> str:
    scene.start(WITNESS_KILL_AT_WRITE="26")
    scene.finish()
    assert (scene.runs / "killed").exists()
    return (
        "the worker gets SIGKILL when half of the 26th checkpoint is written; `san run` retries the trial, without "
        "being restarted itself"
    )


def server_stopped(scene: Scene) -> str:
    folder = scene.runs.parent / "server"
    folder.mkdir()
    scene.server = Server(folder, f"sqlite:///{folder / 'mlflow.db'}")
    scene.server.launch()
    scene.server.wait()
    scene.environment["MLFLOW_TRACKING_URI"] = scene.server.uri
    scene.start(WITNESS_PAUSE="0.5")
    scene.step(30)
    scene.server.kill()
    away = time.monotonic()
    time.sleep(60)
    assert scene.drivers[-1].process.poll() is None, scene.drivers[-1].said
    trained = steps_of(scene.runs)[-1].number
    scene.server.launch()
    scene.server.wait()
    seconds = time.monotonic() - away
    scene.finish()
    return (
        f"`mlflow server` is killed at step 30 and is back after {seconds:.0f} s; training reaches step "
        f"{trained} in the meantime"
    )


def disk_full(scene: Scene) -> str:
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(scene.runs)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        raise ImpossibleHereError(f"no tmpfs can be mounted here ({mounted.stderr.strip()})")
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
    assert "Traceback" not in driver.said, driver.said
    ballast.unlink()
    scene.go_on()
    return (
        f"a tmpfs of 48 MiB is filled at step 133; `san run` prints an error and exits with code {code}; "
        "after space is freed, the command is run again"
    )


def _damaged(scene: Scene, how: Callable[[bytes], bytes]) -> None:
    scene.start()
    scene.step(133)
    os.killpg(scene.drivers[-1].process.pid, signal.SIGKILL)
    scene.drivers[-1].process.wait()
    scene.wait(lambda: not marked(scene.environment[MARK], AGENTS), 60)
    newest = scene.newest()
    newest.write_bytes(how(newest.read_bytes()))
    scene.damaged = 1
    scene.go_on()
    assert f"{newest.name}: damaged" in scene.trial_log(), scene.trial_log()
    assert "resuming from epoch-" in scene.trial_log()


def a_bit_flipped(scene: Scene) -> str:
    def flip(content: bytes) -> bytes:
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]

    _damaged(scene, flip)
    return (
        "`san run` is killed and one bit of the file is flipped; on restart, `san run` sets the file aside and uses "
        "the previous checkpoint"
    )


def cut(scene: Scene) -> str:
    _damaged(scene, lambda content: content[: 2 * len(content) // 3])
    return (
        "`san run` is killed and the file is cut to two thirds; on restart, `san run` sets the file aside and uses "
        "the previous checkpoint"
    )


def two_at_once(scene: Scene) -> str:
    first = scene.start()
    worker = scene.step(50).pid
    os.kill(worker, signal.SIGSTOP)  # it might end before the second has begun
    scene.start()
    said = scene.finish(2)
    os.kill(worker, signal.SIGCONT)
    assert "another `san run` is training this grid" in said
    scene.drivers.append(first)
    scene.finish()
    return "the second `san run` ends with an error and exit code 2; the first one is not affected"


def _stopped(scene: Scene, name: str, stop: Callable[[subprocess.Popen[str]], None]) -> str:
    scene.start()
    scene.step(133)
    stop(scene.drivers[-1].process)
    said = scene.finish(1)
    assert "Run the same command again to resume" in said
    gone = scene.wait(lambda: not marked(scene.environment[MARK]), 60)
    scene.go_on()
    return (
        f"{name} at step 133; it exits with code 1 and a message, and its processes end within {gone:.0f} s; "
        "then the command is run again"
    )


def terminated(scene: Scene) -> str:
    return _stopped(scene, "`san run` gets SIGTERM", lambda driver: driver.terminate())


def interrupted(scene: Scene) -> str:
    return _stopped(scene, "`san run` gets SIGINT (Ctrl-C)", lambda driver: os.killpg(driver.pid, signal.SIGINT))


def ray_killed(scene: Scene, process: str) -> str:
    scene.start()
    scene.step(30)
    (pid,) = [pid for pid in marked(scene.environment[MARK]) if Path(f"/proc/{pid}/exe").resolve().name == process]
    os.kill(pid, signal.SIGKILL)
    seconds = scene.wait(lambda: "restarting Ray (1 of 10)" in scene.drivers[-1].said, 60)
    scene.finish()
    return (
        f"Ray's process {process} gets SIGKILL at step 30, in a run of 40 epochs; `san run` notices within {seconds:.0f} s, "
        "restarts Ray and continues"
    )


def hung(scene: Scene) -> str:
    scene.start()
    os.kill(scene.step(133).pid, signal.SIGSTOP)
    seconds = scene.wait(lambda: "resumes after a failure" in scene.drivers[-1].said, 100)
    scene.finish()
    return (
        "the worker gets SIGSTOP at step 133, with `hang_timeout_minutes=0.3`; `san run` retries the trial "
        f"after {seconds:.0f} s, without being restarted itself"
    )


def _no_two_at_once(steps: Sequence[Step]) -> None:
    """Once a process has begun, none that began before it does a step."""
    order = list(dict.fromkeys(step.pid for step in steps))
    places = [order.index(step.pid) for step in steps]
    assert places == sorted(places), "two processes trained the same trial at once"


FAULTS: dict[str, tuple[Callable[[Scene], str], tuple[str, ...]]] = {
    "a trial's only worker is killed": (worker_killed, ()),
    "one of two workers is killed": (worker_killed, ("placement.workers=2",)),
    "`san run` is killed and restarted immediately": (driver_killed, ()),
    "`san run` is killed and restarted later": (driver_killed_and_left, ()),
    "a trial is killed while it writes a checkpoint": (killed_in_a_write, ()),
    "the tracking server is down for 60 s": (server_stopped, ()),
    "the disk is full": (disk_full, ()),
    "the last checkpoint has a flipped bit": (a_bit_flipped, ()),
    "the last checkpoint is truncated": (cut, ()),
    "a second `san run` trains the same grid": (two_at_once, ()),
    "`san run` is terminated": (terminated, ()),
    "`san run` is interrupted with Ctrl-C": (interrupted, ()),
    "Ray's raylet is killed": (partial(ray_killed, process="raylet"), ("recipe.epochs=40",)),
    "Ray's head (GCS) is killed": (partial(ray_killed, process="gcs_server"), ("recipe.epochs=40",)),
    "Ray's raylet is killed while a trial has two workers": (
        partial(ray_killed, process="raylet"),
        ("placement.workers=2", "recipe.epochs=40"),
    ),
    "a trial's only worker hangs": (hung, ("reliability.hang_timeout_minutes=0.3",)),
    "one of two workers hangs": (hung, ("reliability.hang_timeout_minutes=0.3", "placement.workers=2")),
}


def undisturbed(folder: Path, overrides: tuple[str, ...]) -> Scene:
    """What a disturbed scene is compared with; trained once for all rows with the same recipe and workers."""
    told = [override for override in overrides if not override.startswith("reliability.")]
    scene = Scene(folder / "-".join(["undisturbed", *told]), *told)
    if not (scene.runs / "grid-digits" / "table.csv").exists():
        try:
            scene.go_on()
        finally:
            scene.close()
    return scene


def run_row(name: str, folder: Path) -> Row:
    """Raises AssertionError where the row does not hold."""
    fault, overrides = FAULTS[name]
    whole = undisturbed(folder, overrides)
    at = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    shutil.rmtree(at, ignore_errors=True)
    scene = Scene(at, *overrides)
    try:
        done = fault(scene)
        return _judged(name, done, scene, whole)
    except ImpossibleHereError as reason:
        return Row(name, f"skipped: {reason}", 0, 0, "-", "-", 0.0)
    finally:
        scene.close()


def _judged(name: str, done: str, scene: Scene, whole: Scene) -> Row:
    seconds = time.monotonic() - scene.began
    numbers = [step.number for step in steps_of(scene.runs) if step.rank == 0]
    lost = len(numbers) - len(set(numbers))
    assert set(numbers) == {step.number for step in steps_of(whole.runs)}, "steps are missing"
    assert lost <= LOOK * (1 + scene.damaged), f"{lost} steps were trained twice"

    runs, logged = _tracked(scene)
    epochs = len(Checkpoint.read(scene.newest()).history)
    assert runs == 1, f"{runs} runs in MLflow"
    missing, doubled = len(set(range(epochs)) - set(logged)), len(logged) - len(set(logged))
    assert missing == doubled == 0, f"epochs in MLflow: {logged}"

    assert _table(scene) == _table(whole), f"{_table(scene)} is not {_table(whole)}"
    ours, theirs = (Checkpoint.read(each.newest()).engine["model"] for each in (scene, whole))
    equal = all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert equal or "placement.workers=2" in scene.overrides, "other weights"
    return Row(name, done, lost, runs, f"{epochs} ({missing}/{doubled})", "table, weights" if equal else "table", seconds)


def _tracked(scene: Scene) -> tuple[int, list[int]]:
    """How many runs MLflow has of the trial, and the epochs of all of them."""
    if scene.server is not None:
        os.environ["MLFLOW_TRACKING_URI"] = scene.server.uri
    try:
        client = scene.job().tracker.client
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    experiment = client.get_experiment_by_name(GRID.stem)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`san.role` = 'trial'")
    histories = [client.get_metric_history(run.info.run_id, "val/top1") for run in found]
    return len(found), [metric.step for history in histories for metric in history]


def _table(scene: Scene) -> str:
    return (scene.runs / f"{GRID.stem}-digits" / "table.csv").read_text()


def page_of(rows: Sequence[Row]) -> str:
    """The table between its marks."""
    head = (
        "| fault | what happens | steps trained twice | MLflow runs | epochs in MLflow (missing/duplicate)"
        " | identical to the undisturbed run | seconds |"
    )
    lines = [
        f"| {row.fault} | {row.done} | {row.lost} | {row.runs} | {row.epochs} | {row.same} | {row.seconds:.0f} |"
        for row in rows
    ]
    return "\n".join([BEGIN, "", head, "|---|---|---:|---:|---:|---|---:|", *lines, "", END])


def write_page(page: Path, rows: Sequence[Row]) -> None:
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + page_of(rows) + rest.split(END)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only faults whose name contains this, and do not write the page")
    parser.add_argument("--folder", type=Path, help="keep finished rows here  [default: a temporary folder]")
    parser.add_argument("--page", type=Path, default=PROJECT_DIR / "docs" / "results" / "faults.md")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make programs in the background ignore it
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if os.getuid() and shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        os.execvp("unshare", [*unshare, sys.executable, "-m", __spec__.name, *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = (options.folder or Path(scratch)).resolve()
        rows, failed = [], []
        for name in FAULTS:
            kept = folder / f"{name}.json"
            if options.only not in name:
                continue
            if not kept.exists():
                try:
                    kept.write_text(json.dumps(asdict(run_row(name, folder))))
                except (AssertionError, subprocess.SubprocessError) as error:
                    failed.append(name)
                    print(f"FAILED {name}: {error}", file=sys.stderr, flush=True)
                    continue
            rows.append(Row(**json.loads(kept.read_text())))
            print(page_of(rows[-1:]).splitlines()[4], flush=True)
    if not failed and not options.only:
        write_page(options.page, rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
