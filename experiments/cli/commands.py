"""The command `san`. Exit codes: 0 success, 1 failed, unfinished or interrupted, 2 invalid input.

Commands import heavy packages when they run, so that help appears at once.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from experiments.cli import checkpoints
from experiments.cli.data import data
from experiments.cli.options import (
    ADDRESS,
    AS_JSON,
    GRID,
    ONLY,
    OVERRIDES,
    PROFILE,
    RUNS,
    SEEDS,
    TAKE_OVER,
    GroupedCommands,
    age,
    as_value,
    named_address,
    printable,
)
from experiments.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from experiments.runner.estimate import Hours
    from experiments.runner.plan import PlannedTrial
    from experiments.tracking.listing import Listed


class _Commands(GroupedCommands):
    headings: ClassVar = {
        "Train": ("plan", "run", "report", "study"),
        "Checkpoints": ("evaluate", "robustness", "attention", "convert"),
        "Models": ("models", "complexity", "doctor"),
        "Data": ("data",),
        "Cluster": ("submit",),
        "Runs": ("runs", "delete", "ui"),
    }


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: san run experiments/grids/footprint.yaml",
)
@click.version_option(package_name="san-attention", prog_name="san")
def cli() -> None:
    """Train and compare self-attention networks (SAN, CVPR 2020)."""


cli.add_command(data)
for command in (checkpoints.convert, checkpoints.evaluate, checkpoints.robustness, checkpoints.attention):
    cli.add_command(command)


@cli.command()
@click.argument("pattern", default="*")
@AS_JSON
def models(pattern: str, as_json: bool) -> None:
    """List the named models and their fields.

    PATTERN selects models by name. Every field can be overridden in grids and commands.

    \b
    Example: san models 'san*_pairwise'
    """
    from san.models import list_models, model_spec

    records = [dataclasses.asdict(model_spec(name)) for name in list_models(pattern)]
    if not records:
        raise UserError(f"no model matches {pattern!r}; run `san models` to list all models")
    if as_json:
        click.echo(json.dumps(records))
        return
    for record in records:
        name = record.pop("name")
        click.echo(" ".join([f"{name:16s}", *(f"{key}={as_value(value)}" for key, value in record.items())]))


@cli.command()
def doctor() -> None:
    """Show which kernels run, and why others do not.

    Also shows the versions of Python, the packages, the compilers and CUDA. The exit code is 1 if the CPU kernels do not run.

    \b
    Example: san doctor
    """
    import torch

    from experiments.runs.provenance import machine, versions
    from san.ops import library

    click.echo(f"{versions()}\n{machine()}\nCUDA of torch: {torch.version.cuda or 'none'}")
    for line in library.describe():
        click.echo(line)
    sys.exit(library.missing("cpu") is not None)


@cli.command()
@click.argument("name", required=False)
@OVERRIDES
@click.option(
    "--grid", type=click.Path(path_type=Path), help="Count every row of this grid at full size, next to the paper's counts."
)
@click.option("--size", type=click.IntRange(1, 100_000), default=224, show_default=True, help="Image side in pixels.")
@click.option("--stages", is_flag=True, help="Also print one line per stage (always on for a single model).")
@AS_JSON
def complexity(name: str | None, overrides: tuple[str, ...], grid: Path | None, size: int, stages: bool, as_json: bool) -> None:
    """Count a model's parameters and FLOPs.

    NAME is one of the models that `san models` lists; overrides such as footprint=9 change its fields. Without NAME, counts
    all models, or the rows of --grid.

    \b
    Example: san complexity san10_pairwise footprint=9
    """
    if name is not None and grid is not None:
        raise UserError(f"both a model and a grid: {name!r} and `--grid {grid}`; give only one of these")
    from experiments.report import counts

    if name is not None:
        lines = counts.of_variant(name, overrides, size)
    else:
        lines = counts.of_variants(size) if grid is None else counts.of_grid(grid, size)
    click.echo(json.dumps(counts.as_objects(lines)) if as_json else counts.as_text(lines, stages or name is not None))


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@SEEDS
@ONLY
@RUNS
@ADDRESS
@TAKE_OVER
def run(
    grid: Path,
    overrides: tuple[str, ...],
    profile: str,
    runs: Path | str | None,
    seeds: int | None,
    only: tuple[str, ...],
    address: str | None,
    take_over: bool,
) -> None:
    """Train a grid's unfinished trials and print the results.

    Rerun the same command to resume after an interruption. Overrides change every trial, for example recipe.epochs=5.

    \b
    Example: san run experiments/grids/footprint.yaml --profile digits
    """
    from experiments.cli.run import run as run_job
    from experiments.runner.job import open_job

    sys.exit(0 if run_job(open_job(grid, profile, overrides, runs, seeds, only=only, take_over=take_over), address) else 1)


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@SEEDS
@ONLY
@RUNS
@ADDRESS
@AS_JSON
def plan(
    grid: Path,
    overrides: tuple[str, ...],
    profile: str,
    runs: Path | str | None,
    seeds: int | None,
    only: tuple[str, ...],
    address: str | None,
    as_json: bool,
) -> None:
    """List a grid's trials, their status and the estimated time.

    Trains nothing and writes nothing.

    \b
    Example: san plan experiments/grids/footprint.yaml --profile digits
    """
    from experiments.runner.job import open_job
    from experiments.runner.plan import plan as plan_job
    from experiments.runner.plan import plan_in_words

    job = open_job(grid, profile, overrides, runs, seeds, writes=False, only=only)
    cells = plan_job(job)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(cell) for cell in cells]))
        return
    width = max(len(cell.row) for cell in cells)
    lines = [f"{cell.row:{width}s}  seed {cell.seed}  {cell.key}  {_state(cell)}{_hours(cell.hours)}" for cell in cells]
    click.echo("\n".join([*lines, "", *plan_in_words(job, cells, address)]))


def _state(cell: PlannedTrial) -> str:
    if cell.stopped_at is not None:
        return f"stopped at epoch {cell.stopped_at}"
    return "finished" if cell.finished else "to train"


def _hours(hours: Hours | None) -> str:
    from experiments.runner.progress import duration

    return "" if hours is None else f"  {'about ' if hours.is_rough else ''}{duration(3600 * hours.wall)}"


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@SEEDS
@RUNS
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "latex", "csv"]),
    default="text",
    show_default=True,
    help="Table format. Formats other than text print only the table.",
)
@click.option("--html", type=click.Path(path_type=Path), help="Write the table, plots and curves to this HTML file.")
@AS_JSON
def report(
    grid: Path,
    overrides: tuple[str, ...],
    profile: str,
    runs: Path | str | None,
    seeds: int | None,
    form: str,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the results of a grid's finished trials.

    Trains nothing. Text output also draws the grid's plot. With text output, the exit code is 1 while trials are
    unfinished.

    \b
    Example: san report experiments/grids/footprint.yaml --html footprint.html
    """
    from experiments.cli.report import print_report, print_unfinished, write_page
    from experiments.report.build import records_of, tables
    from experiments.runner.job import finished_results, known_results, open_job, say

    if as_json and form != "text":
        raise UserError(f"two output formats: `--json` and `--format {form}`; give only one of these options")
    job = open_job(grid, profile, overrides, runs, seeds)
    if html is not None:
        write_page(job, finished_results(job), html)
        say(f"report: {html}")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(record) for record in records_of(job, known_results(job))]))
    elif form != "text":
        results = finished_results(job)
        click.echo(tables(job, results)[form].rstrip("\n"))
        print_unfinished(job, results)
    else:
        _, complete = print_report(job, finished_results(job))
        sys.exit(0 if complete else 1)


