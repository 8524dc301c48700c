"""The command `san`. Exit codes: 0 all is well, 1 something failed or was interrupted, 2 a mistake in what was asked.

Commands import what they need when they run, so that help comes at once.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from experiments import jobs_cli
from experiments.data_cli import data
from experiments.errors import UserError
from experiments.options import ADDRESS, AS_JSON, GRID, OVERRIDES, PROFILE, RUNS, SEEDS, age

if TYPE_CHECKING:
    from experiments.estimate import Hours
    from experiments.grid import ProtocolName
    from experiments.plan import Cell
    from experiments.tracking.listing import Listed


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Self-attention networks for image recognition: train a grid of questions, and answer it beside the paper."""


cli.add_command(data)
for command in (jobs_cli.submit, jobs_cli.status, jobs_cli.logs, jobs_cli.stop):
    cli.add_command(command)


@cli.command()
@click.argument("pattern", default="*")
@AS_JSON
def models(pattern: str, as_json: bool) -> None:
    """List the named variants, such as those that match 'san*_pairwise', with their fields, which can be overridden."""
    from san.models import list_models, model_spec

    records = [dataclasses.asdict(model_spec(name)) for name in list_models(pattern)]
    if not records:
        raise UserError(f"no variant matches {pattern!r}; `san models` lists them all")
    if as_json:
        click.echo(json.dumps(records))
        return
    for record in records:
        name = record.pop("name")
        click.echo(" ".join([f"{name:16s}", *(f"{key}={_as_value(value)}" for key, value in record.items())]))


