"""`san submit`, `status`, `logs` and `stop`: grids as jobs of a cluster elsewhere."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from experiments.cli.options import AS_JSON, GRID, OVERRIDES, PROFILE, SEEDS, age, named_address

if TYPE_CHECKING:
    from cluster.submit import Job, JobServer

SERVER = click.option(
    "--address",
    callback=named_address,
    help="Job server, for example http://head:8265.  [default: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS]",
)


@click.command()
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
@SERVER
def submit(
    grid: Path,
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    wait: bool,
    profile: str,
    seeds: int | None,
    runs: str | None,
    address: str | None,
) -> None:
    """Run a grid as a job on a remote Ray cluster.

    Starts `san run` on the cluster's head node. Submit the same grid again to resume. Paths in overrides and --runs are paths
    on the cluster. MLFLOW_TRACKING_URI is passed to the job if it is set here. Pass passwords with --env, unless the nodes
    already have them.

    \b
    Example: san submit experiments/grids/footprint.yaml --address http://head:8265
    """
    from experiments.cli import submit as job

    job.check(grid, profile, overrides, runs)
    environment = job.environment(names)
    server = _server(address)
    name = job.new_id(grid, profile)
    with tempfile.TemporaryDirectory(prefix="san-job-") as folder:
        size = job.stage(grid, Path(folder))
        click.echo(f"uploading the project and the grid ({size / 1e6:.1f} MB) to {server.address}", err=True)
        server.submit(name, job.command(grid, profile, overrides, runs, seeds), Path(folder), environment)
    click.echo(f"job {name}", err=True)
    if not wait:
        click.echo(_hint(server, name), err=True)
        click.echo(name)
        return
    _follow(server, name)


@click.command()
@click.argument("job", required=False)
@SERVER
@AS_JSON
def status(job: str | None, address: str | None, as_json: bool) -> None:
    """List a cluster's jobs: state, age, id and message.

    Newest first. With JOB, prints only that job.

    \b
    Example: san status --address http://head:8265
    """
    server = _server(address)
    jobs = [server.job(job)] if job else server.jobs()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(job) for job in jobs]))
        return
    for told in jobs:
        click.echo(f"{told.state:9s}  {age(time.time() - told.started):>6s}  {told.id}  {told.message}")


@click.command()
@click.argument("job")
@click.option("--follow", is_flag=True, help="Print the log until the job ends, and exit with its code.")
@SERVER
def logs(job: str, follow: bool, address: str | None) -> None:
    """Print a job's log.

    \b
    Example: san logs JOB --follow --address http://head:8265
    """
    server = _server(address)
    if follow:
        _follow(server, job)
    click.echo(server.log(job), nl=False)


@click.command()
@click.argument("job")
@SERVER
def stop(job: str, address: str | None) -> None:
    """Stop a job and its cells, keeping their checkpoints.

    Waits until the job has ended. Submit the grid again to resume it.

    \b
    Example: san stop JOB --address http://head:8265
    """
    server = _server(address)
    before, after = server.job(job), server.stop(job)
    click.echo(f"{job}: already {before.state}" if before.over else f"{job}: {after.state}")


def _server(address: str | None) -> JobServer:
    from cluster.submit import JobServer

    return JobServer(address)


def _hint(server: JobServer, job: str) -> str:
    where = f"{job} --address {shlex.quote(server.address)}"
    return f"  follow: san logs --follow {where}\n  stop:   san stop {where}"


def _follow(server: JobServer, job: str) -> NoReturn:
    """Prints a job's log to its end and exits as the job did: 0, 1 or 2 as its command, 1 where it was stopped or broke."""
    from cluster import ClusterError
    from cluster.submit import UnreachableError

    server.job(job)
    click.echo(_hint(server, job), err=True)
    try:
        ended = server.follow(job, lambda piece: click.echo(piece, nl=False))
    except KeyboardInterrupt:
        click.echo(f"interrupted; the job is still running\n{_hint(server, job)}", err=True)
        sys.exit(1)
    except ClusterError as error:  # nobody's mistake in what was asked
        may = "\nthe job may still be running" if isinstance(error, UnreachableError) else ""
        click.echo(f"san: {error}{may}; run the same command again to resume the grid", err=True)
        sys.exit(1)
    sys.exit(_exit_code(ended))


def _exit_code(job: Job) -> int:
    if job.state == "succeeded":
        return 0
    click.echo(f"job {job.id} {job.state}: {job.message}", err=True)
    if job.exit_code == 127:
        click.echo("the head node has no `python` on PATH; start Ray there with the environment's bin/ on PATH", err=True)
    return 2 if job.exit_code == 2 else 1