@cli.command()
@click.option("--profile", default="cifar10", show_default=True, help="Dataset and model size, as in `san run`.")
@click.option("--seeds", type=click.IntRange(2, 1000), default=5, show_default=True, metavar="N", help="Train seeds 0 to N-1.")
@RUNS
@ADDRESS
@click.option(
    "--page",
    type=click.Path(path_type=Path),
    help="Markdown page to write, with its plots in the same folder.  [default: docs/results/PROFILE/study.md]",
)
@click.option(
    "--results",
    "kept",
    type=click.Path(path_type=Path),
    help="CSV file of finished trials, which are not trained again.  [default: docs/results/PROFILE/trials.csv]",
)
@click.option("--train/--no-train", default=True, help="Train missing trials, or only collect results and write the page.")
@TAKE_OVER
def study(
    profile: str,
    seeds: int,
    runs: Path | str | None,
    address: str | None,
    page: Path | None,
    kept: Path | None,
    train: bool,
    take_over: bool,
) -> None:
    """Train the paper's ablations and test the paper's claims.

    Trains every row with several seeds. Writes a page that shows which of the paper's orderings hold beyond seed noise.
    Rerun the same command to resume, on another machine as well if it has the CSV file.

    \b
    Example: san study --profile cifar10 --seeds 5
    """
    from experiments.cli.run import study as run_study
    from experiments.grids.config import base_folder

    folder = base_folder() / "docs" / "results" / Path(profile).stem
    page, kept = page or folder / "study.md", kept or folder / "trials.csv"
    sys.exit(0 if run_study(profile, seeds, runs, address, page, kept, train, take_over) else 1)


