"""A grid as a job of a cluster elsewhere: what of the project goes there, and what is started."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from experiments.errors import UserError
from experiments.grids.config import PROJECT_DIR
from experiments.grids.expand import expand
from experiments.grids.paper import table_names
from experiments.runs.address import require_no_secret
from experiments.runs.provenance import COMMIT_VARIABLE, git_commit
from experiments.runs.store import is_uri, open_store

PACKAGES = ("san", "cuda_ext", "pipelines", "experiments", "cluster")
FILES = ("setup.py", "pyproject.toml", "requirements.txt", "README.md")
GRID_FOLDER = "job"
"""Where the grid's file lies in the copy of the project."""


def stage(grid: Path, folder: Path) -> int:
    """Copies what runs a grid, and nothing else of the project, into a folder; returns its size in bytes."""
    for package in PACKAGES:
        shutil.copytree(PROJECT_DIR / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in FILES:  # an installed project has none of them
        if (PROJECT_DIR / name).exists():
            shutil.copy(PROJECT_DIR / name, folder / name)
    (folder / GRID_FOLDER).mkdir()
    shutil.copyfile(grid, folder / GRID_FOLDER / grid.name)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check(grid: Path, profile: str, overrides: Sequence[str], runs: str | None) -> None:
    """Finds the mistakes that can be found here, before anything is sent; the images are on the cluster.

    Raises:
        UserError: all mistakes in the grid, the profile and the overrides; folders that would be the job's own, which is thrown
            away and has no images.
    """
    for config in expand(grid, profile, overrides, table_names()).configs.values():
        data = config.data
        if data.source in ("folder", "shards") and data.root is not None and not PurePosixPath(data.root).is_absolute():
            raise UserError(f"data.root={data.root}: a relative path; give the absolute path of a folder on the cluster")
    if runs is not None and is_uri(runs):
        open_store(runs)
    elif runs is not None and not PurePosixPath(runs).is_absolute():
        raise UserError(
            f"--runs {runs}: a relative path, whose folder Ray deletes after the job; give an absolute path on the cluster"
        )


def command(grid: Path, profile: str, overrides: Sequence[str], runs: str | None, seeds: int | None) -> list[str]:
    """What the head starts, as arguments: `san run` of the copied grid."""
    options = ["--profile", profile]
    options += ["--runs", runs] if runs is not None else []
    options += ["--seeds", str(seeds)] if seeds is not None else []
    return ["python", "-m", "experiments", "run", *options, "--", f"{GRID_FOLDER}/{grid.name}", *overrides]


def environment(names: Iterable[str]) -> dict[str, str]:
    """What the job gets of this environment: the project's commit, the tracking server, and the variables that were asked for
    by name.

    Raises:
        UserError: a name is not set here; a tracker in the job's own folder; a password in its address.
    """
    found = {COMMIT_VARIABLE: git_commit()}
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        require_no_secret(uri)
        if re.match("sqlite:///(?!/)", uri) or ("://" not in uri and not PurePosixPath(uri).is_absolute()):
            raise UserError(
                f"MLFLOW_TRACKING_URI={uri}: a relative path, whose folder Ray deletes after the job; give a server, or an "
                "absolute path on the cluster such as sqlite:////srv/san/runs/mlflow.db"
            )
        found["MLFLOW_TRACKING_URI"] = uri
    for name in names:
        if "=" in name:
            raise UserError(
                f"--env {name.partition('=')[0]}=...: give only the name, because other users can see command lines; "
                "the value is read from the environment"
            )
        if name not in os.environ:
            raise UserError(f"--env {name}: not set in this environment; export the variable first, or leave out this option")
        found[name] = os.environ[name]
    return found


def new_id(grid: Path, profile: str) -> str:
    """A name for a submission that people can read; letters, digits, `.`, `_` and `-` only."""
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", grid.stem).strip("-.")[:60]
    return "-".join([*([stem] if stem else []), profile, secrets.token_hex(4)])
