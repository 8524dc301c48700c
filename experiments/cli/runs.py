"""`san runs`, `san delete` and `san ui`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from experiments.cli.options import AS_JSON, RUNS, printable
from experiments.errors import UserError

if TYPE_CHECKING:
    from experiments.tracking.listing import ListedRun


@click.command("runs")
@click.argument("grid", required=False)
@RUNS
@AS_JSON
def list_runs(grid: str | None, runs: str | None, as_json: bool) -> None:
    """List runs with state, epoch, top-1 and age, newest first.

    Runs of the same name are listed with the settings in which they differ.

    GRID is the name or file of a grid. Without it, lists all runs in the store.

    \b
    Example: san runs footprint
    """
    from experiments.runs.workspace import open_workspace
    from experiments.tracking.listing import list_runs as listed_runs

    uri = open_workspace(runs).tracking_uri
    is_file = grid is not None and Path(grid).suffix in (".yaml", ".yml")
    listed = listed_runs(uri, Path(grid).stem if grid and is_file else grid)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(run) for run in listed]))
        return
    if not listed:
        click.echo(f"no runs{f' of grid {grid}' if grid else ''} in {uri}", err=True)
    click.echo("".join(f"{_listed(run)}\n" for run in listed), nl=False)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="KEY|GRID...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@RUNS
def delete(names: tuple[str, ...], yes: bool, runs: str | None) -> None:
    """Delete trials: their runs, checkpoints and logs.

    KEY is a trial's key from the output of `san runs`; the name of a GRID means all its trials. Trials that are being trained
    are not deleted. `san run` trains a deleted trial again.

    \b
    Example: san delete 0123456789ab
    """
    from experiments.runner.progress import trial_count
    from experiments.runs.workspace import open_workspace
    from experiments.tracking.listing import delete_trials, find_trials

    workspace = open_workspace(runs)
    trials = find_trials(workspace.tracking_uri, names)
    click.echo("\n".join(f"{run.key}  {run.grid}-{run.profile} {run.name}" for run in trials), err=True)
    if not yes and not sys.stdin.isatty():
        raise UserError("the runs above would be deleted; add --yes to delete them without a question")
    if not yes and not click.confirm("Delete these runs with their checkpoints and logs?", err=True):
        return
    delete_trials(workspace, trials)
    click.echo(f"deleted {trial_count(len({run.key for run in trials}))}")


def _listed(run: ListedRun) -> str:
    from experiments.runner.progress import duration

    epoch = f"{run.epoch or 0}/{run.epochs or '?'}"
    top1 = "-" if run.top1 is None else f"{run.top1:.1f} %"
    name = printable(f"{run.key}  {run.grid}-{run.profile} {run.name} {run.differs}".rstrip())
    return f"{run.state:11s}  {epoch:>9s}  {top1:>7s}  {duration(max(run.age, 0)):>12s}  {name}"


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), default=5000, show_default=True, help="Port on this machine; 0 for a free one."
)
@RUNS
def ui(port: int, runs: str | None) -> None:
    """Browse runs in MLflow's web interface on this machine.

    Starts `mlflow ui`; press Ctrl-C to stop it. If MLFLOW_TRACKING_URI names a server, prints its address instead.

    \b
    Example: san ui --port 5000
    """
    from experiments.runs.workspace import has_runs, open_workspace
    from experiments.tracking.client import follow_moved_folder

    workspace = open_workspace(runs)
    uri = workspace.tracking_uri
    if not has_runs(uri):
        raise UserError(f"{uri}: no runs yet; train a grid with `san run`, or use --runs to give a folder that contains runs")
    if uri.startswith("http"):
        click.echo(f"{uri}  (the server in MLFLOW_TRACKING_URI)")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"--port {port}: cannot be used ({error.strerror}); give another one, or 0") from None
    follow_moved_folder(uri, workspace.artifacts)
    where = f"http://127.0.0.1:{port}" if port else "MLflow prints the address below"
    click.echo(f"{where}  (starting; press Ctrl-C to stop)")
    mlflow = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port), "--workers", "1"]
    quicker = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # jobs are for language models and need several more processes
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal was closed
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    # In another session, because its processes would print tracebacks on Ctrl-C.
    with subprocess.Popen(mlflow, env=quicker | os.environ, start_new_session=True) as server:
        try:
            sys.exit(server.wait() or 1)  # it has ended by itself
        except KeyboardInterrupt:
            os.killpg(server.pid, signal.SIGTERM)
