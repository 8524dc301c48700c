"""Attention modules with fused operators: results, fallbacks to separate layers, compilation, memory."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import san
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention, mapping
from san.nn.position import POSITIONS
from san.ops.functional import fuses
from tests.nn.kinds import randomize, randomize_vectors
from tests.ops import cases, operators
from tests.ops.cases import KINDS

RELATIONS = ("subtraction", "summation", "concatenation", "hadamard")
FUSED = {"pairwise": "san::attend_pairs", "patchwise": "san::patch_linear", "scalar": "san::attend_dot"}
ALL_KINDS = (*KINDS, "scalar")
every_kind = pytest.mark.parametrize("kind", ALL_KINDS)
every_mapping = pytest.mark.parametrize("kind", KINDS)
"""The kinds with a gamma."""
every_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
LAYOUTS = {"contiguous": lambda x: x} | {name: operators.LAYOUTS[name] for name in ("channels_last", "transposed", "sliced")}


@dataclass(frozen=True)
class Setting:
    """An attention module and its input. The test id lists the fields that differ from the defaults."""

    kind: str = "pairwise"
    relation: str = ""
    mapping: str = "LRL"
    position: str = "relative"
    transformation: str = "distinct"
    channels: int = 32
    r1: int = 16
    r2: int = 4
    group_size: int = 4
    footprint: int = 3
    batch: int = 2
    height: int = 6
    width: int = 5

    def module(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> SelfAttention:
        """The module with random parameters and statistics."""
        torch.manual_seed(seed)
        names = ("mapping", "transformation", "r1", "r2", "group_size")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        module: SelfAttention
        if self.kind == "pairwise":
            options |= {"relation": self.relation or "subtraction", "position": self.position}
            module = PairwiseAttention(self.channels, self.footprint, **options)
        elif self.kind == "patchwise":
            module = PatchwiseAttention(self.channels, self.footprint, **options)
        else:
            module = ScalarAttention(
                self.channels, self.footprint, r1=4, r2=self.r2, heads=self.channels // self.r2 // self.group_size
            )
        randomize(module)
        return module.to(dtype)

    def x(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        shape = (self.batch, self.channels, self.height, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

    def __str__(self) -> str:
        default = {f.name: f.default for f in dataclasses.fields(self)}
        changed = [f"{k}={v}" for k, v in dataclasses.asdict(self).items() if v != default[k] and k not in ("kind", "relation")]
        return "-".join([self.kind, *([self.relation] if self.relation else []), *changed])


# test_fused.py covers more footprints and numbers of channels.
SETTINGS = [
    *(Setting(relation=relation, position=position) for relation in RELATIONS for position in POSITIONS),
    *(Setting(relation=relation, mapping="L") for relation in ("subtraction", "hadamard")),
    *(Setting("patchwise", mapping=mapping) for mapping in ("L", "LRL", "LRLRL")),
    *(Setting(kind, footprint=7, height=4, width=4) for kind in ALL_KINDS),  # the smallest map for this footprint
    *(Setting(kind, transformation="phi_eq_psi_eq_beta", r1=4) for kind in KINDS),
    *(Setting(kind, channels=64, r1=4, r2=1, group_size=64) for kind in ALL_KINDS),  # one weight channel
    # With few channels and long rows, the CPU kernels process several pixels at once.
    *(Setting(kind, channels=64, group_size=8, height=9, width=37, transformation="phi_eq_psi") for kind in ALL_KINDS),
]


class Calls(TorchDispatchMode):
    """Records the names of the operators that are called, and the `tf32` argument of those that have one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.tf32: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "san" and "tf32" in names:
            self.tf32[func._opname] = args[names.index("tf32")]
        return func(*args, **(kwargs or {}))


def is_fused(module: nn.Module, x: Tensor) -> bool:
    with Calls() as calls:
        copy.deepcopy(module)(x)
    return bool({*FUSED.values()} & calls.names)


def results(module: nn.Module, x: Tensor, backend: ops.Backend = "auto") -> dict[str, Tensor]:
    """Returns output, gradients for a fixed random cotangent, and updated buffers; does not change `module`."""
    with ops.backend(backend):
        return differentiated(copy.deepcopy(module), x)


