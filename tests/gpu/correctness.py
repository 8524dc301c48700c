"""Compares kernels, modules and models with float64 references.

Cases are in `tests.ops.cases` (fused operators) and `tests.ops.operators` (the others). On a machine without a GPU, the kernels
are the CUDA sources, which run on the CPU through the shim; modules and models use the CPU kernels.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import san
from san import ops
from san.nn.norm import conv_norm
from tests.golden.replay import TOLERANCE, errors, replay
from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.timing import captured
from tests.nn.kinds import CHANNELS, KINDS, made
from tests.nn.kinds import gradients as module_gradients
from tests.ops import cases
from tests.ops.cases import error
from tests.ops.operators import CASES, CHANNELS_LAST, OPERATORS, Operator, cotangent
from tests.ops.operators import Case as OperatorCase


@dataclass(frozen=True)
class Precision:
    """Types of a fused operator, and the allowed relative errors of outputs and gradients in the Euclidean norm."""

    dtype: torch.dtype
    allowed: tuple[float, float]
    tf32: bool = False
    of_weights: torch.dtype | None = None


PRECISIONS = {
    "float32": Precision(torch.float32, (1e-5, 2e-4)),
    "tf32": Precision(torch.float32, (5e-3, 0.15), tf32=True),
    # At the smallest size, rounding turns a ReLU on or off in a few of 216 pairs: 0.246 on a GPU and on a CPU.
    "bfloat16": Precision(torch.float32, (1e-2, 0.25), of_weights=torch.bfloat16),
    "float16": Precision(torch.float32, (5e-3, 0.15), of_weights=torch.float16),
}
# On GPUs, products, mappings without a hidden layer, and weights that more than eight values share are not fused.
SIZES = [sizes for sizes in cases.SIZES if sizes.products == 0 and sizes.hidden > 0 and sizes.shares <= 8]
STAGES = [
    cases.Sizes(3, 14, 14, 7, 66, 64, 32),
    cases.Sizes(2, 28, 28, 7, 34, 32, 16),
    cases.Sizes(2, 56, 56, 7, 18, 16, 8),
    cases.Sizes(1, 112, 112, 3, 6, 4, 2),
]
"""SAN10's other stages, which take too long on a CPU."""


