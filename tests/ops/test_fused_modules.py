"""Attention modules on fused operators: against the reference, what runs unfused, graphs, memory."""

from __future__ import annotations

import copy
import dataclasses
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import san
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention, SelfAttention
from san.ops import library
from san.ops.functional import fuses
from tests.ops.cases import KINDS

assert library.load(), "the extension must build: these tests are about it"

ROOT = Path(__file__).parents[2]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
FUSED = {"pairwise": "san::pair_weights", "patchwise": "san::patch_linear"}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
}


@dataclass(frozen=True)
class Setting:
    """An attention module and its input. Named so that a failing one can be read off the test id."""

    kind: str = "pairwise"
    relation: str = ""
    mapping: str = "LRL"
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
        common: dict[str, Any] = {
            "mapping": self.mapping,
            "r1": self.r1,
            "r2": self.r2,
            "group_size": self.share,
            "transformation": self.transformation,
        }
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
        for r in ("subtraction", "summation", "concatenation", "hadamard")
        for p in san.nn.position.POSITIONS
    ),
    *(Setting(relation=r, mapping="L") for r in ("subtraction", "hadamard")),
    *(Setting("patchwise", mapping=m) for m in ("L", "LRLRL")),
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
    *(
        Setting(kind, channels=64, r1=32, share=8, height=9, width=w, footprint=k)
        for kind in KINDS
        for w, k in ((15, 3), (16, 5), (37, 3), (67, 7))
    ),
    *(Setting(kind, channels=64, share=8, height=9, width=37, transformation="phi_eq_psi") for kind in KINDS),
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
    return bool(set(FUSED.values()) & calls.names)


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
    assert {FUSED[setting.kind], f"{FUSED[setting.kind]}_backward"} <= calls.names
    assert_close(ours, results(module, x, "reference"), 1e-10, 1e-10)


@every_mode
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_matches_reference_in_float32(setting: Setting, training: bool) -> None:
    module, x = setting.module(torch.float32).train(training), setting.x(torch.float32)
    wanted = results(copy.deepcopy(module).double(), x.double(), "reference")
    assert_close(results(module, x), wanted, 1e-5, 1e-4)


@settings(max_examples=120)
@given(
    kind=st.sampled_from(KINDS),
    relation=st.sampled_from(["subtraction", "summation", "concatenation", "hadamard"]),
    mapping=st.sampled_from(["L", "LRL"]),
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
    mapping: str,
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
        mapping,
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


@every_kind
@pytest.mark.parametrize("of_beta", LAYOUTS)
@pytest.mark.parametrize("of_others", LAYOUTS)
def test_result_has_the_memory_format_of_beta(kind: str, of_beta: str, of_others: str) -> None:
    setting = Setting(kind)
    module, x = setting.module(), setting.x()
    phi, psi, beta = module.transform(x)
    y = module.attend(*(LAYOUTS[of_others](map_) for map_ in (phi, psi)), LAYOUTS[of_beta](beta))
    with ops.backend("reference"):
        torch.testing.assert_close(y, setting.module()(x), rtol=1e-10, atol=1e-10)
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
        nn.init.normal_(new.bias)  # without one, ReLU of the pairs (i, i) hangs on rounding: their position is 0
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
    "a hook on a layer": lambda m: m.gamma[0].register_forward_hook(nothing),
    "a hook before a layer": lambda m: m.gamma[2].register_forward_pre_hook(nothing),
    "a hook on a layer's gradients": lambda m: m.gamma[2].register_full_backward_hook(nothing),
    "a hook before a layer's gradients": lambda m: m.gamma[2].register_full_backward_pre_hook(nothing),
    "a hook on gamma": lambda m: m.gamma.register_forward_hook(nothing),
    "a hook on gamma's gradients": lambda m: m.gamma.register_full_backward_hook(nothing),
    "a hook before gamma's gradients": lambda m: m.gamma.register_full_backward_pre_hook(nothing),
    "another kind of BatchNorm": lambda m: _norm(m, 0, cls=Normed),
    "SyncBatchNorm": lambda m: (_norm(m, 0, cls=nn.SyncBatchNorm), m.eval()),
    "a layer with parametrisation": _weight_norm,
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
    assert not calls.names & set(FUSED.values())
    if change != "a wrapped gamma":  # which cannot be copied
        assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)
    assert y.shape == (2, 8, 6, 5)


STILL_FUSED: dict[str, Callable[[Any], Any]] = {
    "no momentum": lambda m: _norm(m, 0, momentum=None),
    "no running statistics": lambda m: _norm(m, 3, track_running_stats=False),
    "no gain": lambda m: _norm(m, 0, affine=False),
    "two eps": lambda m: _norm(m, 3, eps=1e-3),
    "one BatchNorm in evaluation": lambda m: m.gamma[0].eval(),
    "the other BatchNorm in evaluation": lambda m: m.gamma[3].eval(),
    "a first Linear with bias": lambda m: _linear(m, 2, True),
    "a last Linear without bias": lambda m: _linear(m, 5, False),
}


@every_kind
@pytest.mark.parametrize("change", STILL_FUSED)
def test_fuses_any_scale_and_shift(kind: str, change: str) -> None:
    setting = Setting(kind)
    module, x = setting.module(), setting.x()
    STILL_FUSED[change](module)
    assert is_fused(module, x)
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


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
    module, x = cls(32, 3, group_size=4).double(), Setting().x()  # type: ignore[call-arg]
    nn.init.normal_(module.get_parameter("gamma.0.bias"))
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


