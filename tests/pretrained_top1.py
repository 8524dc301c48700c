"""Top-1 of the pretrained networks on a few images, with nothing but the installed library, NumPy and Pillow.

    PYTHON tests/pretrained_top1.py data/cifar10/val [IMAGES_PER_CLASS]

To try a wheel, use a Python in whose environment it is installed; see "Publish a release" in CONTRIBUTING.md.
"""

import platform
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import san


def read(path: Path, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """A normalized image, [3, size, size]."""
    with Image.open(path) as image:
        pixels_HW3 = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR), np.float32) / 255
    return torch.from_numpy((pixels_HW3 - np.float32(mean)) / np.float32(std)).permute(2, 0, 1)


def main(folder: Path, per_class: int = 20) -> None:
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {san.__file__}")
    files = [(label, file) for label in sorted(folder.iterdir()) for file in sorted(label.iterdir())[:per_class]]
    for name in ("resnet26", "san10_scalar", "san10_pairwise", "san10_patchwise"):
        model = san.create_model(f"{name}_cifar10", pretrained=True)
        config = model.pretrained_cfg
        images = [read(file, config["input_size"][-1], config["mean"], config["std"]) for _, file in files]
        with torch.inference_mode():
            predicted = model(torch.stack(images)).argmax(1).tolist()
        right = sum(config["label_names"][index] == label.name for index, (label, _) in zip(predicted, files, strict=True))
        print(f"{name}: {right} of {len(files)} images")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
