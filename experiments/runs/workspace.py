"""Where runs are kept and tracked."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.errors import UserError
from experiments.grids.config import base_folder, is_job_copy
from experiments.grids.grid import Trial
from experiments.runs import Bucket, StorageError, is_uri
from experiments.runs.address import require_no_secret
from experiments.runs.summary import read_run_id


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where runs are kept, and the tracker's address.

    Runs are kept in a folder that all nodes can reach; or in a bucket, and `runs` is then a folder of this node's own: a file
    lies in the bucket under the name that it has there.
    """

    runs: Path
    tracking_uri: str
    bucket: Bucket | None = None

    def on_this_node(self) -> Workspace:
        """The same, as seen by a process that another node has started."""
        return self if self.bucket is None else replace(self, runs=self.bucket.scratch)

    def checkpoints(self, trial: Trial) -> Path:
        """The folder of a trial's checkpoints."""
        return self.runs / "checkpoints" / trial.key

    def log(self, trial: Trial, node: str | None = None) -> Path:
        """What a trial has to say; with a bucket, on this node or another."""
        beside = "" if self.bucket is None else f"-{node or socket.gethostname()}"
        return self.runs / "logs" / f"{trial.name}-{trial.key}{beside}.log"

    def name(self, path: Path) -> str:
        """Of a file or folder of `runs`, in the bucket."""
        return path.relative_to(self.runs).as_posix()

    def place(self, path: Path) -> str:
        """Where a file of `runs` is kept, for people."""
        return str(path) if self.bucket is None else self.bucket.below(self.name(path))

    def keep(self, path: Path) -> None:
        """Sends a file of `runs` to the bucket, where there is one; raises `StorageError`."""
        if self.bucket is not None:
            self.bucket.put(self.name(path), path.read_bytes())

    def bring(self, path: Path) -> None:
        """Gets a file of `runs` from the bucket, where there is one and has it; raises `StorageError`."""
        if self.bucket is not None and (content := self.bucket.get(self.name(path))) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def run_id(self, trial: Trial) -> str | None:
        """Of the tracker's run in which the trial's checkpoints began, None where it is not known."""
        folder = self.checkpoints(trial)
        if self.bucket is None:
            return read_run_id(folder)
        with suppress(StorageError):
            return (self.bucket.get(f"{self.name(folder)}/run_id") or b"").decode("ascii", "replace").strip() or None
        return None


def default_runs() -> str:
    """`SAN_RUNS`, else `runs/` of `base_folder()`; a Ray job's copy of that is thrown away, so there it is `~/.san/runs`."""
    if runs := os.environ.get("SAN_RUNS"):
        return runs
    return str(Path.home() / ".san" / "runs" if is_job_copy() else base_folder() / "runs")


def open_runs(runs: str | Path | None = None) -> Path | Bucket:
    """Where runs are kept: a folder or a bucket's URI, `default_runs` where none is named. Asks nobody.

    Raises:
        UserError: it is no URI of a bucket, or holds a secret.
    """
    runs = runs or default_runs()
    return Bucket.parse(str(runs)) if is_uri(runs) else Path(runs).resolve()


def open_workspace(runs: str | Path | None = None) -> Workspace:
    """`open_runs`, tracked by `MLFLOW_TRACKING_URI`, else by a database in the folder. Asks nobody.

    Raises:
        UserError: a password is in an address, or a bucket comes without the address of a tracker.
    """
    place = open_runs(runs)
    folder, bucket = (place, None) if isinstance(place, Path) else (place.scratch, place)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        require_no_secret(uri)
    elif bucket is not None:
        raise UserError(
            f"--runs {bucket}: MLflow's database cannot be in a bucket; set MLFLOW_TRACKING_URI to an `mlflow server`, for "
            "example http://server:5000"
        )
    return Workspace(folder, uri or f"sqlite:///{folder / 'mlflow.db'}", bucket)