def differentiated(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    leaf = x.detach().requires_grad_()  # not cloned: that could change the layout in memory
    y = module(leaf)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
    names = ["y", "x", *(name for name, _ in module.named_parameters())]
    grads = torch.autograd.grad(y, [leaf, *module.parameters()], cotangent)
    return dict(zip(names, (y.detach(), *grads), strict=True)) | dict(module.named_buffers())


def scale_of(name: str, wanted: dict[str, Tensor]) -> float:
    """Returns the norm that an error is divided by: the tensor's own norm, or a larger one if theory requires a gradient of 0.

    A bias before a BatchNorm or a softmax has no effect; the gradient of its layer's weight shows the usual magnitude.
    """
    if name == "y" or "running" in name or "tracked" in name:
        return wanted[name].double().norm().item()
    scale = max(wanted[name].double().norm().item(), 1e-3 * wanted["x"].double().norm().item())
    weight = name.removesuffix("bias") + "weight"
    return max(scale, wanted[weight].double().norm().item()) if name.endswith(".bias") else scale


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Returns the relative errors in the Euclidean norm."""
    assert got.keys() == wanted.keys()
    return {
        name: (got[name].double() - wanted[name].double()).norm().item() / max(scale_of(name, wanted), 1e-30) for name in wanted
    }


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], values: float, gradients: float) -> None:
    found = errors(got, wanted)
    allowed = {name: values if name == "y" or "running" in name else gradients for name in found}
    assert all(found[name] <= allowed[name] for name in found), {n: e for n, e in found.items() if not e <= allowed[n]}


def assert_matches_reference(module: nn.Module, x: Tensor) -> None:
    assert_close(results(module, x), results(module, x, "reference"), 1e-10, 1e-10)


@pytest.mark.every_isa
@every_mode
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_float32_matches_reference(setting: Setting, training: bool) -> None:
    module, x = setting.module(torch.float32).train(training), setting.x(torch.float32)
    with Calls() as calls:
        ours = results(module, x)
    assert {FUSED[setting.kind], f"{FUSED[setting.kind]}_backward"} <= calls.names
    stores_weights = setting.kind == "patchwise" and setting.mapping == "L"  # which are the result of patch_linear
    assert ("san::aggregation" in calls.names) == stores_weights
    assert_close(ours, results(copy.deepcopy(module).double(), x.double(), "reference"), 1e-5, 1e-4)


@st.composite
def any_setting(draw: st.DrawFn) -> Setting:
    kind = draw(st.sampled_from(ALL_KINDS))
    r1, r2 = draw(st.sampled_from([(16, 4), (8, 16), (4, 4), (16, 2)]))
    channels, reach = 16 * draw(st.integers(1, 7)), draw(st.integers(0, 3))
    return Setting(
        kind,
        relation=draw(st.sampled_from(RELATIONS)) if kind == "pairwise" else "",
        mapping=draw(st.sampled_from(["L", "LRL"])),
        position=draw(st.sampled_from(["none", "absolute", "relative"])),
        transformation=draw(st.sampled_from(["distinct", "phi_eq_psi"])),
        channels=channels,
        r1=r1,
        r2=r2,
        group_size=draw(st.sampled_from([size for size in range(1, channels // r2 + 1) if channels // r2 % size == 0])),
        footprint=2 * reach + 1,
        batch=draw(st.integers(1, 3)),
        height=reach + draw(st.integers(1, 6)),
        width=reach + draw(st.integers(1, 6)),
    )


@pytest.mark.every_isa
@given(any_setting(), st.booleans(), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 9))
def test_matches_reference_for_any_shape(setting: Setting, training: bool, layout: str, seed: int) -> None:
    assume(not training or setting.batch * setting.height * setting.width > 1)
    assert_matches_reference(setting.module(seed=seed).train(training), LAYOUTS[layout](setting.x(seed=seed)))


@every_kind
def test_output_has_the_memory_format_of_beta(kind: str) -> None:
    x = Setting(kind).x()
    with ops.backend("reference"):
        want = Setting(kind).module()(x)
    for of_beta, of_others in itertools.product(LAYOUTS, LAYOUTS):
        module = Setting(kind).module()
        phi, psi, beta = module.transform(x)
        y = module.attend(*(LAYOUTS[of_others](map_) for map_ in (phi, psi)), LAYOUTS[of_beta](beta))
        assert ((y - want).abs() <= 1e-10 * (1 + want.abs())).all(), (of_beta, of_others)
        memory_format = torch.channels_last if of_beta == "channels_last" else torch.contiguous_format
        assert y.is_contiguous(memory_format=memory_format), (of_beta, of_others)


@pytest.mark.every_isa
@every_kind
@pytest.mark.parametrize(
    ("dtype", "autocast", "training"),
    [
        *((dtype, False, training) for dtype in (torch.bfloat16, torch.float16) for training in (True, False)),
        (torch.bfloat16, True, True),
    ],
    ids=["bfloat16-training", "bfloat16-evaluation", "float16-training", "float16-evaluation", "autocast"],
)
def test_error_in_half_types_is_at_most_twice_the_unfused_one(
    kind: str, dtype: torch.dtype, autocast: bool, training: bool
) -> None:
    setting, stored = Setting(kind, channels=64, height=8, width=8), torch.float32 if autocast else dtype
    module, x = setting.module(stored).train(training), setting.x(stored)
    exact = results(copy.deepcopy(module).double(), x.double(), "reference")
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        assert is_fused(module, x)
        fused, unfused = results(module, x), results(module, x, "unfused")
    assert fused["y"].dtype == dtype
    assert all(fused[name].dtype == parameter.dtype for name, parameter in module.named_parameters())
    ours, plain = errors(fused, exact), errors(unfused, exact)
    assert all(ours[name] <= 2 * plain[name] + torch.finfo(dtype).eps for name in exact), (ours, plain)


# Modules whose layers must run one by one.


class OtherNorm(nn.BatchNorm2d):
    """A subclass, which could compute something else."""


class Doubled(nn.Sequential):
    """Layers with a different forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def replace_norm(module: Any, index: int, cls: type[nn.Module] = nn.BatchNorm2d, **options: Any) -> None:
    old = module.gamma[index]
    new: Any = cls(old.num_features, **options).to(old.weight)
    if new.affine:
        nn.init.uniform_(new.weight, 0.5, 1.5)
        nn.init.normal_(new.bias)  # with 0, the sign of p_i - p_i = 0 before the ReLU would depend on rounding
    module.gamma[index] = new


def replace_linear(module: Any, index: int, bias: bool, groups: int = 1) -> None:
    old = module.gamma[index]
    new = nn.Conv2d(old.in_channels, old.out_channels, 1, bias=bias, groups=groups).to(old.weight)
    if new.bias is not None:
        nn.init.normal_(new.bias)
    module.gamma[index] = new


UNFUSED: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda m: m.gamma[0].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.gamma[2].register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.gamma[2].register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.gamma[2].register_full_backward_pre_hook(lambda *_: None),
    "forward hook on gamma": lambda m: m.gamma.register_forward_hook(lambda *_: None),
    "subclass of BatchNorm": lambda m: replace_norm(m, 0, OtherNorm),
    "SyncBatchNorm": lambda m: (replace_norm(m, 0, nn.SyncBatchNorm), m.eval()),
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m.gamma[2]),
    "subclass of Sequential": lambda m: setattr(m, "gamma", Doubled(*m.gamma)),
    "another activation": lambda m: m.gamma.__setitem__(1, nn.LeakyReLU()),
    "grouped linear layer": lambda m: replace_linear(m, 2, False, groups=2),
    "appended layer": lambda m: m.gamma.append(nn.Identity()),
    "slices of gamma": lambda m: setattr(m, "gamma", nn.Sequential(*m.gamma[:3], *m.gamma[3:])),
}


