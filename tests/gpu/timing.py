"""Times several calls in turn after a warm-up; on a GPU with CUDA events, a cold cache and optionally CUDA graphs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from san import ops
from tests.gpu.case import Row, Settings

Call = Callable[[], object]
T = TypeVar("T")
PRECISIONS = ("tf32", "bfloat16", "float32")
SAMPLE_MS = 20.0
"""Approximate duration of a sample, which repeats a call."""


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """Sets the precision of products: float32, TF32, or bfloat16 autocast with TF32 for float32 products."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name != "float32"
    with torch.autocast(device, torch.bfloat16, enabled=name == "bfloat16", cache_enabled=False):
        yield


def under(backend: ops.Backend, precision_name: str, device: str, call: Call) -> Call:
    """Returns a function that runs the call with this back end and precision."""

    def run() -> None:
        with ops.backend(backend), precision(precision_name, device):
            call()

    return run


def captured(call: Callable[[], T]) -> tuple[Call, T]:
    """Returns the call as a CUDA graph, to exclude the time of Python and launches, and the result that it overwrites.

    The returned call refers to `call`, because the graph uses the memory of its tensors.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay(_: object = call) -> None:
        graph.replay()

    return replay, result


def prepare(calls: dict[str, Call], settings: Settings, graph: bool) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the warmed-up calls, and the reasons for calls that fail.

    Raises:
        RuntimeError: a call has ruined the CUDA context, so that no other call can run.
    """
    ready, left_out = {}, {}
    for name, call in calls.items():
        stream = torch.cuda.current_stream() if settings.on_gpu else None
        try:
            with torch.cuda.stream(stream):  # torch does not restore it after a failed capture
                ready[name] = captured(call)[0] if graph and settings.on_gpu else call
                ready[name]()
            if settings.on_gpu:
                torch.cuda.synchronize()
        except Exception as error:
            ready.pop(name, None)
            is_memory = isinstance(error, torch.OutOfMemoryError)
            left_out[name] = "out of memory" if is_memory else f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if settings.on_gpu and name in left_out:
            torch.cuda.synchronize()  # raises if the context is ruined
            torch.cuda.empty_cache()
    return ready, left_out


def measure(calls: dict[str, Call], settings: Settings, repeats: int) -> dict[str, list[float]]:
    """Returns milliseconds per call of each repeat, by name. All calls take turns in each repeat."""
    times = {name: _rounds(call, settings) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2 if settings.small else repeats):
        for name, call in calls.items():
            samples[name].append(_sample(call, times[name], settings))
    return samples


def _rounds(call: Call, settings: Settings) -> int:
    """Returns the number of calls per sample."""
    call()
    return 1 if settings.small else max(1, min(100, round(SAMPLE_MS / max(_sample(call, 2, settings), 0.01))))


def _sample(call: Call, rounds: int, settings: Settings) -> float:
    if not settings.on_gpu:
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        return 1000 * (time.perf_counter() - began) / rounds
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        _large_buffer().sum()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


@functools.cache
def _large_buffer() -> torch.Tensor:
    """Returns a buffer whose reading evicts everything else from the L2 cache. Writing would leave lines to write back."""
    size = max(2 * torch.cuda.get_device_properties(0).L2_cache_size, 256 * 2**20)
    return torch.zeros(size // 4, device="cuda")


def spread(values: Sequence[float]) -> list[float]:
    """Returns median, minimum and maximum."""
    return [float(f"{x:.4g}") for x in (statistics.median(values), min(values), max(values))]


def summary(samples: dict[str, list[float]], ours: str) -> Row:
    """Returns the milliseconds of each call, and their ratios to our call, if it ran, in the same repeat."""
    others = {name: x for name, x in samples.items() if name != ours} if ours in samples else {}
    ratios = {name: spread([a / b for a, b in zip(x, samples[ours], strict=True)]) for name, x in others.items()}
    return {"ms": {name: spread(x) for name, x in samples.items()}, "times_ours": ratios}


def peaks(settings: Settings) -> Row:
    """Measures the bytes/s of a large copy (read and written) and the FLOP/s of a large product in each precision."""
    size, elements = (256, 2**20) if settings.small else (8192, 2**28)
    source = torch.ones(elements, device=settings.device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    for name in PRECISIONS:
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32  # autocast would convert the matrices in each call
        a, b = (torch.randn(size, size, device=settings.device, dtype=dtype) for _ in range(2))
        calls[name] = under("auto", name, settings.device, functools.partial(torch.mm, a, b))
    best = {name: min(times) / 1000 for name, times in measure(calls, settings, 5).items()}
    return {"bytes_per_s": 8 * elements / best["copy"], "flops": {n: 2 * size**3 / best[n] for n in PRECISIONS}}