def stages_of(operator: str, settings: Settings) -> list[cases.Sizes]:
    """The sizes of an operator in SAN10's stages, with 32 images; on a CPU, small ones."""
    if not settings.on_gpu:
        return SIZES[1:2]
    stages = [replace(stage, batch=32, shares=8) for stage in STAGES]
    if operator == "attend_dot":  # eight heads, and no channels of the position
        return [replace(s, weights=8, channels=(s.channels - 2) // 2, shares=(s.channels - 2) // 2) for s in stages]
    if "patch" in operator:
        return [replace(s, channels=s.channels - 2, hidden=s.weights) for s in stages]
    return stages


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check(name: str, found: float, allowed: float) -> Row:
    """Returns a row for one comparison. NaN fails."""
    return {"check": name, "error": found, "allowed": allowed, "passed": bool(found <= allowed)}


def checks(name: str, got: Sequence[Tensor], wanted: Sequence[Tensor], allowed: Sequence[float]) -> Row:
    """Returns one row for several tensors: the one with the largest ratio of found and allowed error."""
    rows = [check(name, error(a.cpu(), b.cpu()), limit) for a, b, limit in zip(got, wanted, allowed, strict=True)]
    return max(rows, key=lambda row: (not row["passed"], row["error"] / row["allowed"]))


def swapped(x: Tensor, height: int, width: int) -> Tensor:
    """Exchanges the memory order of two dimensions."""
    layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    return x.transpose(height, width).contiguous(memory_format=layout).transpose(height, width)


def fused_operators(settings: Settings) -> tuple[str, ...]:
    return cases.ON_GPU if settings.on_gpu else cases.OPERATORS


def check_sizes(
    operator: str, precision: str, sizes: cases.Sizes, settings: Settings, times: float = 1, swap: bool = False
) -> Row:
    """Compares a fused operator with its definition; with `swap`, on maps whose height and width are swapped in memory."""
    how = PRECISIONS[precision]
    exact = tuple(x.to(settings.device) for x in cases.sample(operator, sizes))
    ours = tuple(x.to(how.dtype) for x in exact)
    if how.of_weights:
        ours, exact = cases.with_half_weights(operator, exact, how.of_weights)
    if swap:
        ours = tuple(swapped(x, 1, 2) if x.ndim == 4 else x for x in ours)
    wanted = cases.differentiated(lambda t: cases.defined(operator, t, sizes), exact)
    allowed = [times * limit for limit, some in zip(how.allowed, wanted, strict=True) for _ in some]
    found = cases.run_kernels(operator, ours, sizes, kernels(settings), how.tf32)
    assert {x.device for x in found} == {ours[0].device}
    name = f"{operator}, {precision}, {sizes}{', height and width swapped' if swap else ''}"
    return checks(name, found, sum(wanted, ()), allowed)


def check_fused(operator: str, precisions: Sequence[str], settings: Settings) -> Iterator[Row]:
    """Checks a fused operator at all sizes, on a CPU only at a few."""
    if operator not in fused_operators(settings):
        raise SkipCase("needs a GPU")
    sizes = [*SIZES, *STAGES] if settings.on_gpu else SIZES[:3]
    for precision, size in itertools.product(precisions, sizes):
        if settings.on_gpu or operator != "attend_pairs" or PRECISIONS[precision].of_weights is None:  # not on CPUs
            yield check_sizes(operator, precision, size, settings)
    yield check_sizes(operator, precisions[0], SIZES[1], settings, swap=True)


def check_case(operator: Operator, case: OperatorCase, dtype: torch.dtype, settings: Settings, swap: bool = False) -> Row:
    """Checks an operator of unfused attention or the aggregation."""
    inputs = tuple(x.to(settings.device) for x in operator.sample(case, dtype))
    if swap:
        inputs = tuple(swapped(x, 2, 3) if x.shape[2:] == (case.height, case.width) else x for x in inputs)
    wanted = operator.defined(tuple(x.double() for x in inputs), case)
    allowed = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    found = operator.computed(inputs, case, kernels(settings))
    assert {x.device for x in found} == {inputs[0].device}
    name = f"{operator}, {case}, {dtype}{', height and width swapped' if swap else ''}"
    return checks(name, found, wanted, [allowed] * len(wanted))


def operators(settings: Settings) -> Iterator[Row]:
    for operator, case, dtype in itertools.product(OPERATORS, CASES, DTYPES):
        yield check_case(operator, case, dtype, settings)
    for operator, case in itertools.product(OPERATORS, (CASES[3], CHANNELS_LAST[0])):
        yield check_case(operator, case, torch.float32, settings, swap=True)


def norm_relu(settings: Settings) -> Iterator[Row]:
    from tests.ops.test_norm_relu import SHAPES, doubled, on_gpu, reference, results, sample

    dtypes = [torch.float32, torch.bfloat16] if settings.on_gpu else [torch.float32]  # as the CPU's kernel takes
    for shape, of_batch, adds, dtype in itertools.product(SHAPES, (True, False), (True, False), dtypes):
        x, *vectors, residual = (x if x is None else x.to(settings.device) for x in sample(shape, of_batch, adds=adds))
        assert x is not None
        inputs: Any = (x.to(dtype), *vectors, None if residual is None else residual.to(dtype))
        name = f"norm{'_add' if adds else ''}_relu, {dtype}, {shape}, {'batch' if of_batch else 'running'} statistics"
        wanted = results(lambda *inputs: reference(*inputs).to(dtype), doubled(inputs))  # noqa: B023
        limits = [1e-5, *[2e-4] * (len(wanted) - 1)] if dtype == torch.float32 else [1e-2] * len(wanted)
        yield checks(name, on_gpu(kernels(settings), inputs), wanted, limits)
        if not adds:
            wanted = wanted[0], wanted[1] + inputs[0], *wanted[2:]
            yield checks(f"{name}, gradient added", on_gpu(kernels(settings), inputs, added=True), wanted, limits)


def pooling(settings: Settings) -> Iterator[Row]:
    from tests.ops.test_pooling import INPUTS, SHAPES, a_map, a_stem, pooled, pooled_on_gpu, stem_on_gpu, stem_results

    for shape, half in itertools.product(SHAPES, (False, True) if settings.on_gpu else (False,)):
        x_NCHW = a_map(shape).to(settings.device, torch.bfloat16 if half else torch.float32)
        limit = 1e-2 if half else 1e-5
        yield checks(
            f"max_pool, {shape}, half {half}", pooled_on_gpu(kernels(settings), x_NCHW), pooled(x_NCHW.double()), [limit] * 2
        )
        for inputs in INPUTS:
            weight, bias, x_NcHW = (x.to(settings.device) for x in a_stem(inputs, shape))
            found = stem_on_gpu(kernels(settings), (weight, bias, x_NcHW), half)
            wanted = stem_results((weight, bias, x_NcHW), exact=True)
            yield checks(f"stem, {shape}, {inputs} channels, half {half}", found, wanted, [limit] * 3)


def stem(settings: Settings) -> Iterator[Row]:
    """The norm of the stem follows from the images, whose colors are nearly equal. TF32 must not round its statistics."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 64, 1, bias=False).double(), nn.BatchNorm2d(64).double()
    images = (
        (torch.randn(8, 1, 64, 64) + 0.01 * torch.randn(8, 3, 64, 64)).double().contiguous(memory_format=torch.channels_last)
    )
    with ops.backend("reference"):
        reference = copy.deepcopy(norm)
        wanted = conv_norm(conv, reference, images)
    conv, norm, images = conv.float().to(settings.device), norm.float().to(settings.device), images.float().to(settings.device)
    found = conv_norm(conv, norm, images)
    assert isinstance(norm.running_var, Tensor) and isinstance(reference.running_var, Tensor)
    yield check("stem, result", error(found.cpu(), wanted), 5e-3)
    yield check("stem, running variance", error(norm.running_var.cpu(), reference.running_var), 1e-6)


def check_module(kind: str, settings: Settings) -> Iterator[Row]:
    """Checks one kind of attention: float64, float32, autocast, channels_last."""
    for training in (True, False):
        module = made(kind, 3).train(training)
        x = torch.randn(2, CHANNELS, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with ops.backend("reference"):
            wanted = module_gradients(module, module, x)
        ours = module.to(settings.device)
        x = x.to(settings.device)
        mode = f"{kind}, {'training' if training else 'evaluation'}"
        got = module_gradients(ours, ours, x)
        # All parameters together, because some gradients are 0 in theory and so have no relative error.
        found, theirs = ([y, x_grad, whole(rest)] for y, x_grad, *rest in (got, wanted))
        yield checks(f"{mode}, float64", found, theirs, [1e-9] * 3)
        last = ours(x.contiguous(memory_format=torch.channels_last))
        yield check(f"{mode}, channels_last", error(last.cpu(), wanted[0]), 1e-9)
        ours.float()
        yield check(f"{mode}, float32", error(ours(x.float()).cpu(), wanted[0]), 1e-4)
        with torch.autocast(settings.device, torch.bfloat16):
            got_y = ours(x.float())
            with ops.backend("reference"):
                plain = error(ours(x.float()).cpu(), wanted[0])
        yield check(f"{mode}, bfloat16 autocast", error(got_y.cpu(), wanted[0]), 2 * plain + 2**-7)


def exact_products() -> None:
    """Disables TF32, which cuDNN uses by default, and nondeterministic algorithms."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def modules(kinds: Sequence[str], settings: Settings) -> Iterator[Row]:
    exact_products()
    for kind in kinds:
        yield from check_module(kind, settings)


def golden(settings: Settings) -> Iterator[Row]:
    """Compares SAN10 pairwise in float64 with recorded results of the authors' code."""
    for name, found in errors(replay(settings.device)).items():
        yield check(name, found, TOLERANCE)


def small_model(name: str, settings: Settings) -> tuple[nn.Module, Tensor]:
    """Returns a narrow network of three stages (two on a CPU) and images."""
    torch.manual_seed(0)
    model = san.create_model(name, 10, num_stages=2 if settings.small else 3, width_mult=0.5).to(settings.device)
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1)).to(settings.device)
    return model, images[..., :32, :32] if settings.small else images


