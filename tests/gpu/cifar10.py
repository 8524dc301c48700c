"""Trains rows of the grid `pretrained` on a machine with a GPU that lacks DALI, Ray and MLflow.

    python -m tests.gpu.cifar10 OUT ROW [KEY=VALUE ...]

Model, recipe and engine are those of `san run experiments/grids/pretrained.yaml --profile cifar10-full KEY=VALUE ...`. Only the
loader differs: the images stay in the memory of the GPU, torch enlarges them, and torch's random numbers choose crops and
order. OUT/ROW.pt is a checkpoint that `san evaluate` reads; in the trial's folder of checkpoints, `make weights` reads it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from experiments.config.expand import expand
from experiments.config.grid import GridRequest, Trial
from experiments.paper.tables import table_names
from experiments.runs.summary import Epoch
from experiments.training.augment import Augmentation
from experiments.training.checkpoint import Checkpoint, Origin
from experiments.training.engine import Engine, join_process_group, numerics
from experiments.training.images import data_digest, open_data, transform
from experiments.training.metrics import Accuracy, RunningEpoch, Scores
from pipelines import Dataset, Transform

GRID, PROFILE, SEED = Path("experiments/grids/pretrained.yaml"), "cifar10-full", 0
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


@torch.no_grad()
def validate(engine: Engine, part: Part, settings: Transform, batch: int) -> Scores:
    engine.model.eval()
    accuracy = Accuracy(part[1].device)
    for images_NCHW, labels_N in zip(*(x.split(batch) for x in part), strict=True):
        accuracy.add(engine.model(normalized(images_NCHW, settings)), labels_N)
    return accuracy.over_workers()


def train(trial: Trial, device: torch.device) -> Checkpoint:
    """Trains with images in the GPU's memory; prints a line after each epoch."""
    config, recipe, settings = trial.config, trial.config.recipe, transform(trial.config.data)
    training, validation = open_data(config.data)
    images = load(training, settings.size, config.data.crop_padding or 0, device)
    held_out = load(validation, settings.size, 0, device)
    torch.manual_seed(trial.seed)
    model = config.model.spec().build(len(training.classes)).to(device)
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
        history.append(running.finished(len(training), validate(engine, held_out, settings, 500) if is_due else None))
        print(trial.row, history[-1], flush=True)
    origin = Origin(trial.grid, trial.profile, trial.row, trial.seed, trial.record, trial.data_digest, tuple(training.classes))
    return Checkpoint(trial.key, origin, tuple(history), RunningEpoch(recipe.epochs, engine.lr), engine.state_dict())


def main() -> None:
    out, row, *overrides = sys.argv[1:]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    expanded = expand(GridRequest(GRID, PROFILE, overrides=tuple(overrides)), table_names())
    config = expanded.configs[row]
    trial = Trial(GRID.stem, PROFILE, row, SEED, config, data_digest(config.data))
    join_process_group(device)
    with numerics(config.engine, device):
        Path(out, f"{row}.pt").write_bytes(train(trial, device).as_bytes())


if __name__ == "__main__":
    main()
