"""Fused attention: against the reference, gradients, registration, bits, extreme values, fallbacks, graphs, memory."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import conv2d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import san
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention, SelfAttention
from san.ops import library, reference

assert library.load(), "the extension must build: these tests are about it"

ROOT = Path(__file__).parents[2]
KINDS = ("pairwise", "patchwise")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
EPS = 1e-5
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
}


# Modules.


@dataclass(frozen=True)
class Setting:
    """An attention module and its input. Named so that a failing one can be read off the test id."""

    kind: str = "pairwise"
    relation: str = ""
    position: str = "relative"
    transformation: str = "distinct"
    channels: int = 32
    r1: int = 16
    r2: int = 4
    share: int = 4
    footprint: int = 3
    batch: int = 2
    height: int = 6
    width: int = 5

    def module(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> SelfAttention:
        """In which no parameter and no statistic has a special value."""
        torch.manual_seed(seed)
        common = {"r1": self.r1, "r2": self.r2, "share": self.share, "transformation": self.transformation}
        module: SelfAttention
        if self.kind == "pairwise":
            relation = self.relation or "subtraction"
            module = PairwiseAttention(self.channels, self.footprint, relation=relation, position=self.position, **common)
        else:
            module = PatchwiseAttention(self.channels, self.footprint, **common)
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + 0.5 if "running_var" in name else torch.randn_like(tensor) / 2)
            for layer in module.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.bias.abs_()  # keeps gamma's few hidden units alive
        return module.to(dtype)

    def x(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        shape = (self.batch, self.channels, self.height, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

    def __str__(self) -> str:
        default = {f.name: f.default for f in dataclasses.fields(self)}
        said = [f"{k}={v}" for k, v in dataclasses.asdict(self).items() if v != default[k] and k not in ("kind", "relation")]
        return "-".join([self.kind, *([self.relation] if self.relation else []), *said])


SETTINGS = [
    *(
        Setting(relation=r, position=p)
        for r in ("subtraction", "summation", "concatenation")
        for p in san.nn.position.POSITIONS
    ),
    Setting("patchwise"),
    *(Setting(kind, footprint=k, height=7, width=9) for kind in KINDS for k in (1, 5)),
    *(Setting(kind, footprint=7, height=7, width=7) for kind in KINDS),  # both mirror images overlap
    *(Setting(kind, footprint=7, height=4, width=4) for kind in KINDS),  # a map just large enough
    *(Setting(kind, transformation="phi_eq_psi") for kind in KINDS),
    *(Setting(kind, transformation="phi_eq_psi_eq_beta", r1=4) for kind in KINDS),
    *(Setting(kind, channels=112, r1=16, r2=16, share=1, batch=1, height=3, width=8) for kind in KINDS),  # 7 of everything
    *(Setting(kind, channels=80, r1=16, r2=4, share=4) for kind in KINDS),  # 5 weight channels
    *(Setting(kind, channels=64, r1=4, r2=1, share=64) for kind in KINDS),  # one weight channel
    *(Setting(kind, channels=144, r1=8, r2=2, share=3, height=2, width=11, batch=1) for kind in KINDS),
    # Few channels and long rows: vectors run over pixels, of a map with less, as much and more than whole vectors.
    *(Setting(channels=64, r1=32, share=8, height=9, width=w, footprint=k) for w, k in ((15, 3), (16, 5), (37, 3), (67, 7))),
]


class Calls(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def is_fused(module: nn.Module, x: Tensor) -> bool:
    with Calls() as calls:
        copy.deepcopy(module)(x)
    return bool({"san::pairwise", "san::patchwise"} & calls.names)


def results(module: nn.Module, x: Tensor, backend: ops.Backend = "auto") -> dict[str, Tensor]:
    """Output, gradients of the input and of all parameters under a fixed random cotangent, and running statistics after."""
    module = copy.deepcopy(module)
    leaf = x.detach().requires_grad_()  # not cloned: that could change the layout in memory
    with ops.backend(backend):
        y = module(leaf)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
    names = ["y", "x", *(name for name, _ in module.named_parameters())]
    grads = torch.autograd.grad(y, [leaf, *module.parameters()], cotangent)
    return dict(zip(names, (y.detach(), *grads), strict=True)) | dict(module.named_buffers())


def scale_of(name: str, wanted: dict[str, Tensor]) -> float:
    """What an error is measured by: the value's norm, for gradients also others', as some are zero by theory.

    A bias in front of a BatchNorm or a softmax has no influence: its layer's weight says how large its gradient could be.
    """
    if name == "y" or "running" in name or "tracked" in name:
        return wanted[name].double().norm().item()
    scale = max(wanted[name].double().norm().item(), 1e-3 * wanted["x"].double().norm().item())
    weight = name.removesuffix("bias") + "weight"
    return max(scale, wanted[weight].double().norm().item()) if name.endswith(".bias") else scale


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Relative, in norm."""
    assert got.keys() == wanted.keys()
    return {
        name: (got[name].double() - wanted[name].double()).norm().item() / max(scale_of(name, wanted), 1e-30) for name in wanted
    }


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], values: float, gradients: float) -> None:
    found = errors(got, wanted)
    allowed = {name: values if name == "y" or "running" in name else gradients for name in found}
    assert all(found[name] <= allowed[name] for name in found), {n: e for n, e in found.items() if not e <= allowed[n]}


@every_mode
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_matches_reference(setting: Setting, training: bool) -> None:
    module, x = setting.module().train(training), setting.x()
    with Calls() as calls:
        ours = results(module, x)
    assert {f"san::{setting.kind}", f"san::{setting.kind}_backward"} <= calls.names
    assert_close(ours, results(module, x, "reference"), 1e-10, 1e-10)


