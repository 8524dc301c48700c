import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.config.config import PROJECT_DIR
from experiments.training.checkpoint import Checkpoint


@pytest.mark.slow
def test_weights_for_the_package_are_a_checkpoint(tmp_path: Path) -> None:
    """On a CPU, with few images in few steps."""
    rng = np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "val"), "abcdef", range(2)):
        file = tmp_path / split / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(file)
    keys = [f"data.root={tmp_path}", "recipe.epochs=2", "recipe.warmup_epochs=1", "recipe.batch_size=6", "model.width_mult=0.5"]
    command = [sys.executable, "-m", "tests.gpu.cifar10", str(tmp_path), "resnet26", *keys]
    subprocess.run(command, cwd=PROJECT_DIR, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    found = Checkpoint.read(tmp_path / "resnet26.pt")
    assert found.model().num_classes == 6 and found.name == "epoch-0002-step-0000000.pt"
    assert [epoch.top1 is not None for epoch in found.history] == [False, True]
