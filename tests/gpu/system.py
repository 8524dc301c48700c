"""Runs the whole system on a GPU: `san` commands as users type them, on photographs and on small images.

    python -m tests.gpu --out DIR --budget 400 --case system/ --report [--photographs FOLDER] [--cifar10 FOLDER]

Trials run in sweeps of Ray Tune with DALI, DeepSpeed and MLflow, or with `--serial` where only the training matters.
Each row is one observation; memory and utilization of the GPU are those that nvidia-smi shows for all processes together.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.loader import photographs

ROOT = Path(__file__).resolve().parents[2]
GRIDS = ROOT / "experiments" / "grids"


@dataclass
class Command:
    """A running `san` command. Its output goes to the log of the case, too."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.log = tempfile.NamedTemporaryFile(suffix=".txt")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments", *self.arguments],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    @property
    def said(self) -> str:
        return Path(self.log.name).read_text(encoding="utf-8", errors="replace")

    @property
    def last(self) -> str:
        """The end of the output, for the message of a failed check."""
        return self.said[-600:]

    def wait(self) -> Command:
        """Waits for the end. If the case reaches its limit, its commands are killed, too."""
        self.code, self.seconds = self.process.wait(), round(time.perf_counter() - self.began, 1)
        print(f"$ san {' '.join(self.arguments)}\n{self.said}exit code {self.code}", flush=True)
        return self

    def wait_until(self, happened: Callable[[], object]) -> bool:
        """Whether it happened before the command ended."""
        while not happened():
            if self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True


def san(*arguments: str, **environment: str) -> Command:
    return Command(arguments, environment).wait()


@contextmanager
def metered(settings: Settings, row: Row) -> Iterator[None]:
    """Adds the GPU's largest memory and mean utilization during the block to a row."""
    if not settings.on_gpu:
        yield
        return
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.terminate()
        output, _ = process.communicate()
        samples = [tuple(map(float, pair)) for pair in re.findall(r"^(\d+), (\d+)$", output, re.MULTILINE)]
        if samples:
            memory, busy = zip(*samples, strict=True)
            row["gpu_memory_MiB"] = {"before": memory[0], "most": max(memory)}
            row["gpu_busy_percent"] = round(statistics.mean(busy))


def overrides(settings: Settings, gpus: float, cpus: int) -> list[str]:
    """A profile of small images, and resources of a trial. On a CPU, two short epochs of the digits."""
    if settings.small:
        return ["--profile", "digits", "resources.cpus=1", "data.train_per_class=16", "data.val_per_class=10"]
    data = ["--profile", "digits"]
    if settings.cifar10:
        data = ["--profile", "cifar10", f"data.root={settings.cifar10}", "data.train_per_class=null"]
    return [*data, f"resources.gpus={gpus:g}", f"resources.cpus={cpus}", "recipe.validate_every_n_epochs=1"]


