"""Compares steps from CUDA graphs (`engine.cuda_graphs`) with eager steps, for two batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.correctness import NETWORKS, check, exact_products, small_model, whole
from tests.ops.cases import error

BATCHES = (8, 7, 8, 7, 7, 8)
CLASSES = 10
ALLOWED = {"float32": 1e-3, "bfloat16": 5e-2}
"""Allowed relative error. The bits can differ, because cuBLAS may choose other algorithms during a capture."""

Step = Callable[[Tensor, Tensor], Tensor]
Found = dict[str, Tensor]


def trained(model: nn.Module, step: Step, settings: Settings) -> Found:
    """Returns the losses of all steps and the changed state of the model."""
    generator = torch.Generator().manual_seed(1)
    before, losses = whole(list(model.parameters())), []
    for batch in BATCHES:
        images = torch.randn(batch, 3, *[32 if settings.small else 64] * 2, generator=generator).to(settings.device)
        labels = torch.randint(CLASSES, (batch,), generator=generator).to(settings.device)
        losses.append(step(images, labels).clone())  # the next replay overwrites it
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return {
        "losses": torch.stack(losses),
        "changes of weights": whole(list(model.parameters())) - before,
        "running statistics": whole(statistics),
        "counters": whole([buffer for buffer in model.buffers() if not buffer.is_floating_point()]),
    }


def compared(name: str, graphs: Found, eager: Found, allowed: float) -> Iterator[Row]:
    for what, wanted in eager.items():
        yield check(f"{name}, {what}", error(graphs[what], wanted), 0.0 if what == "counters" else allowed)


def gradient_descent(name: str, precision: str, graphs: bool, settings: Settings) -> Found:
    """Runs forward and backward like the engine, with plain gradient descent and without DeepSpeed, which not every GPU machine
    has."""
    from experiments.training.engine import StepGraphs, _flat_gradients
    from experiments.training.recipe import MixedBatch

    model = small_model(name, settings)[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    gradients = _flat_gradients(model)

    def forward_backward(part: MixedBatch, images: int) -> Tensor:
        with torch.autocast(settings.device, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(part.images_NCHW.contiguous(memory_format=torch.channels_last))
        loss = part.loss(logits, 0.1) * (len(part.labels_N) / images)
        loss.backward()
        return loss.detach()

    run = StepGraphs(forward_backward, [gradients, *model.buffers()]) if graphs else forward_backward

    def step(images: Tensor, labels: Tensor) -> Tensor:
        gradients.zero_()
        loss = run(MixedBatch(images, labels), len(labels))
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight -= 0.05 * weight.grad
        return loss

    return trained(model, step, settings) | {"gradients of the last step": gradients.clone()}


def engine(name: str, precision: str, accumulate: int, graphs: bool, settings: Settings) -> Found:
    """Runs the engine with momentum and weight decay."""
    from experiments.config.config import EngineConfig, RecipeConfig
    from experiments.training.engine import Engine, StepGraphs, join_process_group

    join_process_group(torch.device(settings.device, 0) if settings.on_gpu else torch.device("cpu"))
    values = {"epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "label_smoothing": 0.1}
    recipe = RecipeConfig.model_validate(values | {"grad_accum_steps": accumulate, "precision": precision})
    config = EngineConfig(cuda_graphs=graphs, tf32=False)
    ours = Engine(small_model(name, settings)[0], recipe, len(BATCHES), 8 // accumulate, config)
    assert isinstance(ours._forward_backward, StepGraphs) == graphs
    return trained(ours.module, ours.train_step, settings)


def steps(settings: Settings) -> Iterator[Row]:
    """Checks `StepGraphs` for both kinds of SAN, with and without autocast."""
    exact_products()
    for name in NETWORKS:
        for precision, allowed in ALLOWED.items():
            graphs, eager = (gradient_descent(name, precision, on, settings) for on in (True, False))
            yield from compared(f"{name}, {precision}", graphs, eager, allowed)


def engines(settings: Settings) -> Iterator[Row]:
    """Checks `Engine` with `cuda_graphs`; with `accumulate`, a batch of 7 consists of parts of 4 and 3."""
    import deepspeed  # noqa: F401

    exact_products()
    for accumulate in (1, 2):
        for precision, allowed in ALLOWED.items():
            graphs, eager = (engine(NETWORKS[0], precision, accumulate, on, settings) for on in (True, False))
            yield from compared(f"accumulate={accumulate}, {precision}", graphs, eager, allowed)


def on_gpu(run: Callable[[Settings], Iterator[Row]], settings: Settings) -> Iterator[Row]:
    if not settings.on_gpu:
        raise SkipCase("needs a GPU: a CPU has no CUDA graphs")
    yield from run(settings)


ALL = [
    Case("training", "steps from CUDA graphs", partial(on_gpu, steps), 24, 180),
    Case("training", "engine with CUDA graphs", partial(on_gpu, engines), 24, 180),
]
