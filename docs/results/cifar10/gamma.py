"""How much gamma contributes to the weights of a network of `start.yaml`, on the images that were held out:

python -m tests.gpu.study OUT --budget 20000 --processes 1 --grid docs/results/cifar10/start.yaml --seeds 3 --checkpoints
PYTHONPATH=. python docs/results/cifar10/gamma.py OUT/start.pt
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import san
from experiments.config.imports import import_files
from experiments.evaluation.evaluate import open_checkpoint
from experiments.training.images import open_data, transform
from experiments.training.metrics import Batches, evaluate
from tests.gpu import study

Hook = Callable[[nn.Module, Any, Tensor], Tensor | None]


def top1(model: nn.Module, batches: Batches, hooks: dict[nn.Module, Hook]) -> float:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    with torch.no_grad():
        found = evaluate(model, batches).top1
    for handle in handles:
        handle.remove()
    return found


def main() -> None:
    import_files(Path(__file__).with_name(name) for name in ("weights.py", "start.py"))
    opened = open_checkpoint(Path(sys.argv[1]))
    model, settings = opened.model, transform(opened.config.data)
    images = study.load(open_data(opened.config.data)[1], settings.size, 0, torch.device("cpu"))
    batches = list(study.batches(images, settings))
    layers = [layer for layer in model.modules() if isinstance(layer, san.PairwiseAttention)]
    outputs: dict[nn.Module, list[Tensor]] = {layer.gamma: [] for layer in layers}

    def collect(gamma: nn.Module, _: Any, w_NGKP: Tensor) -> None:
        outputs[gamma].append(torch.stack((w_NGKP.mean(3), w_NGKP.square().mean(3))))

    print(f"top-1 {top1(model, batches, dict.fromkeys(outputs, collect)):.1f} %")
    mean_GK = {}
    for layer in layers:
        mean, square = torch.cat(outputs[layer.gamma], 1).mean(1)
        mean_GK[layer.gamma] = mean
        sizes = layer.constant_GK1, mean, (square - mean.square()).sqrt()
        rms = (f"{x.square().mean().sqrt():.3f}" for x in sizes)
        print("root mean square of the constant, of the mean of gamma, of its deviations:", *rms)

    def fixed(gamma: nn.Module, _: Any, w_NGKP: Tensor) -> Tensor:
        return mean_GK[gamma][None, :, :, None].expand_as(w_NGKP)

    print(f"top-1 with the mean of gamma in its place: {top1(model, batches, dict.fromkeys(outputs, fixed)):.1f} %")


if __name__ == "__main__":
    main()