@every_mapping
@pytest.mark.parametrize("change", UNFUSED)
def test_changed_layers_run_unfused(kind: str, change: str) -> None:
    module, x = Setting(kind).module(), Setting(kind).x()
    UNFUSED[change](module)
    assert not is_fused(module, x)
    assert_matches_reference(module, x)


STILL_FUSED: dict[str, Callable[[Any], Any]] = {
    "no momentum": lambda m: replace_norm(m, 0, momentum=None),
    "no running statistics": lambda m: replace_norm(m, 3, track_running_stats=False),
    "no scale": lambda m: replace_norm(m, 0, affine=False),
    "two eps": lambda m: replace_norm(m, 3, eps=1e-3),
    "first norm in evaluation": lambda m: m.gamma[0].eval(),
    "second norm in evaluation": lambda m: m.gamma[3].eval(),
    "first layer with bias": lambda m: replace_linear(m, 2, True),
    "last layer without bias": lambda m: replace_linear(m, 5, False),
}


@every_mapping
@pytest.mark.parametrize("change", STILL_FUSED)
def test_fuses_any_ordinary_norm_and_linear_layer(kind: str, change: str) -> None:
    module, x = Setting(kind).module(), Setting(kind).x()
    STILL_FUSED[change](module)
    assert is_fused(module, x)
    assert_matches_reference(module, x)


