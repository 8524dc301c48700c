"""How many images fit into memory at once."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from experiments.grids.config import TrialConfig
from experiments.training.device import available_device

MOST = {"cuda": 256, "cpu": 64}
"""Images in a batch: more make nothing faster, and the first batch is waited for."""
SHARE = 0.5
"""Of the memory that is free; the loader has batches ahead, and others come too."""
TEMPORARY = 3
"""Times what a backward pass keeps of an image: with gradients, and maps that live for a moment."""
CGROUP = Path("/sys/fs/cgroup")


def first_batch(model: nn.Module, config: TrialConfig) -> int:
    """A guess at how many images fit, for an attack, which needs the most: of a GPU all, of a machine this worker's share."""
    where = available_device()
    if where.type == "cuda":
        free: float = torch.cuda.mem_get_info(where)[0]
    else:
        free = free_memory() * min(config.placement.cpus / (os.cpu_count() or 1), 1)
    image = TEMPORARY * bytes_kept(model.to(where), config.data.size, where)
    return max(1, min(MOST[where.type], int(SHARE * free / image)))


def bytes_kept(model: nn.Module, size: int, where: torch.device) -> int:
    """What autograd keeps of one image of `size` pixels until the backward pass, besides parameters and buffers."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    image_1CHW = torch.zeros(1, 3, size, size, device=where, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(image_1CHW)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    del logits  # until here nothing of it was freed, whose place another could have taken
    return sum(size for place, size in kept.items() if place not in own)


def free_memory() -> int:
    """Bytes that this process can have, within the limits of its container."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no container, or an old kernel
        return free
    return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
