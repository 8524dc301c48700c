"""Attention alone at the sizes of SAN10's stages: our kernels, PyTorch operators and the authors' kernels.

Each row compares in one process, in turn: `fused` (our kernels), `unfused` (a kernel per operator), `reference` (pad, unfold,
einsum: plain torch, eager), `compiled` (the reference through torch.compile), `authors`, and `flex`: torch's flex_attention
in the same window, which is another function, with a dot product instead of a mapping. The roofline is the least time:
the largest of bytes, FLOPs and instructions divided by their peak rates. Bytes are phi, psi, beta and y once each (twice in
training, for their gradients); FLOPs are two per multiply-accumulate of gamma and the aggregation (three times as many in
training); instructions are those of `Core.instructions`, which the GPU's schedulers start one by one. The peaks are those of a
large copy and a large matrix product, measured in the same process, and the GPU's clock. The L2 cache is cold at the start of
each call.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from san import ops
from tests.benchmarks.stages import KINDS, MODES, STAGES, Core
from tests.gpu import authors
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings
from tests.gpu.timing import PRECISIONS, Call, measure, peaks, precision, prepare, summary, under

BACKENDS: dict[str, ops.Backend] = {"fused": "auto", "unfused": "unfused", "reference": "reference"}


def cores(kind: str, stages: Sequence[str], how: str, compiled: bool, settings: Settings) -> Iterator[Row]:
    """Measures training and evaluation of each stage. With `compiled`, only the fused kernels and the compiled reference."""
    kernels(settings)
    peak = peaks(settings)
    yield {"peaks": peak}
    batch, largest = (1, 14) if settings.small else (32, 224)
    # All at once, because the GPU's random numbers can fail after a failed capture.
    all_cores = [Core(kind, stage, batch, settings.device, half=how == "bfloat16", largest_side=largest) for stage in stages]
    for stage, core in zip(stages, all_cores, strict=True):
        for mode in MODES:
            calls = contenders(core, mode, how, compiled, settings)
            ready, left_out = prepare(calls, settings, graph=True)
            row: Row = {"core": kind, "stage": stage, "mode": mode, "precision": how, "batch": batch, "side": core.side}
            training = mode == "train"
            seconds = {
                "bytes": core.bytes(training) / peak["bytes_per_s"],
                "FLOPs": core.flops(training) / peak["flops"][how],
            }
            if settings.on_gpu:
                seconds["instructions"] = core.instructions(training) / peak["instructions_per_s"]
            limit = max(seconds, key=lambda name: seconds[name])
            if settings.on_gpu:
                row["peak_MiB"] = {name: peak_memory(calls[name]) for name in ready}
            row |= {"left_out": left_out, "roofline_ms": 1000 * seconds[limit], "limit": limit, "passed": "fused" in ready}
            yield row | summary(measure(ready, settings, 9), "fused")
            del ready, calls
            if settings.on_gpu:
                torch.cuda.empty_cache()


def contenders(core: Core, mode: str, how: str, compiled: bool, settings: Settings) -> dict[str, Call]:
    run = partial(MODES[mode], core)
    if compiled:
        torch.compiler.reset()
        fused = under("auto", how, settings.device, run)
        with ops.backend("reference"), precision(how, settings.device):
            eager = core.attention.attend
            backend = "inductor" if settings.on_gpu else "aot_eager"
            optimized = torch.compile(eager, backend=backend)

        def run_compiled() -> None:
            core.attention.attend = optimized  # type: ignore[method-assign]
            try:
                run()
            finally:
                del core.attention.attend

        others = {"compiled": run_compiled, "flex": flex(core, mode, settings)}
        return {"fused": fused} | {name: under("reference", how, settings.device, call) for name, call in others.items()}
    calls = {name: under(backend, how, settings.device, run) for name, backend in BACKENDS.items()}
    if settings.authors and settings.on_gpu and importlib.util.find_spec("cupy") and how != "bfloat16":
        theirs = functools.cache(partial(authors.calls, core, settings))  # built in the first call, which may fail
        calls["authors"] = under("reference", how, settings.device, lambda: theirs()[mode]())
    return calls


def flex(core: Core, mode: str, settings: Settings) -> Call:
    """Attention with a dot product over the same window, without pixels beyond the border, in heads of 32 channels."""
    side, channels, reach = core.side, core.attention.value_channels, core.footprint // 2
    heads = max(1, channels // 32)
    device, dtype = settings.device, core.beta.dtype
    shape = core.batch, heads, side**2, channels // heads
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=mode == "train") for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def in_window(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        down, right = query // side - key // side, query % side - key % side
        return (down.abs() <= reach) & (right.abs() <= reach)

    mask = create_block_mask(in_window, None, None, side**2, side**2, device=device)
    attend = torch.compile(flex_attention) if settings.on_gpu else flex_attention

    def run() -> None:
        y = attend(q, k, v, block_mask=mask)
        if mode == "train":
            torch.autograd.grad(y, (q, k, v), grad)

    return run


def peak_memory(call: Call) -> float:
    """MiB that a call allocates at once, without its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


ALL = [
    *(
        Case("cores", f"{kind} {how}", partial(cores, kind, list(STAGES), how, False), 20 + 6 * rank, 180)
        for rank, how in enumerate(PRECISIONS)
        for kind in KINDS
    ),
    *(
        Case("cores", f"{kind} {stage} {how}, compiled", partial(cores, kind, [stage], how, True), 60 + rank, 180)
        for kind in KINDS
        for how in ("tf32", "bfloat16")
        for rank, stage in enumerate(("stage 2", "stage 3", "stage 1", "stage 4", "stage 5"))
    ),
]
SMALL = [case for case in ALL if "compiled" not in case.name or "pairwise stage 2 tf32" in case.name]
