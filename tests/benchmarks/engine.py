"""Measures the averaging of gradients over two workers.

    python -m tests.benchmarks.engine

Two gloo workers average the gradients of SAN10 pairwise, 10.5 M numbers in about 230 tensors. DeepSpeed copies each tensor into
a new buffer and back; in this project, all gradients are views of one buffer. Both take turns in the same processes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import san
from experiments.grids.config import RecipeConfig
from experiments.training.engine import Engine, join_process_group
from tests.benchmarks.tables import ratio, spread

RECIPE = RecipeConfig(epochs=1, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-4, label_smoothing=0.1)
CPU = torch.device("cpu")
REPEATS = 15


def averaging(rank: int, port: int) -> None:
    """Runs one of two workers; the first one prints."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    join_process_group(CPU)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        engine = Engine(san.create_model("san10_pairwise"), RECIPE, 10, 4)
    flat = engine._gradients
    assert flat is not None
    contenders: dict[str, Callable[[], object]] = {
        "DeepSpeed": engine._engine.allreduce_gradients,
        "one buffer": engine._average_gradients,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(REPEATS + 2):
        names = sorted(contenders, reverse=number % 2 == 1)
        for name in names:
            flat.normal_(generator=torch.Generator().manual_seed(number))
            dist.barrier()
            begin = time.perf_counter()
            contenders[name]()
            if number >= 2:  # the first two are the warm-up
                seconds[name].append(time.perf_counter() - begin)
    if rank == 0:
        for name, times in seconds.items():
            print(f"{name}: {spread([1e3 * t for t in times])} ms")
        print(f"DeepSpeed / one buffer: {ratio(seconds['DeepSpeed'], seconds['one buffer'])}")
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(averaging, (port,), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
