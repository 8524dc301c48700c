"""`san submit`: runs a grid as a job on a remote Ray cluster."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

import click
import yaml

from experiments.config.config import PROJECT_DIR
from experiments.config.expand import expand, profile_path, read_grid, read_profile
from experiments.config.grid import GridRequest, is_checkpoint_name
from experiments.errors import UserError
from experiments.paper.tables import table_names
from experiments.runs.provenance import COMMIT_VARIABLE, git_commit
from experiments.runs.store import is_uri
from experiments.runs.workspace import open_store, require_no_secret

if TYPE_CHECKING:
    from cluster.submit import JobServer

PACKAGES = ("san", "cuda_ext", "pipelines", "experiments", "cluster")
GRID_FOLDER = "job"
"""Folder of the grid in the copy of the project."""


def submit_grid(request: GridRequest, names: Sequence[str], wait: bool, address: str | None) -> None:
    """Uploads the project and a grid, and starts `san run` as a job. With `wait`, follows its log and exits with its code."""
    from cluster.submit import JobServer

    check(request)
    variables = environment(names)
    server = JobServer(address)
    job = new_id(request.grid, profile_path(request.profile).stem)
    with tempfile.TemporaryDirectory(prefix="san-job-") as folder:
        size = stage(request, Path(folder))
        click.echo(f"uploading the project and the grid ({size / 1e6:.1f} MB) to {server.address}", err=True)
        server.submit(job, run_command(request), Path(folder), variables)
    click.echo(f"job {job}\n{_hint(server, job)}", err=True)
    if wait:
        _follow(server, job)
    click.echo(job)


def _hint(server: JobServer, job: str) -> str:
    rest = f"{job} --address {shlex.quote(server.address)}"
    return f"  follow: ray job logs --follow {rest}\n  stop:   ray job stop {rest}"


def _follow(server: JobServer, job: str) -> NoReturn:
    """Prints a job's log until the job ends, and exits with its exit code: 0, 2, 75, or 1 for any other failure."""
    from cluster import ClusterError

    try:
        finished = server.follow(job, lambda piece: click.echo(piece, nl=False))
    except KeyboardInterrupt:
        click.echo(f"interrupted; the job is still running\n{_hint(server, job)}", err=True)
        sys.exit(1)
    except ClusterError as error:
        click.echo(f"san: {error}\nthe job may still be running; run the same command again to resume the grid", err=True)
        sys.exit(1)
    if finished.state == "succeeded":
        sys.exit(0)
    click.echo(f"job {job} {finished.state}: {finished.message}", err=True)
    if finished.exit_code == 127:
        click.echo("the head node has no `python` on PATH; start Ray there with the environment's bin/ on PATH", err=True)
    sys.exit(finished.exit_code if finished.exit_code in (2, os.EX_TEMPFAIL) else 1)


def stage(request: GridRequest, folder: Path) -> int:
    """Copies the packages, the grid, its imports and the profile into a folder; returns its size in bytes."""
    for package in PACKAGES:
        shutil.copytree(PROJECT_DIR / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    # With the keys of the files that they extend, which are not copied.
    content, profile = read_grid(request.grid), request.profile
    files = [*content.get("imports", ()), *request.imports]
    if files:
        content["imports"] = [f"imports/{number}/{Path(file).name}" for number, file in enumerate(files)]
    for file, copied in zip(files, content.get("imports", ()), strict=True):
        target = folder / GRID_FOLDER / copied
        target.parent.mkdir(parents=True)
        shutil.copy(os.path.expanduser(file), target)
    contents = {folder / GRID_FOLDER / request.grid.name: content}
    if profile.endswith(".yaml"):
        contents[folder / _copied_profile(profile)] = read_profile(profile_path(profile), resolve_paths=False)
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_on_the_cluster(path: str | Path) -> bool:
    """Whether the path does not depend on the folder of a job; `~` is the home folder there."""
    return str(path).startswith("~") or PurePosixPath(path).is_absolute()


def check(request: GridRequest) -> None:
    """Finds errors before anything is uploaded.

    Raises:
        UserError: lists all errors in the grid, the profile and the overrides; or a path is relative, so that it would be in
            the job's temporary folder.
    """
    for config in expand(request, table_names(), resolve_paths=False).configs.values():
        root = config.data.root if config.data.source in ("folder", "shards") else None
        for key, path in {"recipe.init": config.recipe.init, "data.root": root, "data.lists": config.data.lists}.items():
            is_name = key == "recipe.init" and path is not None and is_checkpoint_name(path)
            if path is not None and not is_name and not _is_on_the_cluster(path):
                raise UserError(f"{key}={path}: a relative path; give an absolute path on the cluster")
    runs = request.runs and str(request.runs)
    if runs is not None and is_uri(runs):
        open_store(runs)
    elif runs is not None and not _is_on_the_cluster(runs):
        raise UserError(
            f"--runs {runs}: a relative path, whose folder Ray deletes after the job; give an absolute path on the cluster"
        )


def run_command(request: GridRequest) -> list[str]:
    """The arguments of the command that runs on the head: `san run` with the copied grid."""
    options = ["--profile", _copied_profile(request.profile)]
    options += ["--runs", str(request.runs)] if request.runs is not None else []
    options += ["--seeds", str(request.seeds)] if request.seeds is not None else []
    options += ["--take-over"] if request.take_over else []
    return ["python", "-m", "experiments", "run", *options, "--", f"{GRID_FOLDER}/{request.grid.name}", *request.overrides]


def _copied_profile(profile: str) -> str:
    """The option `--profile` of the job."""
    return f"{GRID_FOLDER}/profiles/{Path(profile).name}" if profile.endswith(".yaml") else profile


def environment(names: Iterable[str]) -> dict[str, str]:
    """The environment of the job: the project's commit, the address of the tracking server, and the variables in `names`.

    Raises:
        UserError: a variable is not set; or the address is a relative path or contains a password.
    """
    variables = {COMMIT_VARIABLE: git_commit()}
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        require_no_secret(uri)
        if re.match("sqlite:///(?!/)", uri) or ("://" not in uri and not PurePosixPath(uri).is_absolute()):
            raise UserError(
                f"MLFLOW_TRACKING_URI={uri}: a relative path, whose folder Ray deletes after the job; give a server, or an "
                "absolute path on the cluster such as sqlite:////srv/san/runs/mlflow.db"
            )
        variables["MLFLOW_TRACKING_URI"] = uri
    for name in names:
        if "=" in name:
            raise UserError(
                f"--env {name.partition('=')[0]}=...: give only the name, because other users can see command lines; "
                "the value is read from the environment"
            )
        if name not in os.environ:
            raise UserError(f"--env {name}: not set in this environment; export the variable first, or leave out this option")
        variables[name] = os.environ[name]
    return variables


def new_id(grid: Path, profile: str) -> str:
    """A readable id for a job; letters, digits, `.`, `_` and `-` only."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{grid.stem[:60]}-{profile}").strip("-.")
    return f"{name}-{secrets.token_hex(4)}"
