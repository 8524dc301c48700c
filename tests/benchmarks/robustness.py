"""Measures the overhead of an attack over its n + 1 forward and n backward passes.

    python -m tests.benchmarks.robustness

`passes` runs only the passes of the network on normalized batches in memory. `attack` is this project's attack on batches of
pixels in memory, and `foolbox` the one of that library. They take turns. Overheads compare times of the same round: median
(range).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import foolbox
import torch
from torch import Tensor

import san
from experiments.evaluation.attack import Attack, OnPixels, predictions, targets
from experiments.evaluation.evaluate import LoadedModel, evaluation_loader, open_checkpoint, open_images
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.transform import transform

SYNTHETIC = ("data.source=synthetic", "data.synthetic_classes=16", "data.synthetic_per_class=4", "resources.cpus=2")
SETTINGS: dict[str, tuple[str, tuple[str, ...], str, int]] = {
    "digits": ("digits", (), "train", 64),
    "224x224": ("imagenet", SYNTHETIC, "val", 16),
}
"""Profile, overrides, split and batch size. The larger split of digits is the training split."""
ROUNDS = 15
COLUMNS = ("attack", "foolbox")
ATTACKS = {c.name: c.measure for c in PROTOCOLS["attack"].conditions if isinstance(c.measure, Attack)}


def untrained(setting: str) -> tuple[LoadedModel, int]:
    profile, overrides, _, batch = SETTINGS[setting]
    is_small = profile == "digits"
    fields = {"num_stages": 2, "width_mult": 0.5} if is_small else {}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        san.save_checkpoint(san.create_model("san10_pairwise", num_classes=10 if is_small else 16, **fields), path)
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


def line(setting: str, name: str) -> str:
    (opened, batch), attack = untrained(setting), ATTACKS[name]
    images = open_images(opened, SETTINGS[setting][2])
    loaded = list(evaluation_loader(opened, images, transform(opened.config.data), batch).epoch(0))
    normalized = [images_NCHW for images_NCHW, _ in loaded]
    pixels = [x.clamp(0, 1) for x in normalized]
    wanted = [targets(y.cpu().numpy(), len(images.classes), 0).to(y.device) for _, y in loaded]
    contenders: dict[str, Callable[[], object]] = {
        "passes": lambda: passes(opened, normalized, attack.steps),
        "attack": ours(opened, attack, pixels, wanted),
        "foolbox": by_foolbox(opened, attack, pixels, wanted),
    }
    for run in contenders.values():
        run()
    names, found = list(contenders), []
    for first in range(ROUNDS):  # each contender is first in turn
        order = names[first % len(names) :] + names[: first % len(names)]
        found.append({what: timed(contenders[what]) for what in order})
    passing = 1000 * statistics.median(times["passes"] for times in found) / len(images)
    overheads = [overhead(found, what) for what in COLUMNS]
    return " | ".join([f"| {setting}", name, f"{passing:.3g}", *overheads]) + " |"


def main() -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}; overheads in %: median (range)\n")
    columns = ("setting", "condition", "passes, ms per image", *COLUMNS)
    print(f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}", sep="\n")
    for setting in SETTINGS:
        for name in ATTACKS:
            print(line(setting, name), flush=True)


if __name__ == "__main__":
    main()
