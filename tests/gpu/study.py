"""Trains missing trials on one GPU, several at once, on a machine that lacks DALI, Ray and MLflow.

    python -m tests.gpu.study OUT --budget 600 --grid position --grid relation --known docs/results/cifar10/trials.csv
    python -m tests.gpu.study OUT --budget 600 --profile cifar10-full --grid pretrained --checkpoints
    python -m tests.gpu.study OUT --budget 600 --seeds 5 --grid rotation --robustness --only resnet26 --only san10_pairwise

Model, recipe and engine are those of `san run`, and so is a trial's key; CUDA graphs are on. KEY=VALUE, such as
data.root=FOLDER, changes the profile. Only the loader differs: the images stay in the memory of the GPU, torch enlarges them,
and torch's random numbers choose crops and order. A grid's `early_stopping` has no effect.

Trials of the rows with the fewest finished seeds come first; those in `--known` or OUT/trials.csv are finished. Each trial is
appended to OUT/trials.csv when it ends, with the columns of the study's trials.csv, the hardware, the loader and the revision.
A trial starts only if one like the longest so far would end before the budget does. With `--checkpoints`, OUT/TRIAL.pt is a
checkpoint that `san evaluate` reads, and in the trial's folder of checkpoints, `make weights`. With `--robustness`, networks
are also measured on rotated and attacked images; OUT/trials-robustness.csv then takes the place of OUT/trials.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from experiments.config.config import DataConfig, RecipeConfig
from experiments.config.expand import expand, grid_path, profile_path
from experiments.config.grid import GridRequest, Trial
from experiments.config.imports import import_sources
from experiments.errors import UserError
from experiments.evaluation.robustness import PROTOCOLS, ROBUSTNESS_METRICS, Subject
from experiments.paper.tables import table_names
from experiments.runs.provenance import git_commit
from experiments.runs.summary import Epoch
from experiments.tracking.results_file import CSV_COLUMNS, ResultsFile
from experiments.training.augment import Augmentation
from experiments.training.checkpoint import Checkpoint, Origin
from experiments.training.engine import Engine, join_process_group, numerics
from experiments.training.images import data_digest, open_data, transform
from experiments.training.metrics import RunningEpoch, evaluate
from pipelines import DataError, Dataset, Transform
from san.nn import fold

LACKING = "init", "class_weights", "patience"
"""Settings of a recipe that this program does not implement."""
Part = tuple[Tensor, Tensor]
"""All images of a split, uint8 [N, 3, H, W], and their labels [N]."""


def load(dataset: Dataset, size: int, padding: int, device: torch.device) -> Part:
    """Reads all images, enlarged to `size` pixels and padded with black."""
    with ThreadPoolExecutor() as pool:
        pixels = list(pool.map(lambda path: np.asarray(Image.open(dataset.root / path).convert("RGB")), dataset.paths))
    images_NCHW = torch.from_numpy(np.stack(pixels)).to(device).permute(0, 3, 1, 2)
    enlarged = [interpolate(part.float(), size=(size, size), mode="bilinear") for part in images_NCHW.split(1000)]
    padded = [pad(part.round().to(torch.uint8), [padding] * 4) for part in enlarged]
    return torch.cat(padded), torch.from_numpy(np.asarray(dataset.labels)).to(device)


def normalized(images_NCHW: Tensor, settings: Transform) -> Tensor:
    mean, std = (torch.tensor(x, device=images_NCHW.device).view(3, 1, 1) for x in (settings.mean, settings.std))
    return ((images_NCHW / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def training_batches(part: Part, settings: Transform, batch: int) -> Iterator[Part]:
    """An epoch in random order: random squares of the padded images, half of them mirrored."""
    images_NCHW, labels_N = part
    device, padding = labels_N.device, images_NCHW.shape[2] - settings.size
    channel_C11, along = torch.arange(3, device=device).view(3, 1, 1), torch.arange(settings.size, device=device)
    for chosen_B in torch.randperm(len(labels_N), device=device).split(batch):
        top_B1, left_B1 = torch.randint(padding + 1, (2, len(chosen_B), 1), device=device)
        row_BH, column_BW = top_B1 + along, left_B1 + along
        column_BW = torch.where(torch.rand(top_B1.shape, device=device) < 0.5, column_BW.flip(1), column_BW)
        cut = images_NCHW[chosen_B[:, None, None, None], channel_C11, row_BH[:, None, :, None], column_BW[:, None, None, :]]
        yield normalized(cut, settings), labels_N[chosen_B]


def batches(part: Part, settings: Transform) -> Iterator[Part]:
    """The images of a part in their order."""
    for images_NCHW, labels_N in zip(*(x.split(500) for x in part), strict=True):
        yield normalized(images_NCHW, settings), labels_N


def robustness(checkpoint: Checkpoint, part: Part, settings: Transform) -> dict[str, float]:
    """The numbers of all protocols by their names in the tracker."""
    network = fold(checkpoint.model()).to(part[1].device)
    classes, seed = len(checkpoint.origin.classes), checkpoint.origin.seed
    subject = Subject(network, settings, part[1].tolist(), classes, seed, partial(batches, part))
    metrics: dict[str, float] = {}
    for condition in (one for protocol in PROTOCOLS.values() for one in protocol.conditions):
        metrics |= condition.metrics(condition.measure(subject))
    return metrics


class Trainer:
    """Trains with images in the GPU's memory, which stay there for the next trial with the same ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts: tuple[object, Part, Part] | None = None

    def parts(self, config: DataConfig) -> tuple[Part, Part]:
        """The padded images to train on, and those to validate on."""
        if self._parts is None or self._parts[0] != config:
            size, (training, validation) = transform(config).size, open_data(config)
            images = load(training, size, config.crop_padding or 0, self.device)
            self._parts = config, images, load(validation, size, 0, self.device)
        return self._parts[1:]

    def train(self, trial: Trial) -> Checkpoint:
        """Prints a line after each epoch. Raises FloatingPointError if the loss is not finite."""
        config, recipe, settings, device = trial.config, trial.config.recipe, transform(trial.config.data), self.device
        training, _ = open_data(config.data)
        images, held_out = self.parts(config.data)
        torch.manual_seed(trial.seed)
        model = config.model.spec().build(len(training.classes)).to(device)
        if recipe.drop_path:
            model.set_drop_rates(drop_path_rate=recipe.drop_path)
        steps = -(-len(training) // recipe.batch_size)
        augment = None if recipe.augment == "none" else Augmentation(recipe.augment, settings, device)
        engine = Engine(model, recipe, steps, recipe.batch_size, config.engine, augment)
        history: list[Epoch] = []
        for number in range(recipe.epochs):
            running, began, sums_2 = RunningEpoch(number, engine.lr), time.perf_counter(), torch.zeros(2, device=device)
            engine.train()
            for images_NCHW, labels_N in training_batches(images, settings, recipe.batch_size):
                sums_2 += len(labels_N) * engine.train_step(images_NCHW, labels_N)
            running.loss, running.hits = sums_2.tolist()
            running.seconds = time.perf_counter() - began
            is_due = (number + 1) % recipe.validate_every_n_epochs == 0 or number + 1 == recipe.epochs
            scores = evaluate(engine.model, batches(held_out, settings), len(training.classes)) if is_due else None
            history.append(running.finished(len(training), scores))
            print(trial.name, history[-1], flush=True)
            if not math.isfinite(history[-1].train_loss + (scores.loss if scores else 0)):
                raise FloatingPointError(f"{trial.name}: the loss of epoch {number + 1} is not finite, so it is not recorded")
        origin = Origin(
            trial.grid, trial.profile, trial.row, trial.seed, trial.record, trial.data_digest, tuple(training.classes)
        )
        return Checkpoint(trial.key, origin, tuple(history), RunningEpoch(recipe.epochs, engine.lr), engine.state_dict())


def work(trials: Connection, folder: Path | None, measured: Sequence[str]) -> None:
    """A process: trains what it receives, and sends back the line for the file, with the given numbers of the protocols."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    trainer = Trainer(device)
    join_process_group(device)
    trials.send(None)
    while True:
        try:
            trial: Trial = trials.recv()
        except EOFError:  # there is nothing left to do
            return
        import_sources(trial.imports)
        began = time.perf_counter()
        with numerics(trial.config.engine, device):
            try:
                checkpoint, data = trainer.train(trial), trial.config.data
            except FloatingPointError as error:
                print(error, flush=True)
                trials.send(None)
                continue
            seconds, last = time.perf_counter() - began, checkpoint.history[-1]
            measures = robustness(checkpoint, trainer.parts(data)[1], transform(data)) if measured else {}
        if folder is not None:
            (folder / f"{trial.name}.pt").write_bytes(checkpoint.as_bytes())
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        metrics = last.top1, last.top5, last.val_loss, last.train_loss, last.images_per_second, *(measures[x] for x in measured)
        numbers = (f"{value:.6g}" for value in metrics if value is not None)
        line = [trial.key, f"{trial.grid}/{trial.name}", len(checkpoint.history), f"{seconds:.0f}", ended, *numbers]
        trials.send([*line, hardware, "GPU memory" if device.type == "cuda" else "memory", git_commit()])


def measured_by(options: argparse.Namespace) -> tuple[str, ...]:
    """The metrics of the protocols that are measured."""
    return ROBUSTNESS_METRICS if options.robustness else ()


def missing(grids: Sequence[str], options: argparse.Namespace) -> list[Trial]:
    """The trials that are not finished, those of rows with the fewest finished seeds first; one for each key."""
    finished = {key for path in options.known for key in ResultsFile(path, measured_by(options)).read()}
    found: dict[str, Trial] = {}
    seeds: Counter[tuple[str, str]] = Counter()
    for name in grids:
        path = grid_path(name)
        device = ("resources.gpus=1", "engine.cuda_graphs=true") if torch.cuda.is_available() else ()
        request = GridRequest(path, options.profile, overrides=(*device, *options.overrides))
        expanded = expand(request, table_names())
        digests: dict[object, str] = {}
        for row in expanded.grid.rows:
            if options.only and row.id not in options.only:
                continue
            config = expanded.configs[row.id]
            settings = [
                f"recipe.{key}" for key in LACKING if getattr(config.recipe, key) != RecipeConfig.model_fields[key].default
            ]
            if config.data.crop_padding is None or not config.data.flip or config.data.resize != config.data.size:
                settings.append("data without crop_padding and flip, or with another resize than size")
            if settings:
                raise UserError(f"{path}: row {row.id} has {', '.join(settings)}; train it with `san run`")
            if config.data not in digests:
                digests[config.data] = data_digest(config.data)
            of_row = range(options.seeds) if options.seeds else row.seeds or expanded.grid.seeds
            for seed in of_row:
                profile = profile_path(options.profile).stem
                trial = Trial(path.stem, profile, row.id, seed, config, digests[config.data], imports=expanded.imports)
                seeds[path.stem, row.id] += trial.key in finished
                found.setdefault(trial.key, trial)
    names = Counter(trial.name for trial in found.values())
    if options.checkpoints and (twice := [name for name, count in names.items() if count > 1]):
        raise UserError(f"--checkpoints: several grids have {', '.join(twice)}; give each grid a folder OUT of its own")
    if unknown := set(options.only or ()) - {row for _, row in seeds}:
        raise UserError(f"--only {', '.join(sorted(unknown))}: not a row of {', '.join(grids)}")
    rest = [trial for key, trial in found.items() if key not in finished]
    return sorted(rest, key=lambda trial: (seeds[trial.grid, trial.row], trial.seed))


def run(trials: list[Trial], options: argparse.Namespace) -> None:
    """Trains until all trials are finished or the budget is used, and appends each one to the file when it ends."""
    end, context = time.monotonic() + options.budget, get_context("spawn")
    longest, died = 0.0, 0
    began: dict[Connection, float] = {}
    file = options.known[-1]
    waiting = list(trials)
    with open(file, "a", encoding="utf-8", newline="") as output:
        writer = csv.writer(output, lineterminator="\n")
        if output.tell() == 0:
            writer.writerow((*CSV_COLUMNS, *measured_by(options), "hardware", "loader", "revision"))
            output.flush()
        folder = options.out if options.checkpoints else None
        ours: dict[Connection, object] = {}
        for _ in range(min(options.processes, len(trials))):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, folder, measured_by(options)), daemon=True)
            process.start()
            there.close()
            ours[here] = process
        while ours and time.monotonic() < end:
            for connection in wait(list(ours), timeout=max(0.0, end - time.monotonic())):
                assert isinstance(connection, Connection)
                try:
                    line = connection.recv()
                except EOFError:  # the process died and has printed why
                    died += 1
                    del ours[connection]
                    continue
                if line is not None:
                    longest = max(longest, time.monotonic() - began[connection])
                    writer.writerow(line)
                    output.flush()
                    print(f"{len(waiting)} waiting, {end - time.monotonic():.0f} s left:", *line, flush=True)
                if waiting and time.monotonic() + longest < end:
                    began[connection] = time.monotonic()
                    connection.send(waiting.pop(0))
                else:
                    del ours[connection]
                    connection.close()  # ends its process
    if died:
        raise SystemExit(f"{died} processes died; run the same command again to train what they had begun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, required=True, help="seconds")
    parser.add_argument("--profile", default="cifar10")
    parser.add_argument("--grid", action="append", required=True, help="name or file, several times")
    parser.add_argument("--only", action="append", metavar="ROW", help="several times; by default all rows")
    parser.add_argument("--seeds", type=int, help="by default those of the grid")
    parser.add_argument("--known", type=Path, action="append", default=[], help="CSV file of finished trials")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--robustness", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.known.append(options.out / ("trials-robustness.csv" if options.robustness else "trials.csv"))
    try:
        trials = missing(options.grid, options)
    except (UserError, DataError) as error:
        parser.exit(1, f"{error}\n")
    print(f"{len(trials)} trials are missing", flush=True)
    run(trials, options)


if __name__ == "__main__":
    main()