def train_step(model: Any, images_NCHW: Tensor) -> list[Tensor]:
    """Returns logits and gradients of all parameters."""
    y = model(images_NCHW)
    cotangent = torch.ones_like(y) * torch.linspace(-1, 1, y.shape[1], device=y.device, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, list(model.parameters()), cotangent)]


def whole(grads: Sequence[Tensor]) -> Tensor:
    """Returns all gradients as one vector, because some are 0 in theory and so have no relative error."""
    return torch.cat([grad.detach().double().flatten() for grad in grads])


def compared(wanted: Sequence[Tensor], how: str, found: Sequence[Tensor], values: float, gradients_: float) -> Row:
    """Compares the logits, and all gradients as one vector."""
    ours, theirs = ([y, whole(grads)] for y, *grads in (found, wanted))
    return checks(how, ours, theirs, (values, gradients_))


def reference_step(model: nn.Module, images: Tensor) -> list[Tensor]:
    exact_products()
    with ops.backend("reference"):
        return train_step(copy.deepcopy(model).double(), images.double())


def models(name: str, settings: Settings) -> Iterator[Row]:
    """Compares a network with the float64 reference: float32, channels_last, autocast, another stream, a CUDA graph."""
    model, images = small_model(name, settings)
    wanted = reference_step(model, images)
    eager = train_step(copy.deepcopy(model), images)
    yield compared(wanted, "float32", eager, 1e-4, 1e-2)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = train_step(last, images.contiguous(memory_format=torch.channels_last))
    yield compared(wanted, "channels_last", found, 1e-4, 1e-2)
    with torch.autocast(settings.device, torch.bfloat16):
        found = train_step(copy.deepcopy(model), images)
        with ops.backend("reference"):
            plain = train_step(copy.deepcopy(model), images)
    errors_of_plain = error(plain[0], wanted[0]), error(whole(plain[1:]), whole(wanted[1:]))
    yield compared(wanted, "bfloat16 autocast", found, *(2 * e + 2**-7 for e in errors_of_plain))
    if settings.on_gpu:
        yield compared(wanted, "another stream", on_another_stream(copy.deepcopy(model), images), 1e-4, 1e-2)
        replayed = in_graph(partial(train_step, copy.deepcopy(model), images))
        yield compared(eager, "CUDA graph", replayed, 1e-4, 1e-2)  # cuBLAS may choose other algorithms during a capture