@pytest.mark.parametrize("relation", ["dot", "star", "clique"])
def test_other_relations_run_unfused(relation: str) -> None:
    cls = PairwiseAttention if relation == "dot" else PatchwiseAttention
    module: SelfAttention = cls(32, 3, relation=relation, group_size=4).double()
    x = Setting().x()
    assert not is_fused(module, x)
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


def test_two_hidden_layers_of_pairs_run_unfused() -> None:
    module, x = Setting(mapping="LRLRL").module(), Setting().x()
    assert not is_fused(module, x)
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


@every_kind
def test_fuses_where_it_may(kind: str) -> None:
    x, operator = torch.zeros(1, 1, 3, 3), FUSED[kind].removeprefix("san::")
    assert fuses(operator, x)
    assert not fuses(operator, x.to("meta"))
    for name in ("unfused", "reference"):
        with ops.backend(name):
            assert not fuses(operator, x)
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
    with pytest.raises(
        ValueError, match="training BatchNorm needs more than 1 value per channel; use a larger batch, image or footprint"
    ):
        setting.module()(setting.x())
    assert setting.module().eval()(setting.x()).shape == (1, 8, 1, 1)


@every_kind
def test_rejects_a_map_that_is_too_small(kind: str) -> None:
    setting = Setting(kind, footprint=7, height=3, width=9)
    with pytest.raises(ValueError, match="7x7 footprint with reflection padding needs a feature map of at least 4x4, not 3x9"):
        setting.module()(setting.x())


# Around the operators: counts, graphs, second derivatives, memory.


@every_kind
@pytest.mark.parametrize("transformation", ["distinct", "phi_eq_psi"])
def test_counts_the_flops_of_what_it_fuses(kind: str, transformation: str) -> None:
    setting = Setting(kind, position="none", transformation=transformation, footprint=5)
    module, x = setting.module(), setting.x()
    phi, psi, beta = (map_.detach().requires_grad_() for map_ in module.transform(x))
    counted = {}
    for name in ("auto", "unfused"):
        with ops.backend(name), FlopCounterMode(display=False) as forward:
            y = module.attend(phi, psi, beta)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        counted[name] = forward.get_total_flops(), backward.get_total_flops()
    assert counted["auto"] == counted["unfused"]
    assert counted["auto"][0] > 0 and counted["auto"][1] > counted["auto"][0]


def small(kind: str) -> nn.Module:
    """A whole network in which no parameter has a special value."""
    torch.manual_seed(0)
    model = san.create_model(f"san10_{kind}", 10, num_stages=1, width_mult=0.5)
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
    assert FUSED[kind] in forward and f"{FUSED[kind]}_backward" in backward


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
    assert FUSED[kind] in calls.names and f"{FUSED[kind]}_backward" in calls.names
    assert_close(ours, results(model, IMAGES.double(), "reference"), 1e-9, 1e-8)


def penalty(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of a gradient penalty."""
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    inputs = {"x": x, **dict(module.named_parameters())}
    found = torch.autograd.grad(grad.square().sum(), list(inputs.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


@every_kind
@every_mode
def test_gradient_penalty_equals_the_reference(kind: str, training: bool) -> None:
    module, x = Setting(kind).module().double().train(training), Setting(kind).x().double().requires_grad_()
    with pytest.warns(UserWarning, match="create_graph=True differentiates reference operators"):
        ours = penalty(module, x)
    with ops.backend("reference"):
        assert_close(ours, penalty(module, x), 1e-9, 1e-8)


@every_kind
def test_unfused_has_a_second_derivative(kind: str) -> None:
    setting = Setting(kind, channels=16, r1=8, batch=1, height=3, width=3)
    module = setting.module()
    with ops.backend("unfused"):
        assert torch.autograd.gradgradcheck(lambda x: module(x), setting.x().requires_grad_(), fast_mode=True)


@every_kind
def test_keeps_one_tensor_of_a_footprints_size_for_backward(kind: str) -> None:
    """The attention weights, G * K values per pixel; the unfused layers keep several of d * K and E * K."""

    def kept(backend: ops.Backend) -> dict[int, int]:
        setting = Setting(kind, channels=64, footprint=11, height=24, width=24)
        module, x = setting.module(), setting.x().requires_grad_()
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
            return tensor

        with ops.backend(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        return sizes

    pixels, positions, weights = 2 * 24 * 24, 121, 4
    large = [size for size in kept("auto").values() if size >= positions * pixels]
    assert large == [weights * positions * pixels]
    assert sum(kept("unfused").values()) > 2 * sum(kept("auto").values())


# torch's setting for TF32.


class Recorder(TorchDispatchMode):
    """Notes the last argument of fused operators: tf32."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "san" and func._schema.arguments[-1].name == "tf32":
            self.allowed[func._opname] = args[-1]
        return func(*args, **(kwargs or {}))


def set_by_flag(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


def set_by_precision(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def set_for_products(allowed: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"


@pytest.fixture
def torch_precision() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("set_precision", [set_by_flag, set_by_precision, set_for_products])
def test_torchs_setting_reaches_the_operators(
    set_precision: Callable[[bool], None], allowed: bool, torch_precision: None
) -> None:
    set_precision(allowed)
    with Recorder() as recorder:
        for kind in KINDS:
            Setting(kind).module()(Setting(kind).x()).sum().backward()
    named = ("pair_covariance", "pair_weights", "patch_linear")
    assert recorder.allowed == dict.fromkeys((f"{name}{way}" for name in named for way in ("", "_backward")), allowed)
