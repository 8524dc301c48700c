"""Measures the averaging of gradients and the compilation for two batch sizes.

    python -m tests.benchmarks.engine [--repeats 15] [--threads 1]

`averaging`: two gloo workers average the gradients of SAN10 pairwise, 10.5 M numbers in about 230 tensors. DeepSpeed copies
each tensor into a new buffer and back; in this project, all gradients are views of one buffer. Both take turns in the same
processes.

`compiling`: an epoch of ImageNet has batches of 32 images and a few of 31. Prints the seconds until both sizes are compiled,
and the time of a later step with 31 images: with code for each size (`dynamic=False`, as in this project), and with PyTorch's
default, which compiles code for any size at the second size. Set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 to include the whole
compilation.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import san
from experiments.grids.config import EngineConfig, RecipeConfig
from experiments.training.engine import Engine, join_process_group

RECIPE = RecipeConfig(epochs=1, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-4, label_smoothing=0.1)
CPU = torch.device("cpu")


def averaging(rank: int, port: int, repeats: int) -> None:
    """Runs one of two workers; the first one prints."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
    for number in range(repeats + 2):
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
            print(f"averaging, {name}: median {1e3 * statistics.median(times):.0f} ms, {_range([1e3 * t for t in times])} ms")
        ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
        print(f"averaging, DeepSpeed / one buffer: median {statistics.median(ratios):.2f}, {_range(ratios)}")
    dist.destroy_process_group()


def compiling(repeats: int) -> None:
    join_process_group(CPU)
    for name, dynamic in (("code for each size", False), ("torch's default", None)):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = san.create_model("san10_pairwise", num_classes=10, num_stages=2, width_mult=0.5)
        engine = Engine(model, RECIPE, 10, 32, EngineConfig())
        setattr(engine.module, "forward", torch.compile(engine.module.forward, dynamic=dynamic))  # noqa: B010 (mypy)
        batches = {images: (torch.randn(images, 3, 24, 24), torch.arange(images) % 10) for images in (32, 31)}
        begin = time.perf_counter()
        for batch in batches.values():
            engine.train_step(*batch)
        ready, times = time.perf_counter() - begin, []
        for _ in range(repeats):
            begin = time.perf_counter()
            engine.train_step(*batches[31])
            times.append(time.perf_counter() - begin)
        step = f"a step median {1e3 * statistics.median(times):.1f} ms, {_range([1e3 * t for t in times])} ms"
        print(f"compiling, {name}: ready after {ready:.0f} s, {step}")


def _range(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(averaging, (port, options.repeats), nprocs=2)  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    compiling(options.repeats)


if __name__ == "__main__":
    main()