def compiled(name: str, settings: Settings) -> Iterator[Row]:
    """Checks that torch.compile turns a network into one correct graph."""
    model, images = small_model(name, settings)
    wanted = reference_step(model, images)
    backend = "inductor" if settings.on_gpu else "aot_eager"
    found = train_step(torch.compile(model, fullgraph=True, backend=backend), images)
    yield compared(wanted, f"compiled by {backend}, fullgraph", found, 1e-4, 1e-2)


def same_bits(name: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> Row:
    return {"check": f"{name}: same bits", "passed": all(map(torch.equal, got, wanted))}


def repeats(settings: Settings) -> Iterator[Row]:
    """Checks that a second run gives the same bits in deterministic mode: operators, attention, a training step of SAN10.

    The operators must give them in a CUDA graph, too; there, they have no products of cuBLAS.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch demands it before the first product
    torch.use_deterministic_algorithms(True)
    for name, run in operator_runs(settings):
        found = [x.clone() for x in run()]
        yield same_bits(f"{name}, second run", run(), found)
        if settings.on_gpu:
            yield same_bits(f"{name}, CUDA graph", in_graph(run), found)
    for kind in ("pairwise-subtraction-relative", "patchwise-concatenation"):
        module = made(kind, 7).float().to(settings.device)
        x = torch.randn(2, CHANNELS, 28, 28, generator=torch.Generator().manual_seed(1)).to(settings.device)
        yield same_bits(f"{kind}, second run", *(module_gradients(module, module, x) for _ in range(2)))
    for name, dtype in itertools.product(NETWORKS, (torch.float32, torch.bfloat16)):
        model, images = small_model(name, settings)
        if settings.on_gpu:
            model, images = san.create_model(name).to(settings.device), torch.randn(8, 3, 224, 224).to(settings.device)
        with torch.autocast(settings.device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            first, second = (train_step(copy.deepcopy(model), images) for _ in range(2))
        yield same_bits(f"{name}, {dtype}, training step, second run", second, first)


def operator_runs(settings: Settings) -> Iterator[tuple[str, Callable[[], Sequence[Tensor]]]]:
    """Yields the forward and backward pass of each operator, with inputs and gradients on the device."""
    namespace = kernels(settings)
    sizes = STAGES[2] if settings.on_gpu else SIZES[1]
    for fused, tf32 in itertools.product(fused_operators(settings), (False, True)):
        tensors = tuple(x.to(settings.device) for x in cases.sample(fused, sizes, torch.float32))
        grads = cases.cotangents(cases.computed(fused, tensors, sizes, namespace, tf32))
        run = partial(cases.run_kernels, fused, tensors, sizes, namespace, tf32, grads)
        yield f"{fused}, {'tf32' if tf32 else 'float32'}", run
    case = OperatorCase(4, 64, 56, 56, 7, groups=8, channels_last=True) if settings.on_gpu else CHANNELS_LAST[0]
    for operator in OPERATORS:
        inputs = tuple(x.to(settings.device) for x in operator.sample(case, torch.float32))
        grad = cotangent(operator.kernel(namespace)(*inputs, *operator.rest(case)))
        yield str(operator), partial(operator.computed, inputs, case, namespace, grad)


def on_another_stream(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Copies the images on another stream with a delay; a kernel on the default stream would read zeros."""
    stream = torch.cuda.Stream()
    late = torch.zeros_like(images)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(images)
        found = train_step(model, late)
    torch.cuda.synchronize()
    return found


def in_graph(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Captures and replays a call; in training, the result does not depend on BatchNorm's running statistics."""
    replay, found = captured(run)
    for tensor in found:
        tensor.detach().zero_()
    replay()
    torch.cuda.synchronize()
    return found


def large_batch(settings: Settings) -> Iterator[Row]:
    """Checks all operators in SAN10's stage 2 at batch 32. The error of sums over pixels grows with their number."""
    sizes = cases.Sizes(32, 56, 56, 7, 18, 16, 8) if settings.on_gpu else SIZES[1]
    for fused in fused_operators(settings):
        yield check_sizes(fused, "float32", sizes, settings, times=10)
    for operator in OPERATORS:
        channels = 64 if operator.name == "aggregation" else 16  # values, or phi and psi
        stage = OperatorCase(32, channels, 56, 56, 7, groups=8, channels_last=True)
        yield check_case(operator, stage if settings.on_gpu else CHANNELS_LAST[0], torch.float32, settings)


def second_device(settings: Settings) -> Iterator[Row]:
    """Checks all operators on the second GPU while the first one is the current device."""
    count = torch.cuda.device_count()
    if count < 2:
        raise SkipCase(f"needs two GPUs; this machine has {count}")
    yield from small_problems(replace(settings, device="cuda:1"))


def small_problems(settings: Settings) -> Iterator[Row]:
    """Checks every operator at a small size, because a sanitizer makes kernels about 100 times slower."""
    for fused, precision in itertools.product(fused_operators(settings), ("float32", "tf32")):
        yield check_sizes(fused, precision, SIZES[1], settings)
    for operator in OPERATORS:
        yield check_case(operator, CASES[2], torch.float32, settings)
    for case, dtype in itertools.product(CHANNELS_LAST, DTYPES):
        yield check_case(OPERATORS[-1], case, dtype, settings)


def sanitized(tool: str, settings: Settings) -> Iterator[Row]:
    """Runs `small_problems` under compute-sanitizer."""
    if not settings.on_gpu:
        raise SkipCase("needs a GPU")
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise SkipCase("compute-sanitizer is not installed")
    rows = Path(settings.work, f"{tool}.jsonl")
    arguments = [sys.executable, "-m", "tests.gpu.child", settings.to_json(), "correctness/small problems", str(rows)]
    # Each tensor gets its own allocation, so the sanitizer detects an access past its end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # The kernels of torch and cuBLAS are not checked, which would take minutes; ours are in the namespace `san`.
    command = [program, "--tool", tool, "--kernel-name", "kernel_substring=san", "--error-exitcode", "1", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "Device not supported" in done.stdout:
        raise SkipCase("compute-sanitizer does not work on this machine")
    output = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    yield {"check": tool, "passed": done.returncode == 0, "output": output[:20] if done.returncode else output[-1:]}
    # The exit status is 0 even if a check failed.
    end = json.loads(rows.read_text().splitlines()[-1]).get("end", {}) if rows.exists() and rows.stat().st_size else {}
    yield {"check": f"{tool}: all problems passed", "passed": end.get("status") == "passed", **end}


def _case(name: str, run: Callable[[Settings], Iterator[Row]], priority: int, limit: float = 120) -> Case:
    return Case("correctness", name, run, priority, limit)


def _in_groups(names: Sequence[str], groups: int) -> Iterator[tuple[str, list[str]]]:
    for number in range(groups):
        yield f"modules {number + 1} of {groups}", list(names[number::groups])


# The types for training come first. Sanitizers are slow, so they follow the usual networks (24).
NETWORKS = ("san10_pairwise", "san10_patchwise", "san10_scalar")
ALL = [
    *(
        _case(f"{operator} {', '.join(precisions)}", partial(check_fused, operator, precisions), priority)
        for operator in cases.ON_GPU
        for precisions, priority in ((["float32", "tf32", "bfloat16"], 10), (["float16"], 50))
    ),
    _case("operators", operators, 13),
    _case("norm_relu", norm_relu, 13),
    _case("pooling", pooling, 13),
    _case("stem", stem, 13),
    _case("golden numbers", golden, 12),
    *(_case(name, partial(models, name), 13) for name in NETWORKS),
    *(_case(f"{name} compiled", partial(compiled, name), 27, 240) for name in NETWORKS),
    *(_case(name, partial(modules, kinds), 24) for name, kinds in _in_groups(sorted(KINDS), 2)),
    _case("a batch of 32", large_batch, 14),
    _case("same bits in deterministic mode", repeats, 15),
    _case("a second GPU", second_device, 53),
    _case("small problems", small_problems, 54),
    _case("memcheck", partial(sanitized, "memcheck"), 24, 300),
    _case("racecheck", partial(sanitized, "racecheck"), 24, 300),
]
