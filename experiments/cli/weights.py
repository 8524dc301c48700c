"""`make weights`: writes the trained networks of the grid `pretrained` to san/weights, with their measured accuracy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from experiments.cli.options import OVERRIDES, RUNS
from experiments.config.config import GRIDS_DIR
from experiments.config.grid import GridRequest
from experiments.evaluation.evaluate import Evaluation, LoadedModel, evaluate_checkpoint, open_checkpoint, open_images
from experiments.runner.grid_run import open_grid_run
from experiments.runner.progress import counting
from experiments.training.checkpoint import last_of
from experiments.training.images import open_data
from pipelines import Dataset
from san.models import pretrained

GRID, PROFILE = GRIDS_DIR / "pretrained.yaml", "cifar10-full"
USAGE = """```python
import san

model = san.create_model("{name}", pretrained=True)  # in evaluation mode
model.pretrained_cfg  # size, mean and std of the images, names of the classes
```

- Check the accuracy: `san evaluate {name}`, with the same images in `data/cifar10`. On another processor, the last
  digits can differ; with other files of CIFAR-10, such as PNG files of the official arrays, the accuracy can differ slightly.
- Train it again: `{command}` (key {key})."""


@click.command()
@OVERRIDES
@RUNS
def main(overrides: tuple[str, ...], runs: str | None) -> None:
    """Writes a folder for each trained row of the grid. Give the overrides with which the rows were trained."""
    grid_run = open_grid_run(GridRequest(GRID, PROFILE, overrides, runs))
    for trial in grid_run.trials:
        command = GridRequest(GRID, PROFILE, overrides, only=(trial.row,)).command
        # The last epoch, because choosing the best one would use the test images.
        file = last_of(grid_run.workspace.checkpoints(trial), trial.config.recipe.epochs)
        if not file.exists():
            click.echo(f"{trial.row}: not trained yet; run `{command}`", err=True)
            continue
        opened = open_checkpoint(file)
        train, val = open_data(trial.config.data)[0], open_images(opened)
        with counting(trial.row, -(-len(val) // opened.batch), "batches") as count:
            evaluation = evaluate_checkpoint(opened, val, count)
        name = f"{trial.row}_cifar10"
        save(name, opened, evaluation, train, USAGE.format(name=name, command=command, key=trial.key))
        click.echo(f"{name}: top-1 {evaluation.top1:.4f} %  loss {evaluation.loss:.6f}")


def save(name: str, opened: LoadedModel, evaluation: Evaluation, train: Dataset, usage: str) -> None:
    """Writes the folder of a network whose accuracy was measured."""
    data = opened.config.data
    facts: dict[str, Any] = {
        "profile": PROFILE,
        "data_digest": opened.data_digest,
        "evaluation": {field: asdict(evaluation)[field] for field in ("images", "top1", "top5", "loss")},
    }
    suffix = Path(train.paths[0]).suffix.removeprefix(".").upper().replace("JPG", "JPEG")
    trained_on = f"{len(train):,} training images of CIFAR-10 as {suffix} files, resized to {data.size}x{data.size} pixels"
    measured = f"top-1 {evaluation.top1:.4f} %, top-5 {evaluation.top5:.4f} %, loss {evaluation.loss:.6f}"
    accuracy = f"{measured} on the {evaluation.images:,} test images, after {opened.epoch} epochs"
    pretrained.save_folder(
        opened.model,
        pretrained.WEIGHTS_DIR / name,
        data=trained_on,
        accuracy=accuracy,
        license="mit",
        usage=usage,
        facts=facts,
    )


if __name__ == "__main__":
    main()
