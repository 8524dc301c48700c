"""Disturbs `san run` at random for a while, and checks that it neither hangs nor loses anything.

    make soak [SOAK_MINUTES=30] [SOAK_SEED=1], or python -m tests.faults.soak --minutes 30 --seed 1 [--folder DIR] [--only N]

An episode trains one small trial, injects one to four faults at random times, removes them, and reruns the command until the
grid is complete. It passes if no command hangs, prints a traceback or leaves processes behind; MLflow has one run with each
epoch once; the table equals that of an undisturbed run, and with one worker the weights are bit-identical. The same seed gives
the same schedule. The folders of failed episodes are kept; --only repeats one episode of the seed. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from experiments.config.grid import GridRequest
from experiments.runner.grid_run import open_grid_run
from experiments.runs.workspace import open_store
from experiments.training.checkpoint import DAMAGE, Checkpoint
from tests.cluster.processes import AGENTS, MARK, marked
from tests.experiments.drivers import Driver
from tests.experiments.samples import logged_epochs
from tests.experiments.servers import ObjectStore, Server
from tests.faults.faults import GRID, SETTINGS
from tests.faults.witness import steps_of

HANG_MINUTES = 0.5
HANG_SECONDS = 300.0
"""A command that neither trains nor prints for this long hangs: many times longer than `HANG_MINUTES`."""
RERUNS = 8
Lift = Callable[[], object]
VICTIMS = {
    "worker": b"ImplicitFunc",
    "raylet": b"raylet/raylet",
    "GCS": b"gcs/gcs_server",
    "dashboard agent": AGENTS[0],
    "environment agent": AGENTS[1],
    "log monitor": b"log_monitor.py",
    "autoscaler monitor": b"monitor.py",
    "two workers' process": b"RayTrainWorker",
}
SETUPS = {
    "one worker": 10,
    "one worker, tracking server": 4,
    "one worker, bucket and tracking server": 3,
    "two workers": 3,
}
"""With their weights."""


class Fault(NamedTuple):
    """One disturbance of the schedule."""

    delay: float
    """Seconds after the previous one."""
    kind: str
    victim: str
    seconds: float
    """Duration, if it has one."""
    seed: int


def schedule(seed: int, episode: int) -> tuple[str, list[Fault]]:
    """Returns the setup and the faults of an episode."""
    rng = random.Random(f"{seed}-{episode}")
    setup = rng.choices(list(SETUPS), list(SETUPS.values()))[0]
    kinds = ["kill"] * 5 + ["stop"] * 3 + ["second command", "corrupt file"]
    kinds += ["object store away"] * 3 if "bucket" in setup else ["full disk", "read-only disk"]
    kinds += ["tracking server killed"] * 3 if "server" in setup else []
    victims = ["command", "worker", "worker", *VICTIMS]
    faults = [
        Fault(rng.uniform(2, 20), rng.choice(kinds), rng.choice(victims), rng.choice([2.0, 10.0, 40.0]), rng.randrange(2**32))
        for _ in range(rng.randint(1, 4))
    ]
    return setup, faults


class ProblemError(Exception):
    """Something that must not happen."""


class ImpossibleNowError(Exception):
    """A fault cannot be injected at this moment."""


class Episode:
    """One disturbed grid."""

    def __init__(self, folder: Path, setup: str) -> None:
        self.folder, self.setup = folder, setup
        self.overrides = [*SETTINGS, f"checkpointing.hang_timeout_minutes={HANG_MINUTES}"]
        if "two" in setup:
            self.overrides.append("resources.workers=2")
        self.runs = folder / "runs"
        for path in (self.runs, folder / "home", folder / "server"):
            path.mkdir(parents=True)
        self.environment = {MARK: str(folder), "HOME": str(folder / "home"), "WITNESS_PAUSE": "0.1"}
        self.environment["SAN_CACHE"] = os.environ.get("SAN_CACHE", str(Path("~/.cache/san").expanduser()))
        self.store = self.server = None
        if "bucket" in setup:
            self.store = ObjectStore(folder / "store.log")
            self.environment |= ObjectStore.KEYS | {"SAN_SCRATCH": str(folder / "scratch")}
        else:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self.runs], check=True)
        if "server" in setup:
            self.server = Server(folder / "server", f"sqlite:///{folder / 'server' / 'mlflow.db'}")
            self.relaunch()
            self.environment["MLFLOW_TRACKING_URI"] = self.server.uri
        self.drivers: list[Driver] = []
        self.injected: list[str] = []
        self.lifts: list[tuple[float, Lift]] = []
        """Functions that end a fault, and when to call them."""
        self.state, self.changed_at = "", time.monotonic()

    @property
    def place(self) -> str:
        return self.store.uri("soak") if self.store else str(self.runs)

    @property
    def record(self) -> Path:
        """The folder with the record of the steps."""
        if self.store is None:
            return self.runs
        return next(iter(self.folder.glob("scratch/**/steps.txt")), self.folder / "scratch/none").parent

    def start(self) -> None:
        if len(self.drivers) > RERUNS:
            raise ProblemError(f"not complete after {RERUNS} reruns")
        uri = self.place if self.store else None
        log = self.folder / f"command{len(self.drivers)}"
        # In a bucket, a command that was killed leaves its claim.
        overrides = [*self.overrides, *(["--take-over"] if self.drivers and uri else [])]
        driver = Driver(GRID, self.runs, overrides, self.environment, "tests.faults.witness", uri, log.with_suffix(".log"))
        self.drivers.append(driver)

    def run(self, faults: list[Fault]) -> None:
        self.start()
        for fault in faults:
            if self.wait(fault.delay):
                break  # the grid is complete
            self.inject(fault)
        while not self.wait(60):
            pass

    def wait(self, seconds: float) -> bool:
        """Waits, reruns the command if it fails, and lifts faults when they end. Returns whether the grid is complete."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            time.sleep(0.1)
            for lift in [lift for lift in self.lifts if lift[0] <= time.monotonic()]:
                self.lifts.remove(lift)
                lift[1]()
            driver = self.drivers[-1]
            if (code := driver.process.poll()) is not None:
                self.check_output(driver, code)
                if not self.lifts:  # as a user, who reruns the command once the disk or the server is back
                    if code == 0:
                        return True
                    self.start()
            state = f"{len(steps_of(self.record))} {len(driver.said)} {len(self.drivers)} {len(self.lifts)} {code}"
            if state != self.state:
                self.state, self.changed_at = state, time.monotonic()
            elif time.monotonic() - self.changed_at > HANG_SECONDS:
                raise ProblemError(f"no progress for {HANG_SECONDS:.0f} s")
        return False

    def check_output(self, driver: Driver, code: int) -> None:
        if "Traceback" in driver.said:
            raise ProblemError("a traceback was printed")
        if code not in (0, 1, 2, os.EX_TEMPFAIL, -signal.SIGKILL):
            raise ProblemError(f"exit code {code}")

    def inject(self, fault: Fault) -> None:
        began = time.monotonic()
        try:
            method = getattr(self, fault.kind.replace(" ", "_").replace("-", "_"))
            lift: Lift | None = method(fault, random.Random(fault.seed))
        except ImpossibleNowError:
            return
        self.injected.append(f"{fault.kind}: {fault.victim}" if fault.kind in ("kill", "stop") else fault.kind)
        if lift:
            self.lifts.append((began + fault.seconds, lift))

    # Each method injects the fault of its name and returns the function that ends it, if the fault has a duration.

    def kill(self, fault: Fault, rng: random.Random) -> None:
        os.kill(self.victim(fault.victim, rng), signal.SIGKILL)

    def stop(self, fault: Fault, rng: random.Random) -> Lift:
        pid = self.victim(fault.victim, rng)
        os.kill(pid, signal.SIGSTOP)
        return functools.partial(_continue, pid)

    def full_disk(self, fault: Fault, rng: random.Random) -> Lift:
        ballast = self.runs / "ballast"
        with suppress(OSError), open(ballast, "wb") as file:
            while True:
                file.write(bytes(65536))
                file.flush()
        return functools.partial(ballast.unlink, missing_ok=True)

    def read_only_disk(self, fault: Fault, rng: random.Random) -> Lift:
        _remount(self.runs, "ro")
        return functools.partial(_remount, self.runs, "rw")

    def object_store_away(self, fault: Fault, rng: random.Random) -> Lift:
        assert self.store is not None
        self.store.stop()
        return self.store.resume

    def tracking_server_killed(self, fault: Fault, rng: random.Random) -> Lift:
        assert self.server is not None
        self.server.kill()
        return self.relaunch

    def second_command(self, fault: Fault, rng: random.Random) -> None:
        """Another `san run` of the same grid, which fails unless the first has ended."""
        uri, log = self.place if self.store else None, self.folder / f"second{len(self.injected)}.log"
        other = Driver(GRID, self.runs, self.overrides, self.environment, "tests.faults.witness", uri, log)
        self.check_output(other, other.finish())

    def corrupt_file(self, fault: Fault, rng: random.Random) -> None:
        """Changes bytes of a file next to the checkpoints."""
        found = [path for path in self.runs.glob("checkpoints/*/*") if path.is_file() and path.stat().st_size]
        if not found:
            raise ImpossibleNowError
        path = rng.choice(sorted(found))
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 64])):
            content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
        path.write_bytes(content)

    def victim(self, name: str, rng: random.Random) -> int:
        """The id of a process."""
        command = self.drivers[-1].process
        if name == "command":
            found = [command.pid] if command.poll() is None else []
        else:
            found = [pid for pid in marked(str(self.folder)) if VICTIMS[name] in _command_line(pid)]
        if not found:
            raise ImpossibleNowError
        return rng.choice(found)

    def relaunch(self) -> None:
        assert self.server is not None
        self.server.launch()
        self.server.wait()

    def close(self) -> None:
        for _, lift in self.lifts:
            lift()
        for pid in marked(str(self.folder)):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.server:
            self.server.kill()
        if self.store:
            self.store.resume()
            self.store.end()
        if self.runs.is_mount():
            subprocess.run(["umount", "--lazy", self.runs], check=True)

    def check(self, whole: Episode) -> None:
        """Compares a complete grid with the undisturbed one."""
        limit = time.monotonic() + 60
        while (left := marked(str(self.folder), AGENTS)) and time.monotonic() < limit:
            time.sleep(0.2)
        if left:
            raise ProblemError(f"processes are left: {[_command_line(pid)[:60] for pid in left]}")
        self.check_tracking()
        if self.table() != whole.table():
            raise ProblemError(f"another table: {self.table()} instead of {whole.table()}")
        ours, theirs = self.weights(), whole.weights()
        if "two" not in self.setup and ours is not None and theirs is not None:
            if not all(torch.equal(value, theirs[key]) for key, value in ours.items()):
                raise ProblemError("other weights")

    def check_tracking(self) -> None:
        with patch.dict(os.environ, self.environment):
            grid_run = open_grid_run(GridRequest(GRID, "digits", tuple(self.overrides), self.place))
            found = logged_epochs(grid_run)
        if [(status, sorted(epochs)) for (_, _, status), epochs in found.items()] != [("FINISHED", list(range(12)))]:
            raise ProblemError(f"runs in MLflow: {found}")

    def last_file(self, folder: str, suffix: str) -> bytes:
        """The content of the last file in a folder of the store."""
        with patch.dict(os.environ, self.environment):
            store = open_store(self.place)
            content = store.read([name for name in store.names(folder) if name.endswith(suffix)][-1])
        assert content is not None
        return content

    def table(self) -> str:
        with patch.dict(os.environ, self.environment):
            title = open_grid_run(GridRequest(GRID, "digits", tuple(self.overrides), self.place)).full_name
        return self.last_file(title, "table.csv").decode()

    def weights(self) -> Mapping[str, torch.Tensor] | None:
        """The weights of the last checkpoint; None if it was corrupted after it was written, which reading it shows."""
        trial = steps_of(self.record)[0].trial
        try:
            checkpoint = Checkpoint.of_bytes(self.last_file(f"checkpoints/{trial}", ".pt"))
            return checkpoint.engine["model"]
        except DAMAGE:
            if "corrupt file" not in self.injected:
                raise ProblemError("the last checkpoint is damaged") from None
            return None


