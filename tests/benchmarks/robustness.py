"""Measures the overhead of an attack over its n + 1 forward and n backward passes.

    python -m tests.benchmarks.robustness [--setting digits] [--attack n2] [--rounds 15]

`passes` runs only the passes of the network on normalized batches in memory. `attack` is this project's attack on batches of
pixels in memory, and `foolbox` the one of that library if it is installed. They take turns. Overheads compare times of the same
round: median (range).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import san
from experiments.evaluation.attack import Attack, OnPixels, predictions, targets
from experiments.evaluation.evaluate import LoadedModel, evaluation_loader, open_checkpoint, open_images
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.transform import transform

SYNTHETIC = ("data.source=synthetic", "data.synthetic_classes=16", "data.synthetic_per_class=4", "resources.cpus=2")
SETTINGS: dict[str, tuple[str, str, tuple[str, ...], str, int]] = {
    "digits": ("san10_pairwise", "digits", (), "train", 64),
    "digits, resnet": ("resnet26", "digits", (), "train", 64),
    "san10 pairwise": ("san10_pairwise", "imagenet", SYNTHETIC, "val", 16),
    "san10 patchwise": ("san10_patchwise", "imagenet", SYNTHETIC, "val", 16),
}
"""Variant, profile, overrides, split and batch size. The larger split of digits is the training split."""
COLUMNS = ("attack", "foolbox")
ATTACKS = {c.name: c.measure for c in PROTOCOLS["attack"].conditions if isinstance(c.measure, Attack)}


def untrained(setting: str) -> tuple[LoadedModel, int]:
    variant, profile, overrides, _, batch = SETTINGS[setting]
    is_small = profile == "digits"
    fields = {"num_stages": 2, "width_mult": 0.5} if is_small else {}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        san.save_checkpoint(san.create_model(variant, num_classes=10 if is_small else 16, **fields), path)
        opened = open_checkpoint(path, overrides, profile)
    opened.model.eval().requires_grad_(False)
    return opened, batch


def passes(opened: LoadedModel, batches: list[Tensor], steps: int) -> None:
    for images in batches:
        for _ in range(steps):
            x = images.detach().requires_grad_()
            logits = opened.model(x)
            torch.autograd.grad(logits, x, torch.ones_like(logits))
        with torch.no_grad():
            opened.model(images)


def ours(opened: LoadedModel, attack: Attack, batches: list[Tensor], wanted: list[Tensor]) -> Callable[[], None]:
    network = OnPixels(opened.model, transform(opened.config.data)).eval().to(batches[0].device)

    def run() -> None:
        for pixels, classes in zip(batches, wanted, strict=True):
            (predictions(network, attack.attacked(network, pixels, classes)) == classes).sum()

    return run


def by_foolbox(opened: LoadedModel, attack: Attack, batches: list[Tensor], wanted: list[Tensor]) -> Callable[[], None]:
    import foolbox

    how = transform(opened.config.data)
    bounds = {"bounds": (0, 1), "device": str(batches[0].device)}
    network = foolbox.PyTorchModel(opened.model, preprocessing={"mean": how.mean, "std": how.std, "axis": -3}, **bounds)
    steps = foolbox.attacks.LinfPGD(abs_stepsize=attack.step / 255, steps=attack.steps, random_start=False)

    def run() -> None:
        for pixels, classes in zip(batches, wanted, strict=True):
            goal = foolbox.criteria.TargetedMisclassification(classes)
            goal(pixels, network(steps.run(network, pixels, goal, epsilon=attack.epsilon / 255)))

    return run


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def overhead(rounds: list[dict[str, float]], what: str) -> str:
    percent = [100 * (times[what] / times["passes"] - 1) for times in rounds]
    return f"{statistics.median(percent):+.1f} ({min(percent):+.1f} to {max(percent):+.1f})"


def line(setting: str, name: str, rounds: int) -> str:
    (opened, batch), attack = untrained(setting), ATTACKS[name]
    images = open_images(opened, SETTINGS[setting][3])
    loaded = list(evaluation_loader(opened, images, transform(opened.config.data), batch).epoch(0))
    normalized = [images_NCHW for images_NCHW, _ in loaded]
    pixels = [x.clamp(0, 1) for x in normalized]
    wanted = [targets(y.cpu().numpy(), len(images.classes), 0).to(y.device) for _, y in loaded]
    contenders: dict[str, Callable[[], object]] = {
        "passes": lambda: passes(opened, normalized, attack.steps),
        "attack": ours(opened, attack, pixels, wanted),
    }
    if importlib.util.find_spec("foolbox"):
        contenders["foolbox"] = by_foolbox(opened, attack, pixels, wanted)
    for run in contenders.values():
        run()
    names, found = list(contenders), []
    for first in range(rounds):  # each contender is first in turn
        order = names[first % len(names) :] + names[: first % len(names)]
        found.append({what: timed(contenders[what]) for what in order})
    passing = 1000 * statistics.median(times["passes"] for times in found) / len(images)
    overheads = [overhead(found, what) if what in contenders else "-" for what in COLUMNS]
    return " | ".join([f"| {setting}", name, str(rounds), f"{passing:.3g}", *overheads]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    parser.add_argument("--attack", action="append", choices=list(ATTACKS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}; overheads in %: median (range)\n")
    columns = ("setting", "condition", "rounds", "passes, ms per image", *COLUMNS)
    print(f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}", sep="\n")
    for setting in options.setting or SETTINGS:
        for name in options.attack or ATTACKS:
            print(line(setting, name, options.rounds), flush=True)


if __name__ == "__main__":
    main()