def _as_value(value: object) -> str:
    """As it would be written in an override."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--name", help="the variant of a released file  [default: seen in its keys]")
@click.option("--to", "form", type=click.Choice(["san", "released"]), default="san", show_default=True, help="whose file")
@click.option("--force", is_flag=True, help="replace a file that exists")
def convert(source: Path, target: Path, overrides: tuple[str, ...], name: str | None, form: str, force: bool) -> None:
    """Convert a classifier's weights between the authors' released files and ours, in either direction.

    A released file does not tell everything: overrides such as footprint=9 tell the rest. Without them a pairwise footprint is
    the paper's 7.
    """
    from experiments.config import merged
    from experiments.expand import parse_override
    from san.models import checkpoint, released

    if os.path.lexists(target) and not force:
        raise UserError(f"{target}: exists; name another file, or replace it with --force")
    try:
        if checkpoint.is_checkpoint(checkpoint.read(source)):
            if name or overrides:
                raise UserError(
                    f"{source}: is a file of ours, which tells its model; leave out --name and {', '.join(overrides)}"
                )
            model = checkpoint.load_checkpoint(source)
        else:
            fields = merged({}, *map(parse_override, overrides))
            if wrong := fields.keys() & {"name", "path"}:
                raise UserError(f"{', '.join(sorted(wrong))}: not a field of a model; --name tells the variant")
            model = released.load_released_checkpoint(source, name, **fields)
        save = checkpoint.save_checkpoint if form == "san" else released.save_released_checkpoint
        save(model, target)
    except ValueError as error:  # CheckpointError is one
        raise UserError(str(error)) from None
    hidden = released.untold(model.spec) if form == "released" else []
    if hidden:
        click.echo(f"note: the released form does not tell {', '.join(hidden)}; give it when {target} is loaded", err=True)
    told = [f"{key}={_as_value(value)}" for key, value in checkpoint.overrides_of(model.spec).items()]
    params = sum(parameter.numel() for parameter in model.parameters())
    click.echo(f"{target}: {' '.join([model.spec.name, *told])}, {checkpoint.classes(model)} classes, {params} parameters")


@cli.command()
@click.argument("name", required=False)
@OVERRIDES
@click.option(
    "--grid", type=click.Path(path_type=Path), help="every row of this grid, at full size, beside the paper's numbers"
)
@click.option("--size", type=click.IntRange(1, 100_000), default=224, show_default=True, help="side of the image in pixels")
@click.option("--stages", is_flag=True, help="a line per stage too; always so for one model")
@AS_JSON
def complexity(name: str | None, overrides: tuple[str, ...], grid: Path | None, size: int, stages: bool, as_json: bool) -> None:
    """Count parameters and FLOPs: of one model (with overrides such as footprint=9), of a grid's rows, or of all variants."""
    if name is not None and grid is not None:
        raise UserError(f"complexity takes a model or a grid, not both: leave out {name!r} or --grid")
    from experiments import counts

    if name is not None:
        lines = counts.of_variant(name, overrides, size)
    else:
        lines = counts.of_variants(size) if grid is None else counts.of_grid(grid, size)
    click.echo(json.dumps(counts.as_objects(lines)) if as_json else counts.as_text(lines, stages or name is not None))


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@RUNS
@SEEDS
@ADDRESS
def run(
    grid: Path, overrides: tuple[str, ...], profile: str, runs: Path | str | None, seeds: int | None, address: str | None
) -> None:
    """Train what is missing of a grid and print its table; interrupted, the same command continues."""
    from experiments.job import open_job
    from experiments.run import run as run_job

    sys.exit(0 if run_job(open_job(grid, profile, overrides, runs, seeds), address) else 1)


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@RUNS
@SEEDS
@ADDRESS
@AS_JSON
def plan(
    grid: Path,
    overrides: tuple[str, ...],
    profile: str,
    runs: Path | str | None,
    seeds: int | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Show what would run: the cells of a grid in order and which are finished, how many at a time, and hours as measured.

    Trains nothing, but writes an embedded data set that is missing.
    """
    from experiments.job import open_job
    from experiments.plan import plan as plan_job
    from experiments.plan import plan_in_words

    job = open_job(grid, profile, overrides, runs, seeds)
    cells = plan_job(job)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(cell) for cell in cells]))
        return
    width = max(len(cell.row) for cell in cells)
    lines = [f"{cell.row:{width}s}  seed {cell.seed}  {cell.key}  {_state(cell)}{_hours(cell.hours)}" for cell in cells]
    click.echo("\n".join([*lines, "", *plan_in_words(job, cells, address)]))


def _state(cell: Cell) -> str:
    if cell.stopped_at is not None:
        return f"stopped at epoch {cell.stopped_at}"
    return "finished" if cell.finished else "to train"


def _hours(hours: Hours | None) -> str:
    return "" if hours is None else f"  {hours.wall:.3g} h"


@cli.command()
@GRID
@OVERRIDES
@PROFILE
@RUNS
@SEEDS
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "latex", "csv"]),
    default="text",
    show_default=True,
    help="of the table; all but text print it alone",
)
@click.option("--html", type=click.Path(path_type=Path), help="write table, plots and curves as one page to this file")
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
    """Print the table of what is finished, and draw its plot; trains nothing."""
    from experiments.answer import robustness_of, show, table_of, tables, write_page
    from experiments.job import finished_results, known_results, open_job, say

    if as_json and form != "text":
        raise UserError(f"--json and --format {form} ask for two forms of the table; leave out one")
    job = open_job(grid, profile, overrides, runs, seeds)
    if html is not None:
        write_page(job, finished_results(job), html)
        say(f"report: {html}")
    if as_json:
        lines = (robustness_of if job.grid.robustness else table_of)(job, known_results(job))
        click.echo(json.dumps([dataclasses.asdict(line) for line in lines]))
    elif form != "text":
        click.echo(tables(job, finished_results(job))[form].rstrip("\n"))
    else:
        _, complete = show(job, finished_results(job))
        sys.exit(0 if complete else 1)


@cli.command()
@click.option("--profile", default="study", show_default=True, help="what to train on; never what is compared")
@click.option("--seeds", type=click.IntRange(2, 1000), default=5, show_default=True, metavar="N", help="seeds 0 to N-1")
@RUNS
@ADDRESS
@click.option(
    "--page", type=click.Path(path_type=Path), help="the page to write, plots beside it  [default: docs/digits-study.md]"
)
def study(profile: str, seeds: int, runs: Path | str | None, address: str | None, page: Path | None) -> None:
    """Train the paper's ablation tables over several seeds, and tell which of its orderings show; continues like `run`."""
    from experiments.config import PROJECT_DIR
    from experiments.run import study as run_study

    sys.exit(0 if run_study(profile, seeds, runs, address, page or PROJECT_DIR / "docs" / "digits-study.md") else 1)


@cli.command()
@click.argument("checkpoint")
@OVERRIDES
@click.option("--profile", help="how images are treated, where the file does not tell  [default: imagenet]")
@click.option("--split", help="val, train, val-split, or another folder of images  [default: what is validated on]")
@RUNS
@click.option("--json", "as_json", is_flag=True, help="an object")
def evaluate(
    checkpoint: str, overrides: tuple[str, ...], profile: str | None, split: str | None, runs: Path | str | None, as_json: bool
) -> None:
    """Tell top-1, top-5 and loss of a checkpoint on a split.

    CHECKPOINT is a trial's, which tells how its images are treated: the file, or for the best epoch its folder, the trial's
    key, the id of its MLflow run, or its registered model, models:/NAME/VERSION or models:/NAME@ALIAS; or a file of
    `san.save_checkpoint`; or one of the paper's authors. Files and folders may be s3://bucket/... Overrides: data.*,
    recipe.batch, placement.cpus; for a file of the authors' also what it does not tell, such as model.footprint=9.
    """
    from experiments.evaluate import evaluate_checkpoint, open_checkpoint, open_images, reach, shown
    from experiments.images import transform

    with reach(checkpoint, runs) as (path, place):
        opened = open_checkpoint(path, overrides, profile)
        images = open_images(opened, split)
        with shown(len(images), opened.config.recipe.batch) as ended:
            found = evaluate_checkpoint(opened, images, transform(opened.config.data), ended)
    if place is not None:
        found = dataclasses.replace(found, checkpoint=place)
    if found.own_images is False and split is None:
        click.echo(f"note: the images of {found.split} in {found.root} are not those of the trial", err=True)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
        return
    trained = "" if found.epoch is None else f", after epoch {found.epoch}"
    click.echo(f"{found.checkpoint}: {found.model}{trained}")
    click.echo(
        f"top-1 {found.top1:.4f} %  top-5 {found.top5:.4f} %  loss {found.loss:.6f}  "
        f"{found.images} images of {found.classes} classes, {found.split} in {found.root}"
    )


@cli.command()
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT... [KEY=VALUE]...")
@click.option("--protocol", type=click.Choice(["rotation", "attack"]), default="rotation", show_default=True)
@click.option("--profile", help="how images are treated, where a file does not tell  [default: imagenet]")
@click.option("--split", help="val, train, val-split, or another folder of images  [default: what is validated on]")
@RUNS
@AS_JSON
def robustness(
    checkpoints: tuple[str, ...],
    protocol: ProtocolName,
    profile: str | None,
    split: str | None,
    runs: Path | str | None,
    as_json: bool,
) -> None:
    """Take checkpoints through a protocol: accuracy on turned images, or under targeted attacks, and the drop.

    CHECKPOINT is what `san evaluate` takes. Overrides come after them. The grids `rotation` and `attack` are tables of trained
    cells beside the paper's numbers.
    """
    from experiments.robustness import PROTOCOLS, table
    from experiments.robustness.checkpoints import measure_all

    names = [word for word in checkpoints if "=" not in word or Path(word).exists()]
    overrides = [word for word in checkpoints if word not in names]
    cells = measure_all(names, overrides, protocol, profile, split, runs)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(cell) for cell in cells]))
    else:
        click.echo(f"{PROTOCOLS[protocol].caption}\n\n{table.as_text(cells)}")


