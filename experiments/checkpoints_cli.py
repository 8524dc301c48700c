"""`san convert`, `evaluate`, `robustness` and `show`: what is done with a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from experiments.errors import UserError
from experiments.options import AS_JSON, OVERRIDES, RUNS, as_value

if TYPE_CHECKING:
    from experiments.grid import ProtocolName


@click.command()
@click.argument("source")
@click.argument("target")
@OVERRIDES
@click.option("--name", help="the variant of a released file  [default: seen in its keys]")
@click.option("--to", "form", type=click.Choice(["san", "released"]), default="san", show_default=True, help="whose file")
@click.option("--force", is_flag=True, help="replace a file that exists")
@RUNS
def convert(
    source: str, target: str, overrides: tuple[str, ...], name: str | None, form: str, force: bool, runs: Path | str | None
) -> None:
    """Write a classifier's weights as a file of ours or of the authors'.

    SOURCE is what `san evaluate` takes: a trial's checkpoint, or a file of either kind. A released file does not tell
    everything: overrides such as footprint=9 tell the rest. Without them a pairwise footprint is the paper's 7.
    """
    from experiments.config import merged
    from experiments.evaluate import kind_of, open_checkpoint, reach
    from experiments.expand import parse_override
    from experiments.storage import is_uri
    from san.models import checkpoint, released

    if is_uri(target):
        kind = target.partition("://")[0]
        raise UserError(f"{kind}://...: is an address; `san convert` writes files of this machine, so give the path of one")
    if os.path.lexists(target) and not force:
        raise UserError(f"{target}: exists; name another file, or replace it with --force")
    try:
        with reach(source, runs) as (path, _):
            if kind_of(path) == "released":
                fields = merged({}, *map(parse_override, overrides))
                if "name" in fields:
                    raise UserError("name: not a field of a model; --name tells the variant")
                model = released.load_released_checkpoint(path, name, **fields)
            elif needless := [*(["--name"] if name else []), *overrides]:
                raise UserError(f"{source}: tells its model; leave out {', '.join(needless)}")
            else:
                model = open_checkpoint(path).model
        save = checkpoint.save_checkpoint if form == "san" else released.save_released_checkpoint
        save(model, target)
    except ValueError as error:  # CheckpointError is one
        raise UserError(str(error)) from None
    hidden = released.untold(model.spec) if form == "released" else []
    if hidden:
        click.echo(f"note: the released form does not tell {', '.join(hidden)}; give it when {target} is loaded", err=True)
    told = [f"{key}={as_value(value)}" for key, value in checkpoint.overrides_of(model.spec).items()]
    params = sum(parameter.numel() for parameter in model.parameters())
    click.echo(f"{target}: {' '.join([model.spec.name, *told])}, {checkpoint.classes(model)} classes, {params} parameters")


@click.command()
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
    recipe.batch_size, placement.cpus; for a file of the authors' also what it does not tell, such as model.footprint=9.
    """
    from experiments.evaluate import evaluate_checkpoint, open_checkpoint, open_images, reach, shown
    from experiments.images import transform

    with reach(checkpoint, runs) as (path, place):
        opened = open_checkpoint(path, overrides, profile)
        images = open_images(opened, split)
        with shown(len(images), opened.config.recipe.batch_size) as ended:
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


@click.command()
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

    CHECKPOINT is what `san evaluate` takes. Overrides come after them; model.* are for the authors' files. The grids
    `rotation` and `attack` are tables of trained cells beside the paper's numbers.
    """
    from experiments.robustness import PROTOCOLS, table
    from experiments.robustness.checkpoints import measure_all
    from experiments.storage import is_uri

    # An address may hold a `=` behind its `?`, and a file in its name.
    names = [word for word in checkpoints if "=" not in word or is_uri(word.partition("=")[0]) or os.path.exists(word)]
    overrides = [word for word in checkpoints if word not in names]
    cells = measure_all(names, overrides, protocol, profile, split, runs)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(cell) for cell in cells]))
    else:
        click.echo(f"{PROTOCOLS[protocol].caption}\n\n{table.as_text(cells)}")


@click.command()
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

    CHECKPOINT and overrides are those of `san evaluate`. IMAGE is a JPEG or PNG file (BMP, TIFF and WebP are taken too), or the
    number of an image of the split.
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
