"""The commands for checkpoints: `san convert`, `evaluate`, `predict`, `robustness`, `attention` and `attention-page`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from experiments.cli.options import AS_JSON, IMPORT_NOW, OVERRIDES, RUNS, FilePath, as_value, not_empty, printable
from experiments.errors import UserError

if TYPE_CHECKING:
    from experiments.config.grid import ProtocolName
    from experiments.evaluation.evaluate import LoadedModel

SPLIT = click.option(
    "--split",
    callback=not_empty,
    help="Images to use: val, train, val-split or another folder in data.root.  [default: the checkpoint's validation images]",
)
IMAGE_PROFILE = click.option(
    "--profile", help="Profile that gives the image preprocessing if the checkpoint stores none.  [default: imagenet]"
)


@click.command()
@click.argument("source")
@click.argument("target")
@OVERRIDES
@click.option("--force", is_flag=True, help="Replace an existing TARGET.")
@RUNS
@IMPORT_NOW
def convert(source: str, target: str, overrides: tuple[str, ...], force: bool, runs: str | None) -> None:
    """Write the weights of a checkpoint to a file for `san.load_checkpoint`.

    SOURCE is any checkpoint that `san evaluate` accepts. Files of the paper's authors do not store every field of the
    model. Give missing fields as overrides, for example model.footprint=9. Without an override, a pairwise model gets
    the paper's footprint, 7.

    \b
    Example: san convert released.pth san10.pt model.name=san10_pairwise
    """
    from experiments.runs.store import is_uri
    from san.models import checkpoint

    if is_uri(target):
        kind = target.partition("://")[0]
        raise UserError(f"{kind}://...: `san convert` writes local files only; give a local path as TARGET")
    if os.path.lexists(target) and not force:
        raise UserError(f"{target}: already exists; choose another file, or overwrite this one with --force")
    model = _opened(source, overrides, None, runs).model
    checkpoint.save_checkpoint(model, target)
    overridden = [f"{key}={as_value(value)}" for key, value in checkpoint.overrides_of(model.spec).items()]
    params = sum(parameter.numel() for parameter in model.parameters())
    named = " ".join([model.spec.name, *overridden])
    click.echo(printable(f"{target}: {named}, {checkpoint.classes(model)} classes, {params} parameters"))


@click.command()
@click.argument("checkpoint")
@OVERRIDES
@SPLIT
@IMAGE_PROFILE
@RUNS
@IMPORT_NOW
@AS_JSON
def evaluate(
    checkpoint: str, overrides: tuple[str, ...], split: str | None, profile: str | None, runs: str | None, as_json: bool
) -> None:
    """Evaluate a checkpoint: top-1, top-5, loss.

    \b
    CHECKPOINT is one of:
      a checkpoint file or folder (a folder means its best epoch), local or s3://bucket/...
      a trial's key from the output of `san runs`
      the id of an MLflow run
      a registered model, models:/NAME/VERSION or models:/NAME@ALIAS
      a network with weights, for example san10_patchwise_cifar10, or a folder in the format of the Hugging Face Hub
      a file written by `san.save_checkpoint`
      a file released by the paper's authors

    Overrides may set data.*, recipe.batch_size and resources.cpus. For released files, overrides may also set
    model fields that are missing from the file, for example model.footprint=9.

    \b
    Example: san evaluate runs/checkpoints/0123456789ab --split val
    """
    from experiments.evaluation.evaluate import evaluate_checkpoint, open_checkpoint, open_images
    from experiments.runner.progress import counting
    from experiments.runs.workspace import open_store
    from experiments.training.checkpoint import resolve_checkpoint

    with resolve_checkpoint(checkpoint, open_store(runs)) as (path, uri):
        opened = open_checkpoint(path, overrides, profile)
        images = open_images(opened, split)
        batches = -(-len(images) // opened.batch)
        with counting("", batches, "batches") as count:
            evaluation = evaluate_checkpoint(opened, images, count)
    if uri is not None:
        evaluation = dataclasses.replace(evaluation, checkpoint=uri)
    if evaluation.own_images is False and split is None:
        images_of = printable(f"{evaluation.split} in {evaluation.root}")
        click.echo(f"note: the images of {images_of} differ from those in the model's training", err=True)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(evaluation)))
        return
    trained = "" if evaluation.epoch is None else f", after epoch {evaluation.epoch}"
    click.echo(printable(f"{evaluation.checkpoint}: {evaluation.model}{trained}"))
    of_what = f"{evaluation.images} images of {evaluation.classes} classes, {evaluation.split} in {evaluation.root}"
    numbers = f"top-1 {evaluation.top1:.4f} %  top-5 {evaluation.top5:.4f} %  loss {evaluation.loss:.6f}"
    click.echo(printable(f"{numbers}  {of_what}"))


@click.command()
@click.argument("checkpoint")
@click.argument("images", nargs=-1, metavar="[IMAGE|FOLDER]... [KEY=VALUE]...")
@click.option(
    "--list",
    "listed_in",
    type=click.File(encoding="utf-8-sig", errors="surrogateescape"),
    metavar="FILE",
    help="File with one path per line; - for stdin.",
)
@click.option("--top", type=click.IntRange(1), default=5, show_default=True, help="Number of classes per image.")
@click.option(
    "--csv",
    "table",
    type=FilePath(is_output=True),
    metavar="FILE.csv",
    help="Write a table instead of lines to this file; - for stdout.",
)
@IMAGE_PROFILE
@RUNS
@IMPORT_NOW
@AS_JSON
def predict(
    checkpoint: str,
    images: tuple[str, ...],
    listed_in: TextIO | None,
    top: int,
    table: Path | None,
    profile: str | None,
    runs: str | None,
    as_json: bool,
) -> None:
    """Classify images: the most probable classes.

    CHECKPOINT is anything that `san evaluate` accepts. A FOLDER means all images in it and its subfolders. Overrides such as
    data.size=256 follow the images. The exit code is 1 if an image cannot be used; the table and the lines say why. Until
    the table is complete, it is called FILE.csv.part.

    \b
    Example: san predict san10_patchwise_cifar10 photos --csv photos.csv
    """
    from experiments.evaluation.evaluate import find_images, write_csv
    from experiments.evaluation.evaluate import predict as predictions_of
    from experiments.runner.progress import counting

    is_printed = as_json or table == Path("-")
    if as_json and table == Path("-"):
        raise UserError("--json and --csv - both print the results; give only one of them")
    names = [word for word in images if "=" not in word or os.path.exists(word)]
    if not names and listed_in is None:
        raise UserError("no images given; give files or folders, or a file with one path per line with --list")
    paths, skipped = find_images(names, listed_in)
    if skipped:
        click.echo(skipped, err=True)
    opened = _opened(checkpoint, [word for word in images if word not in names], profile, runs)
    if opened.classes is None:
        click.echo(f"{checkpoint}: the names of the classes are not known; classes are numbered from 0", err=True)
    failed = 0
    with ExitStack() as stack:
        batches = -(-len(paths) // opened.batch)
        count = stack.enter_context(counting("", batches, "batches"))
        predictions = predictions_of(opened, paths, top, count)
        if table is not None:
            predictions = write_csv(predictions, top, stack.enter_context(_table(table)))
        for one in predictions:
            failed += bool(one.error)
            if as_json:
                click.echo(json.dumps(dataclasses.asdict(one)))
            elif table is None:
                shares = zip(one.classes, one.probabilities, strict=True)
                text = one.error or ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares)
                click.echo(printable(f"{one.image}: {text}"))
    if table is not None:
        unusable = f", of which {failed} cannot be used" if failed else ""
        click.echo(f"{table}: {len(paths)} images{unusable}", err=is_printed)
    sys.exit(1 if failed else 0)


@contextmanager
def _table(path: Path) -> Iterator[TextIO]:
    """A file to write, called `path`.part until it is complete and replaces `path`."""
    if path == Path("-"):
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        yield sys.stdout
        return
    target = path
    if path.is_file() or not path.exists():  # devices are not replaced, nor are links
        target = Path(os.path.realpath(path))
    part = target if target.exists() and not target.is_file() else target.with_name(f"{target.name}.part")
    try:
        file = open(part, "w", encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"--csv {path}: cannot write this file ({error.strerror}); choose another one") from None
    try:
        with file:
            yield file
        if part != target:
            part.replace(target)
    except BaseException:
        click.echo(f"{part} has the results so far", err=True)
        raise


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT... [KEY=VALUE]...")
@click.option(
    "--protocol",
    type=click.Choice(["rotation", "attack"]),
    default="rotation",
    show_default=True,
    help="What to measure: rotated images or targeted adversarial attacks.",
)
@SPLIT
@IMAGE_PROFILE
@RUNS
@IMPORT_NOW
@AS_JSON
def robustness(
    checkpoints: tuple[str, ...],
    protocol: ProtocolName,
    split: str | None,
    profile: str | None,
    runs: str | None,
    as_json: bool,
) -> None:
    """Measure accuracy on rotated or adversarial images.

    CHECKPOINT is anything that `san evaluate` accepts. Give overrides after the checkpoints; model.* applies to released
    files only. To train models and compare them with the paper's numbers, run the grids rotation.yaml and attack.yaml.

    \b
    Example: san robustness san10.pt san15.pt --protocol attack
    """
    from experiments.evaluation.robustness import PROTOCOLS
    from experiments.report.data import measurements
    from experiments.report.tables import protocol_table
    from experiments.runner.measure import measure_all
    from experiments.runs.store import is_uri

    # The query of an address and the name of a file may contain a `=`, too.
    names = [word for word in checkpoints if "=" not in word or is_uri(word.partition("=")[0]) or os.path.exists(word)]
    overrides = [word for word in checkpoints if word not in names]
    measured = measurements(PROTOCOLS[protocol], measure_all(names, overrides, protocol, profile, split, runs))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in measured]))
    else:
        lines = protocol_table(measured).text().splitlines()
        click.echo("\n".join([PROTOCOLS[protocol].caption, "", *map(printable, lines)]))


LAYER = click.option(
    "--layer",
    metavar="NAME|NUMBER",
    help="Attention layer to draw.  [default: the last layer of the first stage with the largest footprint]",
)
IMAGE_SPLIT = click.option(
    "--split",
    callback=not_empty,
    help="Split that contains image number IMAGE.  [default: the checkpoint's validation images]",
)


@click.command()
@click.argument("checkpoint")
@click.argument("image")
@OVERRIDES
@click.option("--pixel", metavar="ROW,COL", help="Pixel of the model's input to explain.  [default: the center]")
@click.option("--grid", type=click.IntRange(1), metavar="N", help="Draw N by N pixels spread over the image.")
@LAYER
@IMAGE_SPLIT
@IMAGE_PROFILE
@RUNS
@IMPORT_NOW
@click.option(
    "--out",
    type=FilePath(),
    default="attention.png",
    show_default=True,
    metavar="FILE.png",
    help="PNG file to write.",
)
def attention(
    checkpoint: str,
    image: str,
    overrides: tuple[str, ...],
    pixel: str | None,
    grid: int | None,
    layer: str | None,
    split: str | None,
    profile: str | None,
    runs: str | None,
    out: Path,
) -> None:
    """Draw the attention weights of a pixel's footprint.

    Shows the weights channel by channel; `san attention-page` shows all layers and pixels. CHECKPOINT and overrides work as
    in `san evaluate`. IMAGE is a JPEG, PNG, BMP, TIFF or WebP file, or the number of an image in the split.

    \b
    Example: san attention san10.pt photo.jpg --pixel 112,96 --out attention.png
    """
    from experiments.evaluation.attention import attention_in_words, compute_attention, open_image
    from experiments.report.attention_plot import save

    if pixel is not None and grid is not None:
        raise UserError("both `--pixel` and `--grid`; give only one of these options")
    position = None if pixel is None else re.fullmatch(r"(\d+),(\d+)", pixel)
    if pixel is not None and position is None:
        raise UserError(f"--pixel {pixel}: not ROW,COL; give two integers, for example 12,8")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: the picture is a PNG; give a file name that ends in .png")
    if os.path.realpath(out) == os.path.realpath(image):
        raise UserError(f"--out {out}: would overwrite the image; choose another name")
    opened = _opened(checkpoint, overrides, profile, runs)
    chosen = None if position is None else (int(position[1]), int(position[2]))
    weights = compute_attention(opened, open_image(opened, image, split), chosen, grid or 1, layer)
    save(weights, out)
    click.echo(f"{out}: {attention_in_words(weights)}")


@click.command()
@click.argument("checkpoint")
@click.argument("image")
@OVERRIDES
@click.option("--compare", metavar="CHECKPOINT", help="A second network, shown next to the first one.")
@LAYER
@IMAGE_SPLIT
@IMAGE_PROFILE
@RUNS
@IMPORT_NOW
@click.option(
    "--out",
    type=FilePath(is_output=True),
    default="attention.html",
    show_default=True,
    metavar="FILE.html",
    help="HTML file to write.",
)
def attention_page(
    checkpoint: str,
    image: str,
    overrides: tuple[str, ...],
    compare: str | None,
    layer: str | None,
    split: str | None,
    profile: str | None,
    runs: str | None,
    out: Path,
) -> None:
    """Write a page with the attention weights of all layers and pixels.

    The page is interactive and needs no network. The arguments are as in `san attention`.

    \b
    Example: san attention-page san10.pt photo.jpg --compare san15.pt
    """
    from experiments.evaluation.attention import compute_all_attention, layer_name, open_image
    from experiments.report.attention_plot import save_page

    networks = [_opened(name, overrides, profile, runs) for name in (checkpoint, compare) if name is not None]
    sizes = [network.config.data.size for network in networks]
    if len(set(sizes)) > 1:
        raise UserError(f"--compare {compare}: its input is {sizes[1]} pixels wide, the other's {sizes[0]}; give data.size=N")
    seen = [compute_all_attention(network, open_image(network, image, split)) for network in networks]
    first, *others = [next(iter(layers.values())).image_HW3 for layers in seen]
    if any(abs(first - other).max() > 1 / 255 for other in others):
        raise UserError(f"--compare {compare}: it prepares the image in another way; give data.resize=N or data.root=FOLDER")
    save_page(seen, layer_name(networks[0], layer), out)
    click.echo(f"{out}: open this file in a browser")


def _opened(checkpoint: str, overrides: Sequence[str], profile: str | None, runs: str | None) -> LoadedModel:
    from experiments.evaluation.evaluate import open_checkpoint
    from experiments.runs.workspace import open_store
    from experiments.training.checkpoint import resolve_checkpoint

    with resolve_checkpoint(checkpoint, open_store(runs)) as (path, _):
        return open_checkpoint(path, overrides, profile)
