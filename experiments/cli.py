"""The command `san`. Exit codes: 0 all is well, 1 something failed or was interrupted, 2 a mistake in what was asked.

Commands import what they need when they run, so that help comes at once.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import click

from experiments.errors import UserError

GRID = click.argument("grid", type=click.Path(path_type=Path))
PROFILE = click.option(
    "--profile", default="digits", show_default=True, help="digits (laptop) or imagenet (the paper's setting)"
)
RUNS = click.option("--runs", type=click.Path(path_type=Path), help="where runs are kept  [default: SAN_RUNS, else runs/]")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Self-attention networks for image recognition: train a grid of questions, and answer it beside the paper."""


@cli.command()
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="a list of objects")
def models(pattern: str, as_json: bool) -> None:
    """List the named variants, such as those that match 'san*_pairwise'."""
    from san.models import list_models, model_spec

    names = list_models(pattern)
    if as_json:
        click.echo(json.dumps([{"name": name, "depths": model_spec(name).depths} for name in names]))
        return
    for name in names:
        click.echo(f"{name:18s} blocks per stage {model_spec(name).depths}")


@cli.group()
def data() -> None:
    """Data sets."""


@data.command()
@click.argument("name", type=click.Choice(["digits"]))
@click.argument("folder", type=click.Path(path_type=Path), required=False)
def prepare(name: str, folder: Path | None) -> None:
    """Write an embedded data set as JPEGs in ImageNet's folder layout, by default where the profile looks for it."""
    from experiments.config import PROJECT_DIR
    from pipelines import prepare_digits

    folder = folder or PROJECT_DIR / "data" / name
    try:
        click.echo(prepare_digits(folder))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@RUNS
@click.option("--address", help="a Ray cluster, such as auto or host:6379  [default: RAY_ADDRESS, else this machine]")
def run(grid: Path, overrides: tuple[str, ...], profile: str, runs: Path | None, address: str | None) -> None:
    """Train what is missing of a grid and print its table; interrupted, the same command continues."""
    from experiments.run import open_job
    from experiments.run import run as run_job

    try:
        complete = run_job(open_job(grid, profile, overrides, runs), address)
    except KeyboardInterrupt:
        click.echo("interrupted: finished cells are kept, the same command continues", err=True)
        sys.exit(1)
    sys.exit(0 if complete else 1)


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@RUNS
@click.option("--json", "as_json", is_flag=True, help="a list of objects")
def plan(grid: Path, overrides: tuple[str, ...], profile: str, runs: Path | None, as_json: bool) -> None:
    """Show the cells of a grid and which are finished; runs nothing."""
    from experiments.run import open_job
    from experiments.run import plan as plan_job

    cells = plan_job(open_job(grid, profile, overrides, runs))
    if as_json:
        click.echo(json.dumps(cells))
        return
    for cell in cells:
        click.echo(f"{cell['row']:24s} seed {cell['seed']}  {cell['key']}  {'finished' if cell['finished'] else 'to train'}")


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@RUNS
@click.option("--json", "as_json", is_flag=True, help="a list of objects, one per row")
def report(grid: Path, overrides: tuple[str, ...], profile: str, runs: Path | None, as_json: bool) -> None:
    """Print the table of what is finished, and draw its plot; trains nothing."""
    from experiments.run import open_job, show, table_of

    job = open_job(grid, profile, overrides, runs)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(line) for line in table_of(job)]))
        return
    _, complete = show(job)
    sys.exit(0 if complete else 1)


@cli.command()
@RUNS
@click.option("--port", default=5000, show_default=True)
def ui(runs: Path | None, port: int) -> None:
    """Browse the runs: MLflow on the project's store, on this machine only."""
    from experiments.run import default_runs_dir, has_store, tracking_uri

    uri = tracking_uri((runs or default_runs_dir()).resolve())
    if uri.startswith("http"):
        click.echo(f"{uri}  (the server of MLFLOW_TRACKING_URI)")
        return
    if not has_store(uri):
        raise UserError(f"{uri}: no runs yet; train a grid with `san run` first, or name the folder with --runs")
    mlflow = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    click.echo(f"http://127.0.0.1:{port}  (Ctrl-C ends it)")
    subprocess.run([*mlflow, "--host", "127.0.0.1", "--port", str(port)], check=False)


def main() -> None:
    """Runs the command; a mistake of the user is shown as its text alone."""
    try:
        cli(prog_name="san", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        sys.exit(1)
    except ValueError as error:
        if not isinstance(error, _user_errors()):
            raise
        click.echo(f"san: {error}", err=True)
        sys.exit(2)


def _user_errors() -> tuple[type[ValueError], ...]:
    """Imported late: `san --help` should not wait for Ray and torch."""
    from cluster import ClusterError
    from pipelines import DataError

    return UserError, DataError, ClusterError