@cli.command()
@GRID
@OVERRIDES
@click.option(
    "--env",
    "names",
    multiple=True,
    metavar="NAME",
    help="Pass the value of this environment variable to the job; can be given several times.",
)
@click.option(
    "--wait/--no-wait", default=True, help="Follow the log and exit with the job's code, or print the job's id and exit."
)
@PROFILE
@SEEDS
@click.option(
    "--runs",
    help="Store for runs: a folder on the cluster or s3://...  [default: the cluster's SAN_RUNS, else ~/.san/runs]",
)
@click.option(
    "--address",
    callback=named_address,
    help="Job server, for example http://head:8265.  [default: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS]",
)
@TAKE_OVER
def submit(
    grid: Path,
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    wait: bool,
    profile: str,
    seeds: int | None,
    runs: str | None,
    address: str | None,
    take_over: bool,
) -> None:
    """Run a grid as a job on a remote Ray cluster.

    Starts `san run` on the cluster's head node. Submit the same grid again to resume. Paths in overrides and --runs are paths
    on the cluster. MLFLOW_TRACKING_URI is passed to the job if it is set here. Pass passwords with --env, unless the nodes
    already have them. Use `ray job list`, `ray job logs` and `ray job stop` to manage jobs.

    \b
    Example: san submit experiments/grids/footprint.yaml --address http://head:8265
    """
    from experiments.cli.submit import run_command, submit_grid

    command = run_command(grid, profile, overrides, runs, seeds, take_over)
    submit_grid(grid, overrides, names=names, wait=wait, profile=profile, runs=runs, address=address, command=command)


@cli.command("runs")
@click.argument("grid", required=False)
@click.option("--follow", is_flag=True, help="Refresh every 5 seconds until no run is active.")
@RUNS
@AS_JSON
def list_runs(grid: str | None, follow: bool, runs: Path | str | None, as_json: bool) -> None:
    """List runs with state, epoch, top-1 and age, newest first.

    GRID is the name or file of a grid. Without it, lists all runs in the store.

    \b
    Example: san runs footprint --follow
    """
    from experiments.runs.workspace import has_store, open_workspace
    from experiments.tracking.listing import list_runs as listed_runs

    if as_json and follow:
        raise UserError("`--json` prints once and cannot be combined with `--follow`; leave out one of these options")
    uri = open_workspace(runs).tracking_uri
    while True:
        listed = listed_runs(uri, grid and Path(grid).stem) if has_store(uri) else []
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(run) for run in listed]))
            return
        if not listed and not follow:
            click.echo(f"no runs{f' of grid {grid}' if grid else ''} in {uri}", err=True)
        lines = [_listed(run) for run in listed]
        in_place = follow and sys.stdout.isatty()
        if in_place:  # the oldest runs do not fit on a full screen
            columns, rows = shutil.get_terminal_size()
            lines = [line[:columns] for line in lines[: rows - 1]]
            click.clear()
        click.echo("".join(f"{line}\n" for line in lines), nl=False)
        if not follow or all(run.state != "running" for run in listed):
            return
        try:
            time.sleep(5)
        except KeyboardInterrupt:  # Ctrl-C ends the command
            return
        if not in_place:
            click.echo()


