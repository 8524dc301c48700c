"""DeepSpeed around a model: the optimizer, its schedule, gradient averaging; the only file that imports deepspeed."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.config import RecipeConfig


def join_process_group(patience: timedelta = timedelta(minutes=30)) -> tuple[int, int]:
    """Rank and number of workers. Joins the group that the launcher made, or makes one: of the workers that the environment
    tells, which then wait for each other so long, or of this process alone."""
    if not dist.is_initialized():
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": _free_port(),
        }
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        if torch.cuda.is_available():
            torch.cuda.set_device(device())  # nccl would use the first GPU for every worker
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=patience)
    return dist.get_rank(), dist.get_world_size()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def device() -> torch.device:
    """The GPU of this worker, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class Engine:
    """Trains one model in step with the other workers.

    Args:
        model: on any device; moved to this worker's.
        recipe: learning rate, momentum, weight decay, label smoothing, epochs.
        steps: optimizer steps per epoch, for the schedule.
        micro_batch: images per step of this worker.
    """

    def __init__(self, model: nn.Module, recipe: RecipeConfig, steps: int, micro_batch: int) -> None:
        deepspeed = _import_deepspeed()
        self.label_smoothing = recipe.label_smoothing
        optimizer = torch.optim.SGD(
            model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        total = steps * recipe.epochs
        cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / total)) / 2)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=cosine, config=_deepspeed_config(micro_batch)
        )
        if dist.get_world_size() == 1 and not self._engine.zero_optimization():
            # There is nobody to average with, but DeepSpeed would copy all gradients to one buffer and back in every step.
            self._engine.enable_backward_allreduce = False
        self.optimizer, self.schedule = optimizer, cosine

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self._engine.module

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, images_NCHW: Tensor, labels_N: Tensor) -> Tensor:
        """One optimizer step with gradients averaged over the workers; returns this worker's mean loss."""
        loss = cross_entropy(self._engine(images_NCHW), labels_N, label_smoothing=self.label_smoothing)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def is_finite(self) -> bool:
        """Whether all weights are; a step whose loss was finite may have ruined them."""
        return all(bool(weight.isfinite().all()) for weight in self.model.parameters())

    def average_buffers(self) -> None:
        """Makes BatchNorm statistics the mean over the workers. DeepSpeed averages gradients only, so every worker has
        statistics of its own images; without this, validation would depend on who does it."""
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, the same on every worker; all of them must ask for it together.

        Inside an epoch each worker has BatchNorm statistics of its own: `workers` holds every one's, and its random numbers.
        Python's and NumPy's are not there, for nothing draws from them.
        """
        model = self.model.state_dict()
        mine = {
            "buffers": {name: model[name].cpu() for name, _ in self.model.named_buffers() if name in model},
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        workers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(workers, mine)
        return {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "workers": workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """With as many workers as when it was made, each goes on as it was; else statistics are the mean over those workers,
        and random numbers are left as they are."""
        workers = state["workers"]
        if len(workers) == dist.get_world_size():
            mine = workers[dist.get_rank()]
            weights = state["model"] | mine["buffers"]
            torch.set_rng_state(mine["random"])
            if mine["cuda_random"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(mine["cuda_random"])
        else:
            weights = validated_weights(state)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def validated_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of what `Engine.state_dict` gave, the model's state dict as validation sees it: what a trial's accuracy is of."""
    workers = state["workers"]
    return state["model"] | {name: _mean([worker["buffers"][name] for worker in workers]) for name in workers[0]["buffers"]}


def _mean(values: list[Tensor]) -> Tensor:
    """Over the workers; what is equal on all, such as counters and statistics that were averaged, stays as it is."""
    first = values[0]
    same = all(map(first.equal, values)) or not first.is_floating_point()
    return first if same else torch.stack(values).mean(0)


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    if not torch.cuda.is_available():
        # Else DeepSpeed compiles its shared-memory all-reduce at the first start, which takes a minute and needs ninja on
        # PATH; plain gloo is as fast for models of this size.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_config(micro_batch: int) -> dict[str, Any]:
    """Every default that changes results is written out."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # DeepSpeed >= 0.19.3 clips at 1.0 when this is absent; the paper does not clip
        "zero_optimization": {"stage": 0},
        "steps_per_print": 1_000_000_000,
    }
