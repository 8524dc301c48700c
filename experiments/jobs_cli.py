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

from experiments.options import AS_JSON, GRID, OVERRIDES, PROFILE, SEEDS, age, named_address

if TYPE_CHECKING:
    from cluster.submit import Job, JobServer

SERVER = click.option(
    "--address",
    callback=named_address,
    help="the job server, such as http://head:8265  [default: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS]",
)


@click.command()
@GRID
@OVERRIDES
@PROFILE
@click.option(
    "--runs", help="where runs are kept, a folder of the cluster's or s3://...  [default: SAN_RUNS there, else ~/.san/runs]"
)
@SEEDS
@SERVER
@click.option("--env", "names", multiple=True, metavar="NAME", help="give the job this variable's value; may be repeated")
@click.option("--wait/--no-wait", default=True, help="follow the log and end as the job does; or print its id and leave")
def submit(
    grid: Path,
    overrides: tuple[str, ...],
    profile: str,
    runs: str | None,
    seeds: int | None,
    address: str | None,
    names: tuple[str, ...],
    wait: bool,
) -> None:
    """Run a grid as a job of a cluster elsewhere: `san run`, on its head. Submitted again, it continues.

    Paths in overrides, and --runs, are the cluster's. MLFLOW_TRACKING_URI goes along where it is set; passwords go with --env,
    or are in the environment of the nodes already.
    """
    from experiments import submit as job

    job.check(grid, profile, overrides, runs)
    environment = job.environment(names)
    server = _server(address)
    name = job.new_id(grid, profile)
    with tempfile.TemporaryDirectory(prefix="san-job-") as folder:
        size = job.stage(grid, Path(folder))
        click.echo(f"{size / 1e6:.1f} MB, the project and the grid, to {server.address}", err=True)
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
    """List the jobs of a cluster, or tell of one: state, age, id, message; the newest first."""
    server = _server(address)
    jobs = [server.job(job)] if job else server.jobs()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(job) for job in jobs]))
        return
    for told in jobs:
        click.echo(f"{told.state:9s}  {age(time.time() - told.started):>6s}  {told.id}  {told.message}")


@click.command()
@click.argument("job")
@SERVER
@click.option("--follow", is_flag=True, help="until the job is over, and end as it does")
def logs(job: str, address: str | None, follow: bool) -> None:
    """Print what a job has said."""
    server = _server(address)
    if follow:
        _follow(server, job)
    click.echo(server.log(job), nl=False)


@click.command()
@click.argument("job")
@SERVER
def stop(job: str, address: str | None) -> None:
    """End a job and its cells, and wait for that; what they have saved is kept, and submitted again the grid continues."""
    server = _server(address)
    before, after = server.job(job), server.stop(job)
    click.echo(f"{job}: had ended before, {before.state}" if before.over else f"{job}: {after.state}")


def _server(address: str | None) -> JobServer:
    from cluster.submit import JobServer

    return JobServer(address)


def _hint(server: JobServer, job: str) -> str:
    where = f"{job} --address {shlex.quote(server.address)}"
    return f"  follow: san logs --follow {where}\n  stop:   san stop {where}"


def _follow(server: JobServer, job: str) -> NoReturn:
    """Prints a job's log to its end and exits as the job did: 0, 1 or 2 as its command, 1 where it was stopped or broke."""
    from cluster import ClusterError

    server.job(job)
    click.echo(_hint(server, job), err=True)
    try:
        ended = server.follow(job, lambda piece: click.echo(piece, nl=False))
    except KeyboardInterrupt:
        click.echo(f"no longer followed; the job goes on\n{_hint(server, job)}", err=True)
        sys.exit(1)
    except ClusterError as error:  # nobody's mistake in what was asked
        may = "" if "knows no job" in str(error) else "\nthe job may go on"
        click.echo(f"san: {error}{may}; the same command continues the grid", err=True)
        sys.exit(1)
    sys.exit(_exit_code(ended))


def _exit_code(job: Job) -> int:
    if job.state == "succeeded":
        return 0
    click.echo(f"job {job.id} {job.state}: {job.message}", err=True)
    if job.exit_code == 127:
        click.echo("the head finds no `python`: start Ray there with the environment's bin/ on PATH", err=True)
    return 2 if job.exit_code == 2 else 1