@cli.command()
@click.argument("checkpoint")
@click.argument("image")
@OVERRIDES
@click.option("--pixel", metavar="ROW,COL", help="of the square that the network sees  [default: its centre]")
@click.option("--grid", type=click.IntRange(1), metavar="N", help="instead, N by N pixels spread over the image")
@click.option("--layer", metavar="NAME|NUMBER", help="[default: the last of the first stage with the largest footprint]")
@click.option("--out", type=click.Path(path_type=Path), default="attention.png", show_default=True, metavar="FILE.png")
@click.option("--profile", help="how images are treated, where the file does not tell  [default: imagenet]")
@click.option("--split", help="where IMAGE is a number: of which images  [default: what is validated on]")
@RUNS
def show(
    checkpoint: str,
    image: str,
    overrides: tuple[str, ...],
    pixel: str | None,
    grid: int | None,
    layer: str | None,
    out: Path,
    profile: str | None,
    split: str | None,
    runs: Path | str | None,
) -> None:
    """Draw how an attention layer weighs the footprint of a pixel, or of a grid of pixels, channel by channel.

    CHECKPOINT and overrides are those of `san evaluate`. IMAGE is a JPEG or PNG file, or the number of an image of the split.
    """
    from experiments.evaluate import open_checkpoint, reach
    from experiments.report.attention import draw, in_words
    from experiments.show import look, open_image

    if pixel is not None and grid is not None:
        raise UserError("show draws one pixel or a grid of them: leave out --pixel or --grid")
    place = None if pixel is None else re.fullmatch(r"(\d+),(\d+)", pixel)
    if pixel is not None and place is None:
        raise UserError(f"--pixel {pixel}: it is written ROW,COL, such as 12,8")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: the picture is a PNG; name a file that ends in .png")
    with reach(checkpoint, runs) as (path, _):
        opened = open_checkpoint(path, overrides, profile)
    chosen = None if place is None else (int(place[1]), int(place[2]))
    attention = look(opened, open_image(opened, image, split), chosen, grid or 1, layer)
    draw(attention, out)
    click.echo(f"{out}: {in_words(attention)}")


