"""Compares steps from CUDA graphs (`engine.cuda_graphs`) with eager steps, for two batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import san
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.correctness import NETWORKS, check, exact_products, whole
from tests.ops.cases import error

BATCHES = (8, 7, 8, 7, 7, 8)
CLASSES = 10
ALLOWED = {"float32": 1e-3, "bfloat16": 5e-2}
"""Allowed relative error. The bits can differ, because cuBLAS may choose other algorithms during a capture."""

Found = dict[str, Tensor]


def compared(name: str, graphs: Found, eager: Found, allowed: float) -> Iterator[Row]:
    for what, wanted in eager.items():
        yield check(f"{name}, {what}", error(graphs[what], wanted), 0.0 if what == "counters" else allowed)


def engine(name: str, precision: str, accumulate: int, graphs: bool, device: str) -> Found:
    """Trains a network with momentum and weight decay. Returns the losses of all steps and what has changed in the network."""
    from experiments.grids.config import EngineConfig, RecipeConfig
    from experiments.training.engine import Engine, join_process_group
    from experiments.training.graphs import StepGraphs

    join_process_group(torch.device(device, 0))
    values = {"epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "label_smoothing": 0.1}
    recipe = RecipeConfig.model_validate(values | {"grad_accum_steps": accumulate, "precision": precision})
    torch.manual_seed(0)  # the same weights in each call
    model = san.create_model(name, CLASSES, num_stages=3, width_mult=0.5).to(device)
    config = EngineConfig(cuda_graphs=graphs, tf32=False)
    ours = Engine(model, recipe, len(BATCHES), 8 // accumulate, config)
    assert isinstance(ours._forward_backward, StepGraphs) == graphs
    generator = torch.Generator().manual_seed(1)
    before, losses = whole(list(ours.module.parameters())), []
    for batch in BATCHES:
        images = torch.randn(batch, 3, 64, 64, generator=generator).to(device)
        labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
        losses.append(ours.train_step(images, labels).clone())  # the next replay overwrites it
    buffers = list(ours.module.buffers())
    return {
        "losses": torch.stack(losses),
        "changes of weights": whole(list(ours.module.parameters())) - before,
        "running statistics": whole([buffer for buffer in buffers if buffer.is_floating_point()]),
        "counters": whole([buffer for buffer in buffers if not buffer.is_floating_point()]),
    }


def engines(settings: Settings) -> Iterator[Row]:
    """Checks `Engine` with `cuda_graphs`; with `accumulate`, a batch of 7 consists of parts of 4 and 3."""
    if not settings.on_gpu:
        raise SkipCase("needs a GPU: a CPU has no CUDA graphs")
    import deepspeed  # noqa: F401

    exact_products()
    for name, accumulate in ((NETWORKS[0], 1), (NETWORKS[0], 2), (NETWORKS[1], 1)):
        for precision, allowed in ALLOWED.items():
            graphs, eager = (engine(name, precision, accumulate, on, settings.device) for on in (True, False))
            yield from compared(f"{name}, accumulate={accumulate}, {precision}", graphs, eager, allowed)


ALL = [Case("training", "engine with CUDA graphs", engines, 24, 240)]
