"""Where runs are stored and tracked."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from experiments.config.config import PROJECT_DIR
from experiments.config.grid import Trial
from experiments.errors import UserError
from experiments.runs.store import LocalStore, Store, is_uri


def checkpoint_folder(key: str) -> str:
    """Name of the folder of a trial's checkpoints in the store."""
    return f"checkpoints/{key}"


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where runs are stored, and MLflow's address."""

    store: Store
    tracking_uri: str

    @property
    def runs(self) -> Path:
        """The folder in which this node works."""
        return self.store.folder

    @property
    def artifacts(self) -> Path:
        """The folder of MLflow's files if its database is in the store."""
        return self.runs / "artifacts"

    def folder(self, trial: Trial) -> str:
        """Name of the folder of a trial's checkpoints in the store."""
        return checkpoint_folder(trial.key)

    def checkpoints(self, trial: Trial) -> Path:
        """The folder of a trial's checkpoints on this node."""
        return self.runs / self.folder(trial)

    def log(self, trial: Trial, node: str | None = None) -> Path:
        """The log of a trial; if nodes do not share a folder, there is one log per node."""
        suffix = "" if self.store.shared else f"-{node or socket.gethostname()}"
        return self.runs / "logs" / f"{trial.name}-{trial.key}{suffix}.log"

    def uri(self, path: Path) -> str:
        """Path or address in the store of a file below `runs`, for people."""
        return self.store.uri(path.relative_to(self.runs).as_posix())


def is_bucket(address: str) -> bool:
    """Whether this is the address of a bucket; the only kind is S3's."""
    return address.startswith("s3://")


def default_runs() -> str:
    """`SAN_RUNS`, else `runs/` of the project; a Ray job's copy of that is thrown away, so there it is `~/.san/runs`."""
    if runs := os.environ.get("SAN_RUNS"):
        return runs
    is_copy_of_job = "_ray_pkg_" in PROJECT_DIR.as_posix()
    return str(Path.home() / ".san" / "runs" if is_copy_of_job else PROJECT_DIR / "runs")


def open_store(runs: str | Path | None = None) -> Store:
    """The store in a folder or at an address such as `s3://bucket/prefix`, or at `default_runs`; makes no request.

    Raises:
        UserError: a file instead of a folder; or the address is not valid or contains a password.
    """
    runs = runs or default_runs()
    if not is_uri(runs):
        folder = Path(os.path.expanduser(runs)).resolve()
        if os.path.exists(folder) and not os.path.isdir(folder):  # unlike pathlib, without an error where nothing can be read
            raise UserError(f"{folder}: a file, but runs are stored in a folder; choose another one with --runs")
        return LocalStore(folder)
    if not is_bucket(str(runs)):
        kind = str(runs).partition("://")[0]
        raise UserError(f"{kind}://...: runs cannot be stored here; expected a folder or a bucket such as s3://bucket/prefix")
    from experiments.runs.bucket import S3Store  # imports boto3

    return S3Store.parse(str(runs))


def open_workspace(runs: str | Path | None = None) -> Workspace:
    """`open_store` and its `tracking_uri`; makes no request.

    Raises:
        UserError: as these two.
    """
    store = open_store(runs)
    return Workspace(store, tracking_uri(store))


def tracking_uri(store: Store) -> str:
    """MLflow's address: `MLFLOW_TRACKING_URI`, or a database in the store's folder.

    Raises:
        UserError: the address contains a password, or runs are stored in a bucket without a tracking server.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        require_no_secret(uri)
        return uri
    if not store.shared:
        raise UserError(
            f"--runs {store}: MLflow's database cannot be in a bucket; set MLFLOW_TRACKING_URI to an `mlflow server`, for "
            "example http://server:5000"
        )
    return "sqlite:///" + re.sub("[%?#]", lambda special: quote(special[0]), str(store.folder / "mlflow.db"))


def has_runs(uri: str) -> bool:
    """Whether anything can have been tracked there: a server, or a database that exists."""
    return (database := local_database(uri)) is None or os.path.exists(database)


def local_database(uri: str) -> Path | None:
    """The file of MLflow's database at an address, or None if it is a server."""
    return Path(unquote(uri.removeprefix("sqlite:///"))) if uri.startswith("sqlite:///") else None


def require_no_secret(uri: str) -> None:
    """Raises `UserError` if an address contains a password, because addresses are printed, stored and passed on.

    The message repeats only the scheme of the address, because the password itself may contain an @ or a ?.
    """
    scheme, _, rest = uri.partition("://")
    if scheme in ("sqlite", "file"):
        return
    server = scheme in ("http", "https")
    if not re.search("@" if server else "^[^@]*:[^@]*@|passw(or)?d=", rest):
        return
    way = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    remedy = f"set {way}" if server else "store it where the database expects it, such as in PGPASSWORD or ~/.pgpass"
    raise UserError(
        f"MLFLOW_TRACKING_URI={scheme}://...: this address contains a password, which would be printed and stored; "
        f"remove the password and {remedy}"
    )