@cli.command("runs")
@click.argument("grid", required=False)
@RUNS
@AS_JSON
@click.option("--follow", is_flag=True, help="again every 5 seconds, on a terminal in place, until nothing runs")
def list_runs(grid: str | None, runs: Path | str | None, as_json: bool, follow: bool) -> None:
    """List the runs of the store, or of one grid by its name: state, epoch, top-1, age; the newest first."""
    from experiments.job import has_store
    from experiments.tracking.listing import list_runs as listed_runs
    from experiments.workspace import open_workspace

    if as_json and follow:
        raise UserError("--json tells once; leave out --follow")
    uri = open_workspace(runs).tracking_uri
    while True:
        listed = listed_runs(uri, grid and Path(grid).stem) if has_store(uri) else []
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(run) for run in listed]))
            return
        if not listed and not follow:
            click.echo(f"no runs{f' of {grid}' if grid else ''} in {uri}", err=True)
        lines = [_listed(run) for run in listed]
        in_place = follow and sys.stdout.isatty()
        if in_place:  # what has ended longest ago does not fit a full screen
            columns, rows = shutil.get_terminal_size()
            lines = [line[:columns] for line in lines[: rows - 1]]
            click.clear()
        click.echo("".join(f"{line}\n" for line in lines), nl=False)
        if not follow or all(run.state != "running" for run in listed):
            return
        try:
            time.sleep(5)
        except KeyboardInterrupt:  # how one leaves it
            return
        if not in_place:
            click.echo()


def _listed(run: Listed) -> str:
    epoch = f"{run.epoch or 0}/{run.epochs or '?'}"
    top1 = "-" if run.top1 is None else f"{run.top1:.1f} %"
    return f"{run.state:8s}  {epoch:>9s}  {top1:>7s}  {age(run.age):>6s}  {run.key}  {run.grid}-{run.profile} {run.name}"


@cli.command()
@RUNS
@click.option("--port", type=click.IntRange(1, 65535), help="[default: 5000, or the next one that is free]")
def ui(runs: Path | str | None, port: int | None) -> None:
    """Browse the runs: MLflow on the project's store, on this machine only, with the address of each grid's page."""
    from experiments.job import has_store
    from experiments.tracking.listing import experiment_pages
    from experiments.workspace import open_workspace

    uri = open_workspace(runs).tracking_uri
    if not has_store(uri):
        raise UserError(f"{uri}: no runs yet; train a grid with `san run` first, or name the folder with --runs")
    is_server = uri.startswith("http")
    if is_server and port is not None:
        raise UserError(f"--port {port}: MLflow is served at {uri} (MLFLOW_TRACKING_URI) already; leave it out")
    port = None if is_server else _free_port(port)
    address = uri if is_server else f"http://127.0.0.1:{port}"
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    asks = f", which asks for {user}'s password" if user else ""
    how = f"(the server of MLFLOW_TRACKING_URI{asks})" if is_server else "(starts in some seconds; Ctrl-C ends it)"
    found = experiment_pages(uri, address.rstrip("/"))
    width = max(map(len, found), default=0)
    click.echo("\n".join([f"{address}  {how}", *(f"{name:{width}s}  {page}" for name, page in found.items())]))
    if is_server:
        return
    options = ["--host", "127.0.0.1", "--port", str(port), "--allowed-hosts", f"127.0.0.1:{port},localhost:{port}"]
    mlflow = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *options, "--workers", "1"]
    with subprocess.Popen(mlflow, start_new_session=True) as server:  # else its processes would tell of Ctrl-C with tracebacks
        try:
            sys.exit(server.wait())
        except KeyboardInterrupt:  # how one leaves it
            os.killpg(server.pid, signal.SIGTERM)


def _free_port(wanted: int | None) -> int:
    """The wanted port of this machine; without one, the first from 5000 on that is free.

    Raises:
        UserError: it is taken.
    """
    for port in range(5000, 5100) if wanted is None else (wanted,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise UserError(f"port {wanted or '5000 to 5099'} is taken; name another with --port")


def main() -> None:
    """Runs the command; a mistake of the user is shown as its text alone. SIGTERM, as schedulers send it, is a Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Imports make half a million objects that live to the end: to look for garbage among them took a third of `san plan`.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    try:
        cli(prog_name="san", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: what is finished is kept, the same command continues", err=True)
        sys.exit(1)
    except ValueError as error:
        if not isinstance(error, UserError) and not isinstance(error, _errors_below()):
            raise
        click.echo(f"san: {error}", err=True)
        sys.exit(2)


def _errors_below() -> tuple[type[ValueError], ...]:
    """Imported late: no command should wait for Ray and DALI that does not use them."""
    from cluster import ClusterError
    from pipelines import DataError

    return DataError, ClusterError
