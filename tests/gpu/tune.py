"""Other values of the numbers in `cuda_ext/cuda/tuning.h`, one at a time, beside those that the library uses.

Each variant is a library of its own with the attention kernels, compiled with another value. It is first checked at small
sizes; then the kernels of both libraries take turns in each of SAN10's stages, as CUDA graphs, with a cold cache. The report
names the fastest variant of each operator and stage. `python -m tests.gpu --out DIR --case tune/ --report` runs only this.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_ext import build, schemas
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings
from tests.gpu.correctness import SIZES, checks, fused_operators, stages_of
from tests.gpu.timing import Call, measure, precision, prepare, summary
from tests.ops import cases

VARIANTS: dict[str, dict[str, int]] = {
    "256 threads": {"SAN_TEAM_THREADS": 256},
    "64 threads": {"SAN_TEAM_THREADS": 64},
    "no layers in registers": {"SAN_KEPT_BYTES": 0},
    "one tile of weight channels": {"SAN_MOST_TILES": 1},
    "no minimum of warps": {"SAN_ATTEND_WARPS": 4},
    "20 warps": {"SAN_ATTEND_WARPS": 20},
}
SOURCES = ("attend_patches.cu", "patch_linear.cu", "attend_pairs.cu", "pair_covariance.cu")
OPERATORS = ("attend_patches", "patch_linear", "attend_pairs", "attend_pairs_of_batch")
ON_A_CPU = 2
"""How many of both a test without a GPU tries: those that compile quickly."""


def compiled(variant: str, settings: Settings) -> Any:
    """Builds the attention kernels with these values for this GPU only, on a CPU for the shim, and returns their namespace."""
    name = "san_" + variant.replace(" ", "_")
    folder = Path(settings.work, name)
    folder.mkdir()
    toolchain = build.Toolchain.find(cuda=settings.on_gpu)
    flags = [] if settings.on_gpu else ["-O1"]  # as in tests/ops/shim.py
    flags += [f"-D{key}={value}" for key, value in VARIANTS[variant].items()] + ["-USAN_LIBRARY", f"-DSAN_LIBRARY={name}"]
    if settings.on_gpu:
        architecture = "{}{}".format(*torch.cuda.get_device_capability())
        flags.append(f"-gencode=arch=compute_{architecture},code=sm_{architecture}")
    sources = SOURCES if settings.on_gpu else SOURCES[:ON_A_CPU]
    objects, commands = [folder / f"{source}.o" for source in sources], []
    for source, output in zip(sources, objects, strict=True):
        command = build.compile_command(build.SOURCE_DIR / "cuda" / source, output, toolchain, shim=not settings.on_gpu)
        commands.append([*(flag for flag in command if not flag.startswith("-gencode")), *flags])
    build.run_all(commands)
    library = folder / "kernels.so"
    build.run(build.link_command(objects, library, toolchain))
    schemas.define(name)
    torch.ops.load_library(library)
    return getattr(torch.ops, name)


def tune(variant: str, settings: Settings) -> Iterator[Row]:
    ours = kernels(settings)
    theirs = compiled(variant, settings)
    tried = OPERATORS if settings.on_gpu else OPERATORS[:ON_A_CPU]
    operators = [operator for operator in tried if operator in fused_operators(settings)]
    for operator in operators:
        for sizes in SIZES[:3]:
            tensors = tuple(x.float().to(settings.device) for x in cases.sample(operator, sizes))
            want, found = (cases.run_kernels(operator, tensors, sizes, namespace) for namespace in (ours, theirs))
            yield checks(f"{operator}, {variant}, {sizes}", found, want, [2e-4] * len(want))
    for operator in operators:
        for sizes in stages_of(operator, settings):
            yield from compare(operator, variant, sizes, {"ours": ours, variant: theirs}, settings)


def compare(operator: str, variant: str, sizes: cases.Sizes, namespaces: dict[str, Any], settings: Settings) -> Iterator[Row]:
    """Times forward and backward of an operator, with TF32."""
    tensors = tuple(x.float().to(settings.device) for x in cases.sample(operator, sizes))
    for direction in ("forward", "backward"):
        calls: dict[str, Call] = {}
        for name, namespace in namespaces.items():
            saved = cases.with_saved(operator, tensors, sizes, namespace, tf32=True)
            if direction == "forward":
                calls[name] = partial(cases.with_saved, operator, tensors, sizes, namespace, True)
            else:
                grads = cases.cotangents(cases.computed(operator, tensors, sizes, namespace, tf32=True))
                arguments = cases.backward_arguments(operator, tensors, saved, grads, sizes, tf32=True)
                calls[name] = partial(getattr(namespace, f"{operator}_backward"), *arguments)
        with precision("tf32", settings.device):
            ready, left_out = prepare(calls, settings, graph=True)
            samples = measure(ready, settings, 7)
        row: Row = {"operator": operator, "direction": direction, "sizes": str(sizes), "variant": variant, "left_out": left_out}
        row["passed"] = "ours" in ready
        yield row | summary(samples, "ours")


ALL = [Case("tune", variant, partial(tune, variant), 70, 240) for variant in VARIANTS]
