"""The command `san`. Exit codes: 0 success, 1 failed, unfinished or interrupted, 2 invalid input, 75 Ray has died.

Commands import heavy packages when they run, so that help appears at once.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from experiments.cli import checkpoints, models, runs
from experiments.cli.data import data
from experiments.cli.options import (
    ADDRESS,
    AS_JSON,
    ONLY,
    RUNS,
    SERIAL,
    TAKE_OVER,
    FilePath,
    grid_options,
    not_empty,
    printable,
)
from experiments.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from experiments.config.grid import GridRequest
    from experiments.runner.plan import PlannedTrial, TimeEstimate


class _Commands(click.Group):
    """Lists its commands under headings, and after an unknown command that is like none of them."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            if error.possibilities:
                raise
            raise click.UsageError(f"{error.message} Choose from: {', '.join(self.commands)}.", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for heading, commands in HEADINGS.items():
            with formatter.section(heading):
                helps = [(each.name, each.get_short_help_str(formatter.width - 6 - width)) for each in commands]
                formatter.write_dl([(f"{name:{width}s}", text) for name, text in helps])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: san run experiments/grids/footprint.yaml",
)
@click.version_option(package_name="san-attention", prog_name="san")
def cli() -> None:
    """Train and compare self-attention networks (SAN, CVPR 2020)."""


@click.command()
@grid_options(RUNS, ONLY, TAKE_OVER, SERIAL)
@ADDRESS
def run(request: GridRequest, address: str | None) -> None:
    """Train a grid's unfinished trials and print the results.

    Rerun the same command to resume after an interruption. Overrides change every trial, for example recipe.epochs=5.

    \b
    Example: san run experiments/grids/footprint.yaml --profile digits
    """
    from experiments.cli.run import run as run_grid

    with _resumable("run"):
        sys.exit(0 if run_grid(request, address) else 1)


@click.command()
@grid_options(RUNS, ONLY)
@ADDRESS
@AS_JSON
def plan(request: GridRequest, address: str | None, as_json: bool) -> None:
    """List a grid's trials, their status and the estimated time.

    Trains nothing and writes nothing.

    \b
    Example: san plan experiments/grids/footprint.yaml --profile digits
    """
    from experiments.runner.grid_run import open_grid_run
    from experiments.runner.plan import plan as plan_trials
    from experiments.runner.plan import plan_in_words

    grid_run = open_grid_run(request, writes=False)
    planned = plan_trials(grid_run)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(trial) for trial in planned]))
        return
    width = max(len(trial.row) for trial in planned)
    for trial in planned:
        size = f"{trial.params / 1e6:8.3f} M params {trial.flops / 1e6:9.1f} M FLOPs"
        click.echo(f"{trial.row:{width}s}  seed {trial.seed}  {trial.key}{size}  {_state(trial)}{_hours(trial.hours)}")
    lines, can_run = plan_in_words(grid_run, planned, address)
    click.echo("\n".join(["", *lines]))
    sys.exit(0 if can_run else 1)


def _state(trial: PlannedTrial) -> str:
    if trial.stopped_at is not None:
        return f"stopped at epoch {trial.stopped_at}"
    if trial.equal_to is not None:
        return f"equal to {trial.equal_to}"
    return "finished" if trial.finished else "to train"


def _hours(hours: TimeEstimate | None) -> str:
    from experiments.runner.progress import duration

    return "" if hours is None else f"  {'about ' if hours.is_rough else ''}{duration(3600 * hours.wall)}"


@click.command()
@grid_options(RUNS)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "latex", "csv"]),
    default="text",
    show_default=True,
    help="Table format. Formats other than text print only the table.",
)
@click.option("--html", type=FilePath(is_output=True), help="Write the table, plots and curves to this HTML file.")
@click.option(
    "--csv",
    type=FilePath(is_output=True),
    help="Write one line per trial, with settings, counts and final metrics, to this CSV file. - prints only these lines.",
)
@AS_JSON
def report(request: GridRequest, form: str, html: Path | None, csv: Path | None, as_json: bool) -> None:
    """Print the results of a grid's finished trials.

    Trains nothing. Text output also draws the grid's plot, and its exit code is 1 while trials are unfinished. Except for
    --json, the exit code is 2 if none is finished.

    \b
    Example: san report experiments/grids/footprint.yaml --html footprint.html
    """
    from experiments.report.data import grid_report
    from experiments.report.tables import report_text
    from experiments.report.write import print_report, print_unfinished, write_page, write_trials
    from experiments.runner.grid_run import finished_results, known_results, open_grid_run

    prints_trials = csv == Path("-")
    outputs = {"--json": as_json, f"--format {form}": form != "text", "--csv -": prints_trials}
    chosen = [f"`{option}`" for option, given in outputs.items() if given]
    if len(chosen) > 1:
        raise UserError(f"two output formats: {' and '.join(chosen[:2])}; give only one of these options")
    grid_run = open_grid_run(request)
    may_be_empty = as_json and html is None and csv is None
    results = known_results(grid_run) if may_be_empty else finished_results(grid_run)
    numbers = grid_report(grid_run, results)
    if html is not None:
        write_page(numbers, html)
    if csv is not None:
        write_trials(grid_run, results, csv)
    if prints_trials:
        return
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(record) for record in numbers.records]))
    elif form != "text":
        click.echo(report_text(numbers, form).rstrip("\n"))
        print_unfinished(grid_run, results)
    else:
        _, complete = print_report(numbers)
        sys.exit(0 if complete else 1)