@every_kind
def test_subclass_may_override_the_weights(kind: str) -> None:
    cls = type(Setting(kind).module())

    class Squared(cls):  # type: ignore[misc, valid-type]
        def attention_weights(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
            weight_NGKP: Tensor = super().attention_weights(phi_NRHW, psi_NRHW)
            return weight_NGKP.square()

    module, x = Squared(32, 3).double(), Setting().x()
    if kind != "scalar":
        nn.init.normal_(module.get_parameter("gamma.0.bias"))
    assert_matches_reference(module, x)


@every_kind
def test_object_and_patched_class_may_override_the_weights(kind: str) -> None:
    module, x = Setting(kind).module(), Setting(kind).x()

    def no_weights(*maps: Tensor) -> Tensor:
        phi = maps[-2]
        return phi.new_zeros(len(phi), 2, 9, phi.shape[2:].numel())

    with patch.object(type(module), "attention_weights", no_weights):
        assert not module(x).any()
    assert module(x).any()
    module.attention_weights = no_weights  # type: ignore[method-assign]
    assert not module(x).any()


@every_kind
def test_backend_and_device_decide_about_fusion(kind: str) -> None:
    module, x = Setting(kind).module(), Setting(kind).x()
    assert fuses(x) and not fuses(x.to("meta"))
    with ops.backend("unfused"):
        assert not is_fused(module, x)
    with ops.backend("reference"), Calls() as calls:
        module(x).sum().backward()
    assert not [name for name in calls.names if name.startswith("san::")]


@every_kind
def test_accepts_an_empty_batch(kind: str) -> None:
    setting = Setting(kind, batch=0)
    module = setting.module().eval()
    ours = results(module, setting.x())
    assert ours["y"].shape == (0, 8, 6, 5)
    assert all((grad == 0).all() for name, grad in ours.items() if name in dict(module.named_parameters()))


@every_mapping
def test_rejects_training_on_one_value_per_channel(kind: str) -> None:
    setting = Setting(kind, footprint=1, batch=1, height=1, width=1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        setting.module()(setting.x())
    assert setting.module().eval()(setting.x()).shape == (1, 8, 1, 1)


@every_kind
@pytest.mark.parametrize("transformation", ["distinct", "phi_eq_psi"])
def test_counts_the_same_flops_as_unfused(kind: str, transformation: str) -> None:
    for group_size in (4, 1):  # in scalar attention, the second is one channel for each head, an elementwise product
        setting = Setting(kind, position="none", transformation=transformation, footprint=5, group_size=group_size)
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
    """A whole network."""
    torch.manual_seed(0)
    model = san.create_model(f"san10_{kind}", 10, depths=(1,), widths=(32,))
    randomize_vectors(model)
    return model


IMAGES = torch.randn(3, 3, 24, 28, generator=torch.Generator().manual_seed(1))


@every_kind
@every_mode
def test_compiles_to_one_graph(kind: str, training: bool) -> None:
    torch.compiler.reset()
    called: list[set[str]] = []

    def record(graph: Any, inputs: Any) -> Any:
        called.append({node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")})
        return make_boxed_func(graph)

    model = small(kind).train(training)
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    assert_close(differentiated(compiled, IMAGES), results(model, IMAGES), 1e-5, 1e-4)
    forward, backward = called
    assert FUSED[kind] in forward and f"{FUSED[kind]}_backward" in backward


@pytest.mark.parametrize("kind", ["pairwise", pytest.param("patchwise", marks=pytest.mark.slow)])
def test_compiles_for_any_size(kind: str) -> None:
    torch.compiler.reset()
    module = Setting(kind).module()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, height, width in ((2, 6, 5), (3, 7, 9)):
        x = Setting(kind, batch=batch, height=height, width=width).x()
        torch._dynamo.mark_dynamic(x, 0)  # an error if the graph fits one batch size only
        torch.testing.assert_close(compiled(x), module(x))
    for got, want in zip(compiled.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(got, want)


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
    with pytest.warns(UserWarning, match="create_graph"):
        ours = penalty(module, x)
    with ops.backend("reference"):
        assert_close(ours, penalty(module, x), 1e-9, 1e-8)


def test_gradient_penalty_on_the_meta_device() -> None:
    module, x = Setting("pairwise").module(), Setting("pairwise").x()
    with pytest.warns(UserWarning, match="create_graph"):
        found = penalty(module.to("meta"), x.to("meta").requires_grad_())
    assert all(grad.is_meta for grad in found.values())


@every_kind
def test_gradients_that_can_be_differentiated_are_as_precise_inside_an_autocast_block(kind: str) -> None:
    module, x = Setting(kind).module(torch.float32), Setting(kind).x(torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x).float().square().sum()
        (once,) = torch.autograd.grad(y, x, retain_graph=True)
        with pytest.warns(UserWarning, match="create_graph"):
            (twice,) = torch.autograd.grad(y, x, create_graph=True)
    assert (twice - once).norm() < 1e-3 * once.norm()


@every_kind
def test_saves_nothing_for_each_pair(kind: str) -> None:
    """The attention weights have G * K values per pixel; the unfused layers save tensors with d * K and E * K, too."""

    def saved(backend: ops.Backend) -> dict[int, int]:
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
    assert weights * positions * pixels in saved("unfused").values()
    assert max(saved("auto").values()) < positions * pixels


@every_kind
def test_result_may_be_changed_in_place_on_a_cpu(kind: str) -> None:
    setting = Setting(kind)
    x_NCHW = setting.x().contiguous(memory_format=torch.channels_last).requires_grad_()
    grads = []
    for change in (Tensor.mul, Tensor.mul_):
        y_NCHW = change(setting.module()(x_NCHW), 2)
        grads += torch.autograd.grad(y_NCHW.square().sum(), x_NCHW)
    assert torch.equal(*grads)


SET_TF32: dict[str, Callable[[bool], object]] = {
    "allow_tf32": lambda allowed: setattr(torch.backends.cuda.matmul, "allow_tf32", allowed),
    "set_float32_matmul_precision": lambda allowed: torch.set_float32_matmul_precision("high" if allowed else "highest"),
    "fp32_precision": lambda allowed: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32" if allowed else "ieee"),
}


@pytest.fixture
def restore_tf32() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("setting", SET_TF32)
def test_operators_obey_the_tf32_setting(setting: str, allowed: bool, restore_tf32: None) -> None:
    SET_TF32[setting](allowed)
    with Calls() as calls:
        for kind in KINDS:
            Setting(kind).module()(Setting(kind).x()).sum().backward()
    named = ("attend_pairs", "patch_linear", "attend_patches")
    assert calls.tf32 == dict.fromkeys((f"{name}{suffix}" for name in named for suffix in ("", "_backward")), allowed)


@pytest.fixture
def with_operators_of_gpus(shim: Any) -> Iterator[None]:
    """Operators that only GPUs have also run on CPUs, through the shim."""
    kernels = torch.library.Library("san", "IMPL")
    for name in ("attend_pairs_of_batch", "attend_pairs_of_batch_backward"):
        kernels.impl(name, getattr(shim, name), "CPU")
    with patch.object(mapping, "_has_norm_inside", fuses):
        yield
    del kernels


@pytest.mark.parametrize("change", ["", "momentum=None", "affine=False", "bias of a Linear layer", "zero"])
def test_norm_inside_the_operator_of_gpus(change: str, with_operators_of_gpus: None) -> None:
    module, x = Setting("pairwise").module(torch.float32), Setting("pairwise").x(torch.float32)
    gamma = module.gamma
    if change == "momentum=None":
        gamma[3].momentum = None
    elif change == "affine=False":
        gamma[3].weight = gamma[3].bias = None
    elif change == "bias of a Linear layer":
        gamma[2].bias = nn.Parameter(torch.randn(gamma[2].out_channels))
    elif change == "zero":
        nn.init.zeros_(gamma[3].weight)
    with Calls() as calls:
        ours = results(module, x)
    assert "san::attend_pairs_of_batch_backward" in calls.names and "san::pair_covariance" not in calls.names
    assert_close(ours, results(copy.deepcopy(module).double(), x.double(), "reference"), 1e-5, 1e-4)


def test_norm_inside_the_operator_is_differentiable_twice(with_operators_of_gpus: None) -> None:
    module, x = Setting("pairwise").module(torch.float32), Setting("pairwise").x(torch.float32).requires_grad_()
    with pytest.warns(UserWarning, match="create_graph"):
        ours = penalty(module, x)
    with ops.backend("reference"):
        assert_close(ours, penalty(copy.deepcopy(module).double(), x.double().detach().requires_grad_()), 1e-4, 1e-3)


def test_opcheck_of_the_operator_of_gpus(with_operators_of_gpus: None) -> None:
    tensors = [x.requires_grad_() for x in cases.sample("attend_pairs_of_batch", dtype=torch.float32)]
    rest = cases.rest("attend_pairs_of_batch", cases.Sizes())
    torch.library.opcheck(torch.ops.san.attend_pairs_of_batch.default, (*tensors, *rest))