@every_mode
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_matches_reference_in_float32(setting: Setting, training: bool) -> None:
    module, x = setting.module(torch.float32).train(training), setting.x(torch.float32)
    wanted = results(copy.deepcopy(module).double(), x.double(), "reference")
    assert_close(results(module, x), wanted, 1e-5, 1e-4)


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    relation=st.sampled_from(["subtraction", "summation", "concatenation"]),
    position=st.sampled_from(["none", "absolute", "relative"]),
    shared=st.booleans(),
    sixteenths=st.integers(1, 7),
    reductions=st.sampled_from([(16, 4), (8, 16), (4, 4), (16, 2)]),
    sharing=st.integers(0, 9),
    reach=st.integers(0, 3),
    extra=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    batch=st.integers(1, 3),
    training=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 9),
)
def test_matches_reference_on_any_shape(
    kind: str,
    relation: str,
    position: str,
    shared: bool,
    sixteenths: int,
    reductions: tuple[int, int],
    sharing: int,
    reach: int,
    extra: tuple[int, int],
    batch: int,
    training: bool,
    layout: str,
    seed: int,
) -> None:
    r1, r2 = reductions
    values = 16 * sixteenths // r2
    divisors = [share for share in range(1, values + 1) if values % share == 0]
    setting = Setting(
        kind,
        relation if kind == "pairwise" else "",
        position,
        "phi_eq_psi" if shared else "distinct",
        16 * sixteenths,
        r1,
        r2,
        divisors[sharing % len(divisors)],
        2 * reach + 1,
        batch,
        reach + extra[0],
        reach + extra[1],
    )
    assume(not training or batch * setting.height * setting.width > 1)
    module, x = setting.module(seed=seed).train(training), LAYOUTS[layout](setting.x(seed=seed))
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


@every_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_noncontiguous(kind: str, layout: str) -> None:
    setting = Setting(kind)
    module, x = setting.module(), setting.x()
    ours, wanted = results(module, LAYOUTS[layout](x)), results(module, x, "reference")
    assert_close(ours, wanted, 1e-10, 1e-10)
    is_channels_last = ours["y"].is_contiguous(memory_format=torch.channels_last)
    assert is_channels_last if layout == "channels_last" else ours["y"].is_contiguous()


def gamma_of(module: SelfAttention) -> ops.LRL:
    assert isinstance(module, PairwiseAttention | PatchwiseAttention)
    norm1, _, linear1, norm2, _, linear2 = module.gamma
    norms = [ops.Normalization(n.weight, n.bias, n.running_mean, n.running_var) for n in (norm1, norm2)]
    return ops.LRL(norms[0], linear1.weight.flatten(1), norms[1], linear2.weight.flatten(1), linear2.bias)


@every_kind
@pytest.mark.parametrize("of_beta", LAYOUTS)
@pytest.mark.parametrize("of_others", LAYOUTS)
def test_result_has_the_memory_format_of_beta(kind: str, of_beta: str, of_others: str) -> None:
    setting = Setting(kind, position="none")
    module, x = setting.module(), setting.x()
    phi, psi, beta = module.transform(x)
    attention = ops.pairwise_attention if kind == "pairwise" else ops.patchwise_attention
    others = (LAYOUTS[of_others](map_) for map_ in (phi, psi))
    y, _ = attention(*others, LAYOUTS[of_beta](beta), gamma_of(module), setting.footprint, True, EPS)
    with ops.backend("reference"):
        torch.testing.assert_close(y, module(x), rtol=1e-10, atol=1e-10)
    assert y.is_contiguous(memory_format=torch.channels_last if of_beta == "channels_last" else torch.contiguous_format)


@every_kind
@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_err_at_most_twice_as_much_as_unfused(kind: str, training: bool, dtype: torch.dtype) -> None:
    setting = Setting(kind, channels=64, height=8, width=8)
    module, x = setting.module(dtype).train(training), setting.x(dtype)
    exact = results(copy.deepcopy(module).double(), x.double(), "reference")
    ours, plain = errors(results(module, x), exact), errors(results(module, x, "unfused"), exact)
    rounding = torch.finfo(dtype).eps
    assert all(ours[name] <= 2 * plain[name] + rounding for name in exact), (ours, plain)