@click.command()
@click.option("--profile", default="cifar10", show_default=True, help="Dataset and model size, as in `san run`.")
@click.option("--seeds", type=click.IntRange(2, 1000), default=5, show_default=True, metavar="N", help="Train seeds 0 to N-1.")
@RUNS
@ADDRESS
@click.option(
    "--page",
    type=FilePath(),
    help="Markdown page to write, with its plots in the same folder.  [default: docs/results/PROFILE/study.md]",
)
@click.option(
    "--results",
    "kept",
    type=FilePath(),
    help="CSV file of finished trials, which are not trained again. Robustness goes to a second file, such as "
    "trials-robustness.csv; networks that are not in it are trained again if their checkpoints are not in the store.  "
    "[default: docs/results/PROFILE/trials.csv]",
)
@click.option("--train/--no-train", default=True, help="Train missing trials, or only collect results and write the page.")
@TAKE_OVER
@SERIAL
def study(
    profile: str,
    seeds: int,
    runs: str | None,
    address: str | None,
    page: Path | None,
    kept: Path | None,
    train: bool,
    take_over: bool,
    serial: bool,
) -> None:
    """Train the paper's ablations and test the paper's claims.

    Trains every row with several seeds, and measures the robustness of three networks. Writes a page that shows which of the
    paper's orderings hold beyond seed noise. Rerun the same command to resume, on another machine as well if it has the CSV
    files.

    \b
    Example: san study --profile cifar10 --seeds 5
    """
    from experiments.cli.run import study as run_study
    from experiments.config.config import GRIDS_DIR, PROJECT_DIR
    from experiments.config.grid import GridRequest

    folder = PROJECT_DIR / "docs" / "results" / Path(profile).stem
    page, kept = page or folder / "study.md", kept or folder / "trials.csv"
    with _resumable("study"):
        request = GridRequest(GRIDS_DIR, profile, runs=runs, seeds=seeds, take_over=take_over, serial=serial)
        sys.exit(0 if run_study(request, address, page, kept, train) else 1)


@contextmanager
def _resumable(command: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"what was trained is kept, and the same `san {command}` continues it", err=True)
        raise


_CLUSTER_RUNS = click.option(
    "--runs",
    help="Store for runs: a folder on the cluster or s3://...  [default: the cluster's SAN_RUNS, else ~/.san/runs]",
)


@click.command()
@grid_options(_CLUSTER_RUNS, TAKE_OVER)
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
@click.option(
    "--address",
    callback=not_empty,
    help="Job server, for example http://head:8265.  [default: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS]",
)
def submit(request: GridRequest, names: tuple[str, ...], wait: bool, address: str | None) -> None:
    """Run a grid as a job on a remote Ray cluster.

    Starts `san run` on the cluster's head node. Submit the same grid again to resume. Paths in overrides and --runs are paths
    on the cluster. MLFLOW_TRACKING_URI is passed to the job if it is set here. Pass passwords with --env, unless the nodes
    already have them. Use `ray job list`, `ray job logs` and `ray job stop` to manage jobs.

    \b
    Example: san submit experiments/grids/footprint.yaml --address http://head:8265
    """
    from experiments.cli.submit import submit_grid

    submit_grid(request, names, wait, address)


HEADINGS: dict[str, tuple[click.Command, ...]] = {
    "Train": (plan, run, report, study),
    "Checkpoints": (
        *(checkpoints.evaluate, checkpoints.predict, checkpoints.robustness),
        *(checkpoints.attention, checkpoints.attention_page, checkpoints.convert),
    ),
    "Models": (models.models, models.complexity, models.doctor),
    "Data": (data,),
    "Cluster": (submit,),
    "Runs": (runs.list_runs, runs.delete, runs.ui),
}
"""The commands, in the order of the help text."""
for _command in itertools.chain.from_iterable(HEADINGS.values()):
    cli.add_command(_command)


def main() -> None:
    """Runs the command. User errors are printed without a traceback, and SIGTERM to this process acts like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if os.path.expanduser("~") == "~":  # some users of containers have no home folder, without which MLflow cannot be imported
        from cluster.session import private_folder  # imports Ray

        os.environ["HOME"] = str(private_folder())
    # Imports create half a million permanent objects. Garbage collection among them took a third of the time of `san plan`.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    try:
        cli(prog_name="san", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(1)
    except ModuleNotFoundError:  # explained by `experiments.__main__`
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest of the output when it ends
        click.echo("san: no space left for the output or for a file; free disk space and run the command again", err=True)
        sys.exit(1)
    except Exception as error:
        if not isinstance(error, _printed_errors()):
            raise
        from cluster.errors import LostError

        lines = [printable(line) for line in f"san: {error}".splitlines()]
        click.echo("\n".join(lines), err=True)
        sys.exit(1 if isinstance(error, LostError) else 2)


def _printed_errors() -> tuple[type[Exception], ...]:
    """Imported late, because most commands need neither torch nor DALI."""
    from cluster import ClusterError
    from pipelines import DataError, DecodingError
    from san import CheckpointError
    from san.choice import ModelError

    return UserError, UnavailableError, DataError, DecodingError, ClusterError, CheckpointError, ModelError
