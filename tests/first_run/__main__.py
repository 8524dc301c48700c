"""What users see when they first run the project on a GPU, on machines that this one pretends to be.

    python -m tests.first_run [--write [docs/results/first-run.md]]

Each scene is a real command in its own processes, including Ray's workers. The only stubs are what torch, the driver and nvcc
report about themselves (`stubs/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.cluster.nodes import nodes

ROOT = Path(__file__).parent.parent.parent
STUBS = Path(__file__).parent / "stubs"
BEGIN, END = "<!-- first runs: written by `python -m tests.first_run --write` -->", "<!-- /first runs -->"

PAGE = ROOT / "docs" / "results" / "first-run.md"

RTX_4090 = {"gpus": 1, "capability": (8, 9), "memory": 24}
A100 = {"gpus": 8, "capability": (8, 0), "memory": 80}
H100 = {"gpus": 4, "capability": (9, 0), "memory": 80}
PYPI = {"torch": "2.13.0+cu130", "cuda": "13.0"}
"""The torch that `pip install torch` gives."""


@dataclass(frozen=True)
class Scene:
    """One user, one machine, one command, and the end that it must come to."""

    title: str
    machine: dict[str, Any]
    arguments: tuple[str, ...]
    expected: tuple[str, ...]
    """What must be among the words on the screen."""
    code: int
    driver: str | None = "580.65.06"
    nvcc: str | None = None
    """Its release; None where there is none."""
    cluster: tuple[tuple[int, int], ...] = ()
    """CPUs and GPUs of the nodes that it joins, as they tell Ray; without any it runs on one machine."""
    environment: dict[str, str] = field(default_factory=dict)


def imagenet(profile: str, *overrides: str) -> tuple[str, ...]:
    return ("run", "experiments/grids/footprint.yaml", "--profile", profile, "data.root=IMAGES", *overrides)


SCENES = {
    "driver": Scene(
        "RTX 4090 with a driver that is too old for PyTorch's CUDA version",
        RTX_4090 | PYPI | {"usable": False},
        imagenet("imagenet-1gpu", "placement.cpus=1"),
        ("needs driver 580 or newer, but the driver is 550.54.15", "--index-url https://download.pytorch.org/whl/cu126"),
        2,
        driver="550.54.15",
    ),
    "no driver": Scene(
        "RTX 4090 without a driver",
        {"gpus": 0, "capability": (8, 9), "memory": 24} | PYPI | {"usable": False},
        imagenet("imagenet-1gpu"),
        ("no NVIDIA driver is installed; install driver 580 or newer",),
        2,
        driver=None,
    ),
    "hidden": Scene(
        "RTX 4090 hidden by `CUDA_VISIBLE_DEVICES`",
        RTX_4090 | PYPI | {"usable": False},
        imagenet("imagenet-1gpu"),
        ("CUDA_VISIBLE_DEVICES='' selects no usable GPU",),
        2,
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "CPUs": Scene(
        "RTX 4090 in a machine with 2 CPUs",
        RTX_4090 | PYPI | {"usable": True},
        imagenet("imagenet-1gpu"),
        ("a cell needs 1 worker with 8 CPUs and 1 GPU", "To fit this cluster", "set `placement.cpus=2`"),
        2,
    ),
    "torch": Scene(
        "RTX 4090 with a PyTorch that was built without CUDA",
        RTX_4090 | {"torch": "2.13.0+cpu", "cuda": None, "usable": False},
        imagenet("imagenet-1gpu", "placement.cpus=1"),
        ("this torch (2.13.0+cpu) was built without CUDA; run `pip install torch==2.13.0",),
        2,
    ),
    "nvcc": Scene(
        "RTX 4090 without the CUDA toolkit",
        RTX_4090 | PYPI | {"usable": True},
        imagenet("imagenet-1gpu", "placement.cpus=1"),
        ("nvcc was not found; install the CUDA toolkit 12 or newer", "engine.reference_operators=true"),
        2,
    ),
    "one GPU": Scene(
        "One RTX 4090, but the paper's profile is for 8 GPUs",
        RTX_4090 | PYPI | {"usable": True},
        imagenet("imagenet"),
        ("a cell needs 8 workers with 8 CPUs and 1 GPU each", "`placement.workers=1 recipe.grad_accum_steps=8 placement.cpus="),
        2,
    ),
    "old nvcc": Scene(
        "Eight A100 GPUs with CUDA toolkit 11.8",
        A100 | PYPI | {"usable": True},
        imagenet("imagenet", "placement.cpus=1", "placement.workers=2"),
        ("nvcc 11.8 at ", " is too old; install the CUDA toolkit 12 or newer"),
        2,
        nvcc="11.8",
    ),
    "old GPU": Scene(
        "Tesla T4, which the CUDA kernels do not support",
        PYPI | {"usable": True, "gpus": 1, "capability": (7, 5), "memory": 16},
        imagenet("imagenet-1gpu", "placement.cpus=1"),
        ("this GPU has compute capability 7.5, but the kernels need 8.0 or higher",),
        2,
    ),
    "cluster": Scene(
        "H100 cluster (two simulated nodes) with a driver that is too old for PyTorch's CUDA version",
        H100 | PYPI | {"usable": False},
        imagenet("imagenet", "placement.cpus=1", "placement.workers=2"),
        ("FAILED after", "needs driver 580 or newer, but the driver is 550.54.15"),
        2,
        driver="550.54.15",
        cluster=((1, 1), (1, 1)),
    ),
    "plan": Scene(
        "Cluster of four nodes with eight H100 GPUs each: the plan before any run has finished (as many "
        "synthetic images as ImageNet has)",
        H100 | PYPI | {"usable": True},
        ("plan", *imagenet("imagenet", "data.source=synthetic", "data.synthetic_per_class=1281")[1:]),
        ("4 cells at a time, 8 workers with 8 CPUs and 1 GPU each", "rough guess from model FLOPs"),
        0,
        cluster=((64, 8),) * 4,
    ),
}


def play(scene: Scene, folder: Path) -> tuple[int, str]:
    """Runs the scene's command; returns its exit code and what it printed."""
    images, programs = folder / "images", folder / "bin"
    _write_images(images)
    programs.mkdir()
    if scene.driver is not None:
        _write_program(programs / "nvidia-smi", scene.driver)
    if scene.nvcc is not None:
        _write_program(programs / "nvcc", f"Cuda compilation tools, release {scene.nvcc}, V{scene.nvcc}.89")
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "CUDA_HOME", "SAN_CUDA")}
    environment |= {
        "PATH": f"{programs}:{environment['PATH']}",
        "PYTHONPATH": f"{STUBS}:{ROOT}",
        "SAN_STUB": json.dumps(scene.machine | {"nvcc": str(programs)}),
        "SAN_RUNS": str(folder / "runs"),
    } | scene.environment
    arguments = [argument.replace("IMAGES", str(images)) for argument in scene.arguments]
    if not scene.cluster:
        return _run(arguments, environment)
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with nodes(head_cpus=1) as several:
            for cpus, gpus in scene.cluster:
                several.cluster.add_node(num_cpus=cpus, num_gpus=gpus)
            return _run([*arguments, "--address", several.address], environment)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "experiments", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr + done.stdout