@every_kind
def test_bfloat16_autocast_errs_at_most_twice_as_much_as_unfused(kind: str) -> None:
    setting = Setting(kind, channels=64, height=8, width=8)
    module, x = setting.module(torch.float32), setting.x(torch.float32)
    exact = results(copy.deepcopy(module).double(), x.double(), "reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_fused(module, x)
        got, unfused = results(module, x), results(module, x, "unfused")
    assert got["y"].dtype == torch.bfloat16
    assert all(got[name].dtype == parameter.dtype for name, parameter in module.named_parameters())
    ours, plain = errors(got, exact), errors(unfused, exact)
    assert all(ours[name] <= 2 * plain[name] + torch.finfo(torch.bfloat16).eps for name in exact), (ours, plain)


# Operators.


@dataclass(frozen=True)
class Sizes:
    """Of a direct call: batch, map, footprint, and channels of the relation, hidden, of the weights and of the values."""

    batch: int = 2
    height: int = 6
    width: int = 5
    footprint: int = 3
    relation: int = 3
    hidden: int = 5
    weights: int = 2
    values: int = 6


NAMES = (
    *("center", "around", "beta", "gain1", "bias1", "weight1", "gain2", "bias2", "weight2", "bias3"),
    *("mean1", "var1", "mean2", "var2"),
)
PARAMETERS = 10
"""How many tensors in front are differentiated."""
Tensors = dict[str, Tensor]


def sample(kind: str, sizes: Sizes = Sizes(), dtype: torch.dtype = torch.float64) -> Tensors:
    """Arguments of an operator; parameters are of the type that sums are kept in."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    s, positions = sizes, sizes.footprint**2
    image = (s.batch, s.height, s.width)
    d = s.relation if kind == "pairwise" else s.relation * (positions + 1)
    outputs = s.weights if kind == "pairwise" else s.weights * positions
    maps = [random(*image, s.relation), random(*image, s.relation), random(*image, s.values)]
    gamma = [random(d), random(d).abs(), random(s.hidden, d), random(s.hidden), random(s.hidden).abs()]
    last = [random(outputs, s.hidden), random(outputs)]
    statistics = [random(d), random(d).abs() + 0.5, random(s.hidden), random(s.hidden).abs() + 0.5]
    parameter_dtype = torch.promote_types(dtype, torch.float32)
    tensors = [*(x.to(dtype) for x in maps), *(x.to(parameter_dtype) for x in (*gamma, *last, *statistics))]
    return dict(zip(NAMES, tensors, strict=True))


def operator(kind: str) -> Any:
    return getattr(torch.ops.san, kind)


def backward_arguments(kind: str, tensors: Tensors, footprint: int, training: bool) -> tuple[Any, ...]:
    y, extra, *statistics = operator(kind)(*tensors.values(), footprint, training, EPS)
    saved = list(tensors.values())[: PARAMETERS - (kind == "pairwise")]
    return torch.randn_like(y), *saved, *statistics, extra, footprint, training, EPS


def batch_norm(x: Tensor, gain: Tensor, bias: Tensor, mean: Tensor, var: Tensor, training: bool) -> tuple[Tensor, ...]:
    """Of [N, C, ...]; and the statistics that it used."""
    if training:
        axes = (0, *range(2, x.dim()))
        mean, var = x.mean(axes), x.var(axes, correction=0)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return (x - mean.view(shape)) / (var.view(shape) + EPS).sqrt() * gain.view(shape) + bias.view(shape), mean, var


def defined(kind: str, t: Tensors, footprint: int, training: bool) -> tuple[Tensor, ...]:
    """What the operators are defined to be, in plain torch: y [N, H, W, M] and both BatchNorms' statistics."""
    center, around, beta = (t[name].permute(0, 3, 1, 2) for name in ("center", "around", "beta"))
    if kind == "pairwise":
        delta = reference.subtraction(center, around, footprint)
    else:
        delta = torch.cat((center.flatten(2), reference.unfold(around, footprint).flatten(1, 2)), 1).unsqueeze(2)
    v1, mean1, var1 = batch_norm(delta, t["gain1"], t["bias1"], t["mean1"], t["var1"], training)
    u = conv2d(v1.relu(), t["weight1"][:, :, None, None])
    v2, mean2, var2 = batch_norm(u, t["gain2"], t["bias2"], t["mean2"], t["var2"], training)
    z = conv2d(v2.relu(), t["weight2"][:, :, None, None], t["bias3"])
    weight = z.softmax(2) if kind == "pairwise" else z.unflatten(1, (-1, footprint**2)).squeeze(3)
    return reference.aggregation(beta, weight, footprint).permute(0, 2, 3, 1), mean1, var1, mean2, var2


def differentiated(function: Callable[..., tuple[Tensor, ...]], tensors: Tensors) -> list[Tensor]:
    """All outputs of function(tensors), and the gradients of y under a fixed random cotangent."""
    leaves = {name: x.detach().requires_grad_(name in NAMES[:PARAMETERS]) for name, x in tensors.items()}
    y, *rest = function(leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
    grads = torch.autograd.grad(y, list(leaves.values())[:PARAMETERS], cotangent, allow_unused=True)
    return [y.detach(), *(x.detach() for x in rest), *(torch.zeros(()) if g is None else g for g in grads)]


def run(kind: str, footprint: int, training: bool) -> Callable[[Tensors], tuple[Tensor, ...]]:
    return lambda tensors: operator(kind)(*tensors.values(), footprint, training, EPS)


SIZES = [
    Sizes(height=9, width=6, footprint=5),
    Sizes(1, 9, 8, footprint=15),  # more positions than a tile has rows
    Sizes(1, 13, 11, values=2 * 11 * 8),  # 8 + 2 + 1 shares of a vector
    Sizes(1, 5, 5, relation=17, hidden=33, weights=7, values=21),  # nothing fills its vectors
    Sizes(2, 4, 3, relation=1, hidden=1, weights=1, values=1),
    # Few channels and long rows: vectors run over pixels.
    Sizes(2, 8, 37, relation=5, hidden=3, weights=1, values=9),
    Sizes(1, 9, 67, footprint=7, relation=6, hidden=3, weights=3, values=33),
]


@every_kind
@every_mode
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_its_definition(kind: str, training: bool, sizes: Sizes) -> None:
    tensors = sample(kind, sizes)
    y, _, *ours = differentiated(run(kind, sizes.footprint, training), tensors)
    wanted = differentiated(lambda t: defined(kind, t, sizes.footprint, training), tensors)
    for got, want in zip((y, *ours), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@every_kind
def test_noncontiguous_gradient(kind: str) -> None:
    leaves = [x.requires_grad_() for x in list(sample(kind).values())[:PARAMETERS]]
    rest = list(sample(kind).values())[PARAMETERS:]
    y = operator(kind)(*leaves, *rest, 3, True, EPS)[0]
    factor = torch.ones((), dtype=y.dtype).expand(y.shape)
    ours = torch.autograd.grad(y, leaves, factor, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(y, leaves, factor.contiguous()), rtol=0, atol=0)


@every_mode
def test_patchwise_takes_no_center(training: bool) -> None:
    sizes = Sizes()
    tensors = sample("patchwise", sizes)
    for name in ("gain1", "bias1", "mean1", "var1"):
        tensors[name] = tensors[name][sizes.relation :]
    tensors |= {"center": tensors["center"][..., :0], "weight1": tensors["weight1"][:, sizes.relation :]}
    y, _, *ours = differentiated(run("patchwise", sizes.footprint, training), tensors)
    wanted = differentiated(lambda t: defined("patchwise", t, sizes.footprint, training), tensors)
    for got, want in zip((y, *ours), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@every_kind
@every_mode
def test_gradcheck(kind: str, training: bool) -> None:
    tensors = sample(kind, Sizes(batch=1, height=3, width=4, relation=2, hidden=3, values=4))
    leaves = [x.requires_grad_(name in NAMES[:PARAMETERS]) for name, x in tensors.items()]
    assert torch.autograd.gradcheck(lambda *x: operator(kind)(*x, 3, training, EPS)[0], leaves)


@every_kind
@every_mode
def test_only_the_result_is_differentiable(kind: str, training: bool) -> None:
    leaves = [x.requires_grad_(name in NAMES[:PARAMETERS]) for name, x in sample(kind).items()]
    outputs = operator(kind)(*leaves, 3, training, EPS)
    assert [x.requires_grad for x in outputs] == [True, *[False] * 5]


ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels first": lambda x: x.movedim(-1, 1).contiguous().movedim(1, -1) if x.dim() > 1 else x,
}


@every_kind
@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_opcheck(kind: str, training: bool, dtype: torch.dtype, arranged: str) -> None:
    tensors = {name: ARRANGED[arranged](x) for name, x in sample(kind, dtype=dtype).items()}
    leaves = [x.requires_grad_(name in NAMES[:PARAMETERS]) for name, x in tensors.items()]
    torch.library.opcheck(operator(kind).default, (*leaves, 3, training, EPS))


@every_kind
@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_opcheck_backward(kind: str, training: bool, dtype: torch.dtype, arranged: str) -> None:
    tensors = {name: ARRANGED[arranged](x) for name, x in sample(kind, dtype=dtype).items()}
    arguments = backward_arguments(kind, tensors, 3, training)
    torch.library.opcheck(operator(f"{kind}_backward").default, arguments)


@every_kind
@every_mode
def test_empty_batch(kind: str, training: bool) -> None:
    sizes = Sizes(batch=0)
    y, *rest = differentiated(run(kind, sizes.footprint, training), sample(kind, sizes))
    assert y.shape == (0, sizes.height, sizes.width, sizes.values)
    assert all(x.isfinite().all() for x in rest)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@every_kind
@every_mode
@pytest.mark.parametrize("sizes", [Sizes(1, 41, 9, 3), Sizes(5, 12, 12, 5), Sizes(70, 4, 4, 3)], ids=str)
def test_same_bits_with_any_number_of_threads(kind: str, training: bool, sizes: Sizes, threads: Callable[[int], None]) -> None:
    tensors = sample(kind, sizes, torch.float32)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(differentiated(run(kind, sizes.footprint, training), tensors))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@every_kind
@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("instructions", ["baseline", "v3", "v4"])
@pytest.mark.parametrize("sizes", [Sizes(2, 11, 13, 5, 9, 17, 5, 20), Sizes(2, 8, 37, 3, 6, 3, 1, 16)], ids=str)
def test_every_instruction_set_gives_the_same_numbers(
    kind: str, training: bool, dtype: torch.dtype, instructions: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample(kind, sizes)
    monkeypatch.setenv("SAN_CPU", instructions)  # the best of those that the machine has, up to this one
    inputs = {name: x.to(dtype) for name, x in tensors.items()}
    y, _, *ours = differentiated(run(kind, sizes.footprint, training), inputs)
    wanted = differentiated(lambda t: defined(kind, t, sizes.footprint, training), tensors)
    for got, want in zip((y, *ours), wanted, strict=True):
        largest = max(want.norm().item(), 1.0)
        assert (got.double() - want).norm().item() <= (1e-4 if dtype == torch.float32 else 1e-11) * largest


@every_kind
def test_rejects_an_unknown_instruction_set(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAN_CPU", "nonsense")
    with pytest.raises(RuntimeError, match="SAN_CPU must be baseline, v3 or v4, not nonsense"):
        operator(kind)(*sample(kind).values(), 3, True, EPS)


def _changed(kind: str, name: str, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    tensors = sample(kind, dtype=dtype)
    return *(tensors | {name: change(tensors[name])}).values(), 3, True, EPS


REFUSALS: dict[str, tuple[str, Callable[[str], tuple[Any, ...]], str]] = {
    "even footprint": ("pairwise", lambda kind: (*sample(kind).values(), 2, True, EPS), "2x2 footprint does not fit a 6x5 map"),
    "large footprint": ("pairwise", lambda kind: (*sample(kind).values(), 11, True, EPS), "11x11 footprint does not fit a 6x5"),
    "three dimensions": ("both", lambda kind: _changed(kind, "center", lambda x: x[0]), "center must have 4 dimensions"),
    "two batches": ("both", lambda kind: _changed(kind, "beta", lambda x: x[:1]), "must be maps of one size"),
    "two sizes": (
        "pairwise",
        lambda kind: _changed(kind, "around", lambda x: x[:, 1:]),
        "center and around must have one shape",
    ),
    "relation channels": (
        "patchwise",
        lambda kind: _changed(kind, "center", lambda x: x[..., :2]),
        "center must have around's 3 channels or none",
    ),
    "values not shared evenly": (
        "both",
        lambda kind: _changed(kind, "beta", lambda x: x[..., :5]),
        "beta's channels must be a positive multiple of the",
    ),
    "no values": ("both", lambda kind: _changed(kind, "beta", lambda x: x[..., :0]), "beta's channels must be a positive"),
    "weight1": ("both", lambda kind: _changed(kind, "weight1", lambda x: x[:, 1:]), r"weight1 must be \[E, "),
    "weight2": ("both", lambda kind: _changed(kind, "weight2", lambda x: x[:, 1:]), r"and weight2|weight2 \[G"),
    "gain1": ("both", lambda kind: _changed(kind, "gain1", lambda x: x[1:]), "the first BatchNorm must have"),
    "var1": ("both", lambda kind: _changed(kind, "var1", lambda x: x[1:]), "the first BatchNorm must have"),
    "bias2": ("both", lambda kind: _changed(kind, "bias2", lambda x: x[:, None]), "the second BatchNorm must have"),
    "mean2": ("both", lambda kind: _changed(kind, "mean2", lambda x: x[1:]), "the second BatchNorm must have"),
    "bias3": ("patchwise", lambda kind: _changed(kind, "bias3", lambda x: x[1:]), r"bias3 \[G \* K\]"),
    "parameters of another type": (
        "both",
        lambda kind: _changed(kind, "weight1", lambda x: x.float()),
        "must be float64 for float64 maps and float32 for others",
    ),
    "half parameters": (
        "both",
        lambda kind: _changed(kind, "gain2", lambda x: x.bfloat16(), torch.bfloat16),
        "must be float64 for float64 maps and float32 for others",
    ),
}


@pytest.mark.parametrize(
    ("what", "kind"), [(what, kind) for what, row in REFUSALS.items() for kind in (KINDS if row[0] == "both" else row[:1])]
)
def test_rejects_below_python(what: str, kind: str) -> None:
    _, arguments, message = REFUSALS[what]
    with pytest.raises(RuntimeError, match=message):
        operator(kind)(*arguments(kind))


@pytest.mark.parametrize("at", [0, -2], ids=["gradient", "what forward kept"])
@every_kind
def test_rejects_another_shape_in_backward(kind: str, at: int) -> None:
    arguments = list(backward_arguments(kind, sample(kind), 3, True))
    where = 0 if at == 0 else len(arguments) - 4
    arguments[where] = arguments[where][:1]
    with pytest.raises(RuntimeError, match="must have one shape" if at == 0 else r"must be \[N, H, W, [EG]\]"):
        operator(f"{kind}_backward")(*arguments)


def test_rejects_a_footprint_of_nothing() -> None:
    """In a process of its own, which it must survive."""
    code = """
from tests.ops.test_fused import KINDS, EPS, operator, sample
for kind in KINDS:
    try:
        operator(kind)(*sample(kind).values(), 0, True, EPS)
    except RuntimeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    assert done.stdout.count("0x0 footprint does not fit") == 2


def test_is_ready_without_a_module() -> None:
    """In a process of its own, in which nothing has asked for the kernels yet."""
    code = """
import torch, san
from san.ops import LRL, Normalization, pairwise_attention
x, one = torch.randn(1, 4, 5, 5), torch.ones(4)
norm = Normalization(one, one, one, one)
print(pairwise_attention(x, x, x, LRL(norm, torch.ones(4, 4), norm, torch.ones(2, 4), one[:2]), 3, True, 1e-5)[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "[1, 4, 5, 5]" in done.stdout, done.stderr


@every_kind
def test_runs_in_inference_mode(kind: str) -> None:
    module, x = Setting(kind).module().eval(), Setting(kind).x()
    with torch.inference_mode():
        y = module(x)
    torch.testing.assert_close(y.clone(), module(x), rtol=0, atol=0)


@every_kind
@pytest.mark.parametrize("trained", ["x", "gamma.2.weight", "beta.bias"])
def test_frozen_parameters_get_no_gradient(kind: str, trained: str) -> None:
    module, x = Setting(kind).module().requires_grad_(False), Setting(kind).x()
    wanted = results(module.requires_grad_(), x, "reference")[trained]
    module.requires_grad_(False)
    leaf = x.requires_grad_() if trained == "x" else module.get_parameter(trained).requires_grad_()
    y = module(x)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(y, leaf, cotangent)[0], wanted, rtol=1e-10, atol=1e-10)


# Extreme values.


@pytest.mark.parametrize(
    # softmax cancels bias3: pairwise attention does not read it
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in NAMES if (kind, name) != ("pairwise", "bias3")],
)
@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_not_finite_is_not_lost(kind: str, training: bool, name: str, dtype: torch.dtype) -> None:
    """Neither in the output nor in the statistics."""
    for value in (float("nan"), float("inf"), float("-inf")):
        tensors = sample(kind, dtype=dtype)
        tensors[name].view(-1)[tensors[name].numel() // 2] = value
        y, _, *ours = run(kind, 3, training)(tensors)
        for what, got, want in zip(("y", *NAMES[PARAMETERS:]), (y, *ours), defined(kind, tensors, 3, training), strict=True):
            lost = got.isfinite() & ~want.isfinite()
            assert not lost.any(), f"{value}: {what} is finite at {int(lost.sum())} places where it must not be"
            if what == "y" and value != value:  # inf meets 0 in another order
                assert torch.equal(got.isfinite(), want.isfinite())


@every_kind
@every_mode
@pytest.mark.parametrize("name", [name for name in NAMES[:PARAMETERS] if name != "bias3"])
def test_not_a_number_reaches_the_gradients(kind: str, training: bool, name: str) -> None:
    tensors = sample(kind, dtype=torch.float32)
    tensors[name].view(-1)[0] = float("nan")
    grads = differentiated(run(kind, 3, training), tensors)[-PARAMETERS:]
    assert not torch.stack([g.norm() for g in grads]).norm().isfinite()


def _of_images(x: Tensor) -> Tensor:
    """Means that differ between the images of a batch, 200 times as much as the pixels of each."""
    return x + 100 * (-1) ** torch.arange(len(x)).view(-1, 1, 1, 1)


def _slope(x: Tensor) -> Tensor:
    """Neighbours differ by little, as the coordinates of a map do."""
    return torch.linspace(-1, 1, x.shape[1]).view(1, -1, 1, 1).expand(x.shape)


LARGE_MEANS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "of both": lambda x, y: (x + 1000, y + 1000),
    "of opposite signs": lambda x, y: (x + 1000, y - 1000),
    "of center": lambda x, y: (x - 1000, y),
    "of images": lambda x, y: (_of_images(x), y),
    "of images, both": lambda x, y: (_of_images(x), _of_images(y)),
    "slopes": lambda x, y: (_slope(x), _slope(y)),
}


@every_kind
@pytest.mark.parametrize("which", LARGE_MEANS)
def test_statistics_of_large_means(kind: str, which: str) -> None:
    sizes = Sizes(batch=4, height=48, width=48)
    tensors = sample(kind, sizes, torch.float32)
    tensors["center"], tensors["around"] = (x.contiguous() for x in LARGE_MEANS[which](tensors["center"], tensors["around"]))
    _, _, mean1, var1, mean2, var2 = run(kind, sizes.footprint, True)(tensors)
    _, *wanted = defined(kind, {name: x.double() for name, x in tensors.items()}, sizes.footprint, True)
    for mean, var, mean_wanted, var_wanted in ((mean1, var1, *wanted[:2]), (mean2, var2, *wanted[2:])):
        assert ((var - var_wanted) / var_wanted).abs().max() < 1e-4
        tolerance = 1e-4 * var_wanted.sqrt() + torch.finfo(torch.float32).eps * mean_wanted.abs()
        assert ((mean - mean_wanted).abs() <= tolerance).all()


@every_kind
@every_mode
@pytest.mark.parametrize("times", [1e4, 1e6, 1e20, 1e30], ids=str)
def test_extreme_logits_do_not_overflow(kind: str, training: bool, times: float) -> None:
    tensors = sample(kind, dtype=torch.float32)
    tensors["weight2"] *= times
    y, logsumexp, *_ = run(kind, 3, training)(tensors)
    wanted, *_ = defined(kind, {name: x.double() for name, x in tensors.items()}, 3, training)
    assert logsumexp.isfinite().all()
    assert (y - wanted).norm() <= 1e-3 * wanted.norm()


@every_mode
def test_a_saturated_softmax_has_no_gradient(training: bool) -> None:
    """One position has all the weight, so gamma moves nothing."""
    tensors = sample("pairwise", dtype=torch.float32)
    tensors["weight2"] *= 1e6
    wanted = differentiated(lambda t: defined("pairwise", t, 3, training), {name: x.double() for name, x in tensors.items()})
    ours = differentiated(run("pairwise", 3, training), tensors)
    for name, got, want in zip(NAMES, ours[-PARAMETERS:], wanted[-PARAMETERS:], strict=False):
        if name != "beta":
            assert (got - want).abs().max() < 1e-3, name


@every_mode
@pytest.mark.parametrize("times", [1e2, 1e3], ids=str)
def test_sharp_softmax_errs_at_most_ten_times_as_much_as_torch(training: bool, times: float) -> None:
    """torch keeps the weights; recomputed ones must be as exact."""
    sizes = Sizes(height=16, width=16)
    tensors = sample("pairwise", sizes, dtype=torch.float32)
    tensors["weight2"] *= times
    exact = differentiated(lambda t: defined("pairwise", t, 3, training), {name: x.double() for name, x in tensors.items()})
    plain = differentiated(lambda t: defined("pairwise", t, 3, training), tensors)
    ours = differentiated(run("pairwise", 3, training), tensors)
    for name, got, torch_got, want in zip(NAMES, *(x[-PARAMETERS:] for x in (ours, plain, exact)), strict=False):
        if name != "bias3":
            error, allowed = ((x - want).norm().item() / want.norm().item() for x in (got, torch_got))
            assert error <= 10 * allowed + 1e-5, name


# What runs operator by operator.


class Normed(nn.BatchNorm2d):
    """Another kind of BatchNorm."""


class Watched(nn.Sequential):
    """Another kind of gamma."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _norm(module: Any, at: int = 0, **options: Any) -> None:
    old = module.gamma[at]
    new = options.pop("cls", nn.BatchNorm2d)(old.num_features, **options).to(old.weight)
    if new.affine:
        nn.init.uniform_(new.weight, 0.5, 1.5)
    module.gamma[at] = new


def _linear(module: Any, at: int, bias: bool) -> None:
    old = module.gamma[at]
    new = nn.Conv2d(old.in_channels, old.out_channels, 1, bias=bias).to(old.weight)
    if new.bias is not None:
        nn.init.normal_(new.bias)
    module.gamma[at] = new


def _weight_norm(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.gamma[2])


def _replace(module: Any, gamma: nn.Module) -> None:
    module.gamma = gamma


def nothing(*_: Any) -> None:
    """A hook."""


UNFUSED: dict[str, Callable[[Any], Any]] = {
    "a hook on a layer": lambda m: m.gamma[3].register_forward_hook(nothing),
    "a hook before a layer": lambda m: m.gamma[5].register_forward_pre_hook(nothing),
    "a hook on a layer's gradients": lambda m: m.gamma[2].register_full_backward_hook(nothing),
    "a hook before a layer's gradients": lambda m: m.gamma[2].register_full_backward_pre_hook(nothing),
    "a hook on gamma": lambda m: m.gamma.register_forward_hook(nothing),
    "a hook on gamma's gradients": lambda m: m.gamma.register_full_backward_hook(nothing),
    "a hook before gamma's gradients": lambda m: m.gamma.register_full_backward_pre_hook(nothing),
    "another kind of BatchNorm": lambda m: _norm(m, 3, cls=Normed),
    "SyncBatchNorm": lambda m: (_norm(m, 0, cls=nn.SyncBatchNorm), m.eval()),
    "no momentum": lambda m: _norm(m, 0, momentum=None),
    "no running statistics": lambda m: _norm(m, 3, track_running_stats=False),
    "no gain": lambda m: _norm(m, 0, affine=False),
    "two eps": lambda m: _norm(m, 3, eps=1e-3),
    "one BatchNorm in evaluation": lambda m: m.gamma[0].eval(),
    "the other BatchNorm in evaluation": lambda m: m.gamma[3].eval(),
    "a layer with parametrisation": _weight_norm,
    "a first Linear with bias": lambda m: (_linear(m, 2, True), m.eval()),
    "a last Linear without bias": lambda m: _linear(m, 5, False),
    "another kind of gamma": lambda m: _replace(m, Watched(*m.gamma)),
    "a wrapped gamma": lambda m: _replace(m, torch.compile(m.gamma, backend="eager")),
    "an activation in place of ReLU": lambda m: m.gamma.__setitem__(1, nn.LeakyReLU()),
}


@every_kind
@pytest.mark.parametrize("change", UNFUSED)
def test_runs_unfused(kind: str, change: str) -> None:
    setting = Setting(kind)
    module, x = setting.module(), setting.x()
    UNFUSED[change](module)
    with Calls() as calls:
        y = module(x) if change == "a wrapped gamma" else copy.deepcopy(module)(x)
    assert not calls.names & {"san::pairwise", "san::patchwise"}
    if change != "a wrapped gamma":  # which cannot be copied
        assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)
    assert y.shape == (2, 8, 6, 5)


def test_a_hook_on_the_position_runs() -> None:
    module = Setting().module()
    seen: list[torch.Size] = []
    module.get_submodule("position").register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    module(Setting().x())
    assert seen == [torch.Size((1, 2, 9, 30))]


class SharperPairwise(PairwiseAttention):
    """Weighs in a way of its own."""

    def weigh(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
        return super().weigh(phi_NRHW, psi_NRHW).square()


class SharperPatchwise(PatchwiseAttention):
    """Weighs in a way of its own."""

    def weigh(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
        return super().weigh(phi_NRHW, psi_NRHW).square()


@pytest.mark.parametrize("cls", [SharperPairwise, SharperPatchwise])
def test_a_subclass_that_weighs_otherwise_does(cls: type[SelfAttention]) -> None:
    module, x = cls(32, 3, share=4).double(), Setting().x()  # type: ignore[call-arg]
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


@pytest.mark.parametrize("after", ["forward", "backward"])
@every_kind
def test_a_hook_sees_what_it_is_for(kind: str, after: str) -> None:
    module = Setting(kind).module()
    seen: list[torch.Size] = []
    if after == "forward":
        module.get_submodule("gamma.2").register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    else:
        module.get_submodule("gamma.2").register_full_backward_hook(lambda layer, grads, to: seen.append(to[0].shape))
    module(Setting(kind).x()).sum().backward()
    assert seen == [torch.Size((2, 2, *((9, 30) if kind == "pairwise" else (1, 30))))]


@pytest.mark.parametrize("relation", ["hadamard", "dot", "star", "clique"])
def test_other_relations_run_unfused(relation: str) -> None:
    cls = PairwiseAttention if relation in ("hadamard", "dot") else PatchwiseAttention
    module: SelfAttention = cls(32, 3, relation=relation, share=4).double()
    x = Setting().x()
    assert not is_fused(module, x)
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


@every_kind
@pytest.mark.parametrize("mapping", ["L", "LRLRL"])
def test_other_mappings_run_unfused(kind: str, mapping: str) -> None:
    cls = PairwiseAttention if kind == "pairwise" else PatchwiseAttention
    module: SelfAttention = cls(32, 3, mapping=mapping, share=4).double()
    x = Setting().x()
    assert not is_fused(module, x)
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


@every_kind
def test_fuses_where_it_may(kind: str) -> None:
    x = torch.zeros(1, 1, 3, 3)
    assert ops.fuses(kind, x)
    assert not ops.fuses(kind, x.to("meta"))
    for name in ("unfused", "reference"):
        with ops.backend(name):
            assert not ops.fuses(kind, x)
            assert not is_fused(Setting(kind).module(), Setting(kind).x())


@every_kind
def test_backend_reference_runs_no_kernel(kind: str) -> None:
    module, x = Setting(kind).module(), Setting(kind).x()
    with ops.backend("reference"), Calls() as calls:
        module(x).sum().backward()
    assert not [name for name in calls.names if name.startswith("san::")]


@every_kind
def test_a_module_takes_an_empty_batch(kind: str) -> None:
    setting = Setting(kind, batch=0)
    module = setting.module().eval()
    ours = results(module, setting.x())
    assert ours["y"].shape == (0, 8, 6, 5)
    assert all((grad == 0).all() for name, grad in ours.items() if name in dict(module.named_parameters()))


@every_kind
def test_rejects_training_on_one_value_per_channel(kind: str) -> None:
    setting = Setting(kind, footprint=1, batch=1, height=1, width=1)
    with pytest.raises(ValueError, match="training needs more than 1 value per channel: a larger batch, map or footprint"):
        setting.module()(setting.x())
    assert setting.module().eval()(setting.x()).shape == (1, 8, 1, 1)


@every_kind
def test_rejects_a_map_that_is_too_small(kind: str) -> None:
    setting = Setting(kind, footprint=7, height=3, width=9)
    with pytest.raises(ValueError, match="7x7 footprint needs a map of at least 4x4, not 3x9"):
        setting.module()(setting.x())


# Around the operators: counts, graphs, second derivatives, memory.


@every_kind
@pytest.mark.parametrize("transformation", ["distinct", "phi_eq_psi"])
def test_counts_the_flops_of_what_it_fuses(kind: str, transformation: str) -> None:
    setting = Setting(kind, transformation=transformation, footprint=5)
    counted = {}
    for name in ("auto", "unfused"):
        module, x = setting.module(), setting.x().requires_grad_()
        with ops.backend(name), FlopCounterMode(display=False) as forward:
            y = module(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        counted[name] = forward.get_total_flops(), backward.get_total_flops()
    assert counted["auto"] == counted["unfused"]
    assert counted["auto"][0] > 0 and counted["auto"][1] > counted["auto"][0]


def small(kind: str) -> nn.Module:
    """A whole network in which no parameter has a special value."""
    torch.manual_seed(0)
    model = san.create_model(f"san10_{kind}", 10, stages=1, width_factor=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


IMAGES = torch.randn(3, 3, 24, 28, generator=torch.Generator().manual_seed(1))


@every_kind
@every_mode
def test_compiles_to_one_graph(kind: str, training: bool) -> None:
    torch.compiler.reset()
    called: list[set[str]] = []

    def note(graph: Any, inputs: Any) -> Any:
        called.append({node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")})
        return make_boxed_func(graph)

    model = small(kind).train(training)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    assert_close(results_of(compiled), results_of(model), 1e-5, 1e-4)
    forward, backward = called
    assert f"san::{kind}" in forward and f"san::{kind}_backward" in backward


def results_of(model: Any) -> dict[str, Tensor]:
    """Logits, gradients and buffers of a whole network on `IMAGES`."""
    leaf = IMAGES.clone().requires_grad_()
    y = model(leaf)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    y.backward(cotangent)
    names = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": leaf.grad} | names | {n.removeprefix("_orig_mod."): b for n, b in model.named_buffers()}


@every_kind
def test_compiles_for_any_size(kind: str) -> None:
    torch.compiler.reset()
    module = Setting(kind).module()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, height, width in ((2, 6, 5), (3, 7, 9)):
        x = Setting(kind, batch=batch, height=height, width=width).x()
        torch.testing.assert_close(compiled(x), module(x))
    for got, want in zip(compiled.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(got, want)


@every_kind
def test_a_network_equals_the_reference(kind: str) -> None:
    model = small(kind).double()
    with Calls() as calls:
        ours = results(model, IMAGES.double())
    assert f"san::{kind}" in calls.names and f"san::{kind}_backward" in calls.names
    assert_close(ours, results(model, IMAGES.double(), "reference"), 1e-9, 1e-8)


@every_kind
@every_mode
def test_rejects_a_second_derivative(kind: str, training: bool) -> None:
    module, x = Setting(kind).module().train(training), Setting(kind).x().requires_grad_()
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    sentence = rf'san::{kind} has no second derivative; run the model under san.ops.backend\("unfused"\)'
    with pytest.raises(RuntimeError, match=sentence):
        grad.square().sum().backward()


@every_kind
def test_unfused_has_a_second_derivative(kind: str) -> None:
    setting = Setting(kind, channels=16, r1=8, batch=1, height=3, width=3)
    module = setting.module()
    with ops.backend("unfused"):
        assert torch.autograd.gradgradcheck(lambda x: module(x), setting.x().requires_grad_(), fast_mode=True)


@every_kind
def test_keeps_nothing_of_a_footprints_size_for_backward(kind: str) -> None:
    def kept(footprint: int, backend: ops.Backend = "auto") -> list[int]:
        setting = Setting(kind, channels=64, footprint=footprint, height=24, width=24)
        module, x = setting.module(), setting.x().requires_grad_()
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with ops.backend(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        return sizes

    small_footprint, large_footprint = kept(3), kept(11)
    assert len(small_footprint) == len(large_footprint)
    assert max(large_footprint) == max(small_footprint) == 2 * 64 * 24 * 24  # the input
    grown = sum(large_footprint) - sum(small_footprint)
    assert grown <= 2 * 64 * (121 - 9)  # of patchwise attention's parameters
    assert max(kept(11, "unfused")) >= 2 * 24 * 24 * 121  # or this test would show nothing


def test_peak_memory_does_not_grow_with_the_footprint() -> None:
    """In a process of its own, whose peak can be read."""
    code = """
import resource, torch
from tests.ops.test_fused import KINDS, Setting
torch.set_num_threads(1)
def train(kind, footprint, side):
    setting = Setting(kind, channels=64, footprint=footprint, height=side, width=side)
    setting.module(torch.float32)(setting.x(torch.float32).requires_grad_()).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
for kind in KINDS:
    train(kind, 11, 8)
small = [train(kind, 3, 64) for kind in KINDS]
large = [train(kind, 11, 64) for kind in KINDS]
print(max(small), *large)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    small_footprint, *large_footprints = map(float, done.stdout.split())
    one_map = 2 * 64 * 64 * 64 * 4 / 2**20
    # The relation over 11x11 positions alone would take 6 channels * 121 / 64: 11 maps.
    assert max(large_footprints) - small_footprint < 2 * one_map + 8, done.stdout  # 8 MiB: partial sums of many parameters