def _continue(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGCONT)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _remount(path: Path, mode: str) -> None:
    if subprocess.run(["mount", "-o", f"remount,{mode}", path], capture_output=True).returncode:
        raise ImpossibleNowError  # a file is being written


def run_episode(seed: int, number: int, folder: Path, whole: dict[str, Episode]) -> str:
    """Runs one episode and returns the faults and the problem, if any.

    It is compared with the undisturbed run with as many workers, which is made when it is first needed.
    """
    setup, faults = schedule(seed, number)
    workers = setup.partition(",")[0]
    if workers not in whole:
        whole[workers] = Episode(folder / f"undisturbed-{workers}", workers)
        whole[workers].run([])
    episode, problem = Episode(folder / f"seed-{seed}-episode-{number}", setup), "passed"
    try:
        episode.run(faults)
        episode.check(whole[workers])
    except Exception as error:
        problem = f"PROBLEM: {error!r}"
        shutil.copytree(episode.runs, episode.folder / "kept")  # the runs are on a file system in memory
    finally:
        episode.close()
    if problem == "passed":
        shutil.rmtree(episode.folder)
    return f"{setup}; {', '.join(episode.injected) or 'no faults'}; {len(episode.drivers)} commands: {problem}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat this episode")
    parser.add_argument("--folder", type=Path, help="keep results and failed episodes here  [default: a temporary folder]")
    options = parser.parse_args()
    folder: Path = (options.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    whole, problems, limit = dict[str, Episode](), 0, time.monotonic() + 60 * options.minutes
    try:
        for number in itertools.count() if options.only is None else [options.only]:
            if time.monotonic() > limit:
                break
            result = run_episode(options.seed, number, folder, whole)
            problems += "PROBLEM" in result
            print(f"episode {number}: {result}", flush=True)
    finally:
        for episode in whole.values():
            episode.close()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