@cli.command()
@click.argument("names", nargs=-1, required=True, metavar="KEY|GRID...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@RUNS
def delete(names: tuple[str, ...], yes: bool, runs: Path | str | None) -> None:
    """Delete trials: their runs, checkpoints and logs.

    KEY is a trial's key from the output of `san runs`; the name of a GRID means all its trials. Trials that are being trained
    are not deleted. `san run` trains a deleted trial again.

    \b
    Example: san delete 0123456789ab
    """
    from experiments.runs.workspace import open_workspace
    from experiments.tracking.deletion import delete_trials, find_trials

    workspace = open_workspace(runs)
    found = find_trials(workspace.tracking_uri, names)
    click.echo("\n".join(f"{cell.key}  {cell.grid}-{cell.profile} {cell.name}" for cell in found), err=True)
    if not yes and not sys.stdin.isatty():
        raise UserError(f"{len(found)} runs would be deleted; add --yes to delete them without a question")
    if not yes and not click.confirm(f"Delete these {len(found)} runs with their checkpoints and logs?", err=True):
        return
    delete_trials(workspace, found)
    click.echo(f"deleted {len({cell.key for cell in found})} trials")


def _listed(run: Listed) -> str:
    epoch = f"{run.epoch or 0}/{run.epochs or '?'}"
    top1 = "-" if run.top1 is None else f"{run.top1:.1f} %"
    name = printable(f"{run.key}  {run.grid}-{run.profile} {run.name}")
    return f"{run.state:11s}  {epoch:>9s}  {top1:>7s}  {age(run.age):>6s}  {name}"


@cli.command()
@click.option("--port", type=click.IntRange(1, 65535), help="Port on this machine.  [default: first free port from 5000]")
@RUNS
def ui(port: int | None, runs: Path | str | None) -> None:
    """Browse runs in MLflow's web interface on this machine.

    Prints the address of each grid's page. Press Ctrl-C to stop the server.

    \b
    Example: san ui --port 5000
    """
    from experiments.runs.workspace import has_store, open_workspace
    from experiments.tracking.listing import experiment_pages

    uri = open_workspace(runs).tracking_uri
    if not has_store(uri):
        raise UserError(f"{uri}: no runs yet; train a grid with `san run`, or use --runs to give a folder that contains runs")
    is_server = uri.startswith("http")
    if is_server and port is not None:
        raise UserError(f"--port {port}: MLFLOW_TRACKING_URI already names a server, {uri}; leave out --port")
    port = None if is_server else _free_port(port)
    address = uri if is_server else f"http://127.0.0.1:{port}"
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    login = f"; log in as {user}" if user else ""
    how = f"(the server in MLFLOW_TRACKING_URI{login})" if is_server else "(starting; press Ctrl-C to stop)"
    found = experiment_pages(uri, address.rstrip("/"))
    width = max(map(len, found), default=0)
    click.echo("\n".join([f"{address}  {how}", *(f"{name:{width}s}  {page}" for name, page in found.items())]))
    if is_server:
        return
    options = ["--host", "127.0.0.1", "--port", str(port), "--allowed-hosts", f"127.0.0.1:{port},localhost:{port}"]
    mlflow = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *options, "--workers", "1"]
    with subprocess.Popen(mlflow, start_new_session=True) as server:  # otherwise its processes would print tracebacks on Ctrl-C
        try:
            sys.exit(server.wait())
        except KeyboardInterrupt:  # Ctrl-C ends the command
            os.killpg(server.pid, signal.SIGTERM)


def _free_port(wanted: int | None) -> int:
    """The given port, or the first free port from 5000 on.

    Raises:
        UserError: the port is in use.
    """
    for port in range(5000, 5100) if wanted is None else (wanted,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise UserError(f"port {wanted or '5000 to 5099'} is in use; choose another with --port")


def main() -> None:
    """Runs the command. User errors are printed without a traceback, and SIGTERM, which schedulers send, acts like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Imports create half a million permanent objects. Garbage collection among them took a third of the time of `san plan`.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    try:
        cli(prog_name="san", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; finished work is kept. Run the same command again to resume", err=True)
        sys.exit(1)
    except Exception as error:
        if not isinstance(error, _printed_errors()):
            raise
        lines = [printable(line) for line in f"san: {error}".splitlines()]
        click.echo("\n".join(lines), err=True)
        sys.exit(2)


def _printed_errors() -> tuple[type[Exception], ...]:
    """Imported late, because most commands need neither Ray nor DALI."""
    from cluster import ClusterError
    from pipelines import DataError

    return UserError, UnavailableError, DataError, ClusterError