def _write_images(root: Path) -> None:
    """Writes a folder like ImageNet's with two classes; val-split holds out 50 images of each."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    for split in ("train", "val"):
        for label in ("n01440764", "n01443537"):
            (root / split / label).mkdir(parents=True)
            Image.fromarray(pixels).save(root / split / label / "0.jpg")
            for number in range(1, 200):
                (root / split / label / f"{number}.jpg").hardlink_to(root / split / label / "0.jpg")


def _write_program(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


def shown(scene: Scene, code: int, output: str, folder: Path) -> str:
    """The scene as a section of a page; only what is the same on every machine."""
    text = output.replace(str(folder), "/home/me").replace(os.uname().nodename, "gpu-node").replace(str(ROOT), "/home/me/san")
    command = " ".join(("san", *scene.arguments)).replace("IMAGES", "/data/imagenet")
    text = re.sub(r"^W\d+ .*triton.*\n", "", text, flags=re.MULTILINE)  # only by a torch without CUDA
    text = re.sub(r"^san: (building the|built in) .*\n", "", text, flags=re.MULTILINE)  # only the first time on a machine
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 110, break_on_hyphens=False)]
    screen = "\n".join([f"$ {command}", *lines, f"(exit code {code})"])
    return f"**{scene.title}**\n\n```\n{screen}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, nargs="?", const=PAGE, help="update the marked part of this page")
    page: Path | None = parser.parse_args().write
    sections = []
    for scene in SCENES.values():
        with tempfile.TemporaryDirectory() as name:
            sections.append(shown(scene, *play(scene, Path(name)), Path(name)))
            print(sections[-1])
    if page is not None:
        head, rest = page.read_text().split(BEGIN)
        page.write_text(f"{head}{BEGIN}\n\n" + "\n".join(sections) + f"\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