def epochs(runs: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of `summary.csv` by key of the trial."""
    found = {}
    for path in sorted(runs.glob("checkpoints/*/summary.csv")):
        with open(path, newline="") as file:
            found[path.parent.name] = list(csv.DictReader(file))
    return found


def listed(runs: Path) -> dict[str, str]:
    """Row by key of the trial, from `san runs`."""
    done = san("runs", "--json", "--runs", str(runs))
    rows: list[dict[str, Any]] = json.loads(done.said[done.said.index("[") :])
    return {row["key"]: row["name"] for row in rows}


def trained(runs: Path) -> Iterator[Row]:
    """Accuracy and speed of each trial in its last epoch."""
    names = listed(runs)
    for key, history in epochs(runs).items():
        last = history[-1]
        numbers = {name: round(float(last[name]), 3) for name in ("train_loss", "top1", "images_per_second", "wait_share")}
        yield {"trial": names.get(key, key), "epochs": len(history), **numbers}


def doctor(settings: Settings) -> Iterator[Row]:
    done = san("doctor")
    passed = done.code == 0 and ("cuda kernels run from" in done.said or not settings.on_gpu)
    yield {"what": "san doctor", "said": done.said.splitlines(), "seconds": done.seconds, "passed": passed}


def decoding(settings: Settings) -> Iterator[Row]:
    """Compares pixels of the loader on the GPU and on the CPU, in levels from 0 to 255."""
    from pipelines import Dataset, Loader, Transform

    folders = {"photographs": (photographs(settings), Transform())}
    if settings.cifar10:
        folders["CIFAR-10"] = Path(settings.cifar10), Transform(size=48, resize=48, crop_padding=6)
    for name, (root, transform) in folders.items():
        for train in (False, True):
            dataset = Dataset.scan(root, "train")
            devices = torch.device("cpu"), torch.device(settings.device)
            loaders = [Loader(dataset, transform, train=train, batch_size=64, threads=4, device=device) for device in devices]
            std_311 = 255 * torch.tensor(transform.std).view(3, 1, 1)
            differences = []
            for here, there in itertools.islice(zip(*(loader.epoch(0) for loader in loaders), strict=True), 4):
                assert torch.equal(here.labels_N, there.labels_N.cpu())
                differences.append(((here.images_NCHW - there.images_NCHW.cpu()).abs() * std_311).flatten())
            all_pixels = torch.cat(differences)
            mean, most = all_pixels.mean().item(), all_pixels.max().item()
            over = {f"over_{limit}": round((all_pixels > limit).double().mean().item(), 6) for limit in (2, 8, 32)}
            what = f"GPU against CPU decoding, {name}, {'training' if train else 'validation'}"
            yield {"what": what, "mean": round(mean, 3), "most": round(most, 1), "share": over, "passed": mean < 1.5}


def four_trials(settings: Settings) -> Iterator[Row]:
    """A grid with four trials at once on one GPU, and what MLflow records of the GPU."""
    runs = Path(settings.work, "four")
    names = ("pairwise_7", "resnet26_3", "pairwise_3", "patchwise_7")
    rows = [f"--only={name}" for name in (names[:2] if settings.small else names)]
    speed = ["--serial"] if settings.small else ["engine.cuda_graphs=true"]
    row: Row = {"what": f"san run, {'two trials' if settings.small else 'four trials at once'}"}
    with metered(settings, row):
        grid = str(GRIDS / "footprint.yaml")
        every = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "1"}
        keys = [*overrides(settings, 0.25, 4), f"recipe.epochs={2 if settings.small else 6}", *speed]
        done = Command(["run", grid, *keys, *rows, "--runs", str(runs)], every).wait()
    yield row | {"seconds": done.seconds, "passed": done.code == 0, **({} if done.code == 0 else {"said": done.last})}
    if done.code == 0:
        yield from trained(runs)
        yield from gpu_metrics(settings, runs)


def gpu_metrics(settings: Settings, runs: Path) -> Iterator[Row]:
    """The GPU metrics of the runs in MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{runs}/mlflow.db")
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    metrics = {key: value for run in found for key, value in run.data.metrics.items() if key.startswith("system/gpu")}
    yield {"what": "GPU metrics in MLflow", **metrics, "passed": bool(metrics) or not settings.on_gpu}


def weights(runs: Path) -> dict[str, torch.Tensor]:
    """All weights after the last epoch of the only trial."""
    (last,) = {path.parent for path in runs.glob("checkpoints/*/epoch-*.pt")}
    state = torch.load(max(last.glob("epoch-*-step-0000000.pt")), map_location="cpu", weights_only=True)
    model: dict[str, torch.Tensor] = state["engine"]["model"]
    return model


def differing(first: Path, second: Path) -> float:
    """The largest difference of two trained networks, relative to the largest weight; 0 if all bits are equal."""
    a, b = (torch.cat([x.double().flatten() for x in weights(runs).values()]) for runs in (first, second))
    return ((a - b).abs().max() / a.abs().max()).item()


def repeated(settings: Settings) -> Iterator[Row]:
    """The same trial several times: alone, killed and interrupted, with and without `engine.deterministic`."""
    speed = [] if settings.small else ["engine.cuda_graphs=true"]
    count = 3 if settings.small else 16
    grid = [str(GRIDS / "footprint.yaml"), *overrides(settings, 0.2, 3), "--only=pairwise_7", f"recipe.epochs={count}", *speed]
    grid.append("checkpointing.checkpoint_every_n_minutes=0.01")
    kinds = {
        "deterministic": ["--serial", "engine.deterministic=true"],
        "deterministic again": ["--serial", "engine.deterministic=true"],
        "default": ["--serial"],
        "default again": ["--serial"],
    }
    folders = {name: Path(settings.work, name.replace(" ", "-")) for name in (*kinds, "interrupted")}
    running = {name: Command(["run", *grid, *kind, "--runs", str(folders[name])]) for name, kind in kinds.items()}
    yield from interrupted([*grid, "engine.deterministic=true"], folders["interrupted"])
    done = {name: command.wait() for name, command in running.items()}
    for name, each in done.items():
        if each.code:
            yield {"what": name, "said": each.last, "passed": False}
    pairs = ("deterministic", "deterministic again"), ("default", "default again"), ("deterministic", "interrupted")
    for first, second in pairs:
        try:
            difference = differing(folders[first], folders[second])
        except (OSError, ValueError) as error:
            yield {"what": f"{first} = {second}", "said": str(error), "passed": False}
            continue
        row: Row = {"what": f"{first} = {second}", "relative_difference": difference}
        yield row if first == "default" else row | {"passed": difference == 0}


def interrupted(grid: Sequence[str], runs: Path) -> Iterator[Row]:
    """Kills the process of a trial, then interrupts the grid with Ctrl-C, then continues it."""

    def steps() -> int:
        return max(
            (int(path.stem[6:10]) * 10_000 + int(path.stem[-7:]) for path in runs.glob("checkpoints/*/e*.pt")), default=0
        )

    command = Command(["run", *grid, "--runs", str(runs)])
    command.wait_until(lambda: steps() % 10_000)
    killed = kill_trial(command.process.pid)
    after = steps()
    resumed = command.wait_until(lambda: steps() > after)
    said = command.said
    yield {"what": "a killed trial resumes", "killed": killed, "passed": bool(killed and resumed and re.search("retr", said))}
    command.process.send_signal(signal.SIGINT)
    done = command.wait()
    yield {"what": "Ctrl-C", "exit_code": done.code, "said": done.last, "passed": done.code == 1 and "interrupted" in done.last}
    done = san("run", *grid, "--runs", str(runs))
    yield {"what": "continued", "seconds": done.seconds, "passed": done.code == 0, "said": done.last if done.code else ""}


def kill_trial(driver: int) -> int:
    """Kills the process in which a trial of this `san run` trains; returns its number, or 0 if there is none."""
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process(driver).children(recursive=True):
            with suppress(psutil.Error):
                if "ray::ImplicitFunc" in " ".join(child.cmdline()):
                    child.kill()
                    return int(child.pid)
    return 0


def imagenet(profile: str, settings: Settings) -> Iterator[Row]:
    """Two epochs of photographs; speed, waiting and memory in the second."""
    root = photographs(settings)
    fewer = ["recipe.epochs=2", "data.val_split_per_class=null", f"data.root={root}", "resources.workers=1"]
    fewer += [
        "recipe.grad_accum_steps=8",
        "recipe.warmup_epochs=1",
        "recipe.lr=0.001",
        f"resources.cpus={min(len(os.sched_getaffinity(0)), 16)}",
    ]
    if settings.small:
        fewer += ["resources.gpus=0", "model.num_stages=2", "model.width_mult=0.5", "recipe.batch_size=16", "data.size=64"]
        fewer += ["recipe.precision=float32"]
    else:
        fewer += ["engine.cuda_graphs=true"]
    for name in ("san10_pairwise", "san10_patchwise", "resnet26"):
        runs = Path(settings.work, f"{profile}-{name}")
        grid = str(GRIDS / "comparison.yaml")
        row: Row = {"what": f"{profile}, {name}"}
        with metered(settings, row):
            done = san("run", grid, "--profile", profile, "--serial", f"--only={name}", *fewer, "--runs", str(runs))
        if done.code:
            yield row | {"said": done.last, "passed": False}
            continue
        ((*_, last),) = epochs(runs).values()
        numbers = {key: round(float(last[key]), 3) for key in ("images_per_second", "wait_share", "train_loss")}
        yield row | {"seconds": done.seconds, **numbers, "passed": True}


def two_grids(settings: Settings) -> Iterator[Row]:
    """Two `san run` at once on one GPU and in one folder of runs, in TF32 and bfloat16."""
    runs = Path(settings.work, "two")
    rows = "--only=pairwise_7", "--only=patchwise_7"
    speed = [] if settings.small else ["engine.cuda_graphs=true"]
    keys = [str(GRIDS / "footprint.yaml"), *overrides(settings, 0.5, 4), *rows, *speed, "--runs", str(runs)]
    keys.append(f"recipe.epochs={2 if settings.small else 6}")
    row: Row = {"what": "two san run at once"}
    with metered(settings, row):
        running = [Command(["run", *keys, f"recipe.precision={precision}"]) for precision in ("float32", "bfloat16")]
        done = [command.wait() for command in running]
    row["seconds"], row["passed"] = [each.seconds for each in done], not any(each.code for each in done)
    yield row if row["passed"] else row | {"said": [each.last for each in done]}
    yield from trained(runs)


def commands(settings: Settings) -> Iterator[Row]:
    """Other commands with a trained network, and messages about what a GPU cannot do."""
    runs = Path(settings.work, "four")
    if not epochs(runs):
        raise SkipCase("needs the runs of system/four trials at once")
    key = next(key for key, name in listed(runs).items() if name == "pairwise_7")
    top1 = max(float(epoch["top1"]) for epoch in epochs(runs)[key])
    at = ["--runs", str(runs)]
    done = san("evaluate", key, "--json", *at)
    again = json.loads(done.said[done.said.index("{") :])["top1"] if done.code == 0 else float("nan")
    yield {"what": "san evaluate", "top1": again, "in_training": top1, "passed": abs(again - top1) < 0.11}
    done = san("robustness", key, "--json", *at)
    yield {"what": "san robustness", "seconds": done.seconds, "said": done.last, "passed": done.code == 0}
    some = next(photographs(settings).glob("val/*"))
    done = san("predict", "san10_patchwise_cifar10", str(some))
    yield {"what": "san predict", "seconds": done.seconds, "said": done.last[-200:], "passed": done.code == 0}
    serial = ["run", str(GRIDS / "footprint.yaml"), "--serial", "--only=pairwise_7", "--runs", str(Path(settings.work, "bad"))]
    if settings.on_gpu:
        too_large = [
            "--profile",
            "imagenet-1gpu",
            "data.source=synthetic",
            "data.synthetic_classes=10",
            "recipe.batch_size=2000",
        ]
        too_large += ["data.synthetic_per_class=200", "recipe.grad_accum_steps=1"]
        done = san(*serial, *too_large)
        yield {"what": "out of memory", "said": done.last, "passed": done.code == 1 and "out of GPU memory" in done.said}
        done = san(*serial, *overrides(settings, 1, 4), CUDA_VISIBLE_DEVICES="")
        yield {"what": "no GPU", "said": done.last, "passed": done.code == 1 and "Traceback" not in done.said}
    broken = Path(settings.work, "broken")
    if not broken.exists():
        shutil.copytree(photographs(settings), broken)
    victim = sorted(broken.glob("train/*/*"))[7]
    victim.write_bytes(victim.read_bytes()[:2000])
    folder = ["--profile", "folder", f"data.root={broken}", "recipe.epochs=1", "recipe.batch_size=32"]
    folder += [] if settings.small else ["resources.gpus=1", "resources.cpus=4"]
    done = san(*serial, *folder)
    yield {"what": "a broken image", "said": done.last, "passed": done.code == 1 and victim.name in done.said}


def with_packages(case: Callable[[Settings], Iterator[Row]], settings: Settings) -> Iterator[Row]:
    """The rows of a case; skips it where the commands of a case would fail."""
    for package in ("pydantic", "ray", "nvidia.dali", "deepspeed", "mlflow"):
        if find_spec(package) is None:
            raise SkipCase(f"needs the package {package}")
    yield from case(settings)


ALL = [
    Case("system", "doctor", partial(with_packages, doctor), 50, 60),
    Case("system", "four trials at once", partial(with_packages, four_trials), 51, 200),
    Case("system", "decoding", partial(with_packages, decoding), 52, 60),
    Case("system", "killed, interrupted, repeated", partial(with_packages, repeated), 53, 240),
    Case("system", "imagenet-1gpu", partial(with_packages, partial(imagenet, "imagenet-1gpu")), 54, 200),
    Case("system", "imagenet-fast", partial(with_packages, partial(imagenet, "imagenet-fast")), 55, 200),
    Case("system", "two grids at once", partial(with_packages, two_grids), 56, 120),
    Case("system", "other commands", partial(with_packages, commands), 57, 200),
]
