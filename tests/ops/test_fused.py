"""Fused operators: against their definition, gradients, registration, bits, refusals, extreme values."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from san.ops import library, reference
from tests.ops.fused_cases import EPS, KINDS, every_kind, every_mode

ROOT = Path(__file__).parents[2]

assert library.load(), "the extension must build: these tests are about it"


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


def sample(kind: str, sizes: Sizes = Sizes(), dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    """Arguments of an operator; parameters are of the type that sums are kept in."""
    generator = torch.Generator().manual_seed(seed)

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
    Sizes(2, 31, 5, footprint=5, relation=9, hidden=2, weights=2, values=34),  # many bands, rows shorter than a vector
    Sizes(2, 4, 4, footprint=7, relation=3, hidden=1, weights=2, values=4),  # a map just large enough
    Sizes(1, 3, 400, relation=40, hidden=2, weights=3, values=3),  # more than a tile's pixels in a row
    Sizes(2, 7, 7, footprint=3, relation=70, hidden=20, weights=64, values=64),  # groups of channels in patchwise backward
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
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(2, 8, 37, hidden=3)], ids=str)
def test_patchwise_takes_no_center(training: bool, sizes: Sizes) -> None:
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
@pytest.mark.parametrize("sizes", [Sizes(batch=0), Sizes(0, 8, 37, hidden=3)], ids=str)
def test_empty_batch(kind: str, training: bool, sizes: Sizes) -> None:
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
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 41, 9, 3),
        Sizes(5, 12, 12, 5),
        Sizes(5, 12, 12, 5, hidden=17),
        Sizes(70, 4, 4),
        Sizes(4, 7, 7, 3, 70, 20, 64, 64),
    ],
    ids=str,
)
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
@pytest.mark.parametrize(
    "sizes", [Sizes(2, 11, 13, 5, 9, 17, 5, 20), Sizes(2, 8, 37, 3, 6, 3, 1, 16), Sizes(1, 15, 5, 3, 4, 2, 2, 20)], ids=str
)
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
        "center and around must have the same shape",
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
    with pytest.raises(RuntimeError, match="must have the same shape" if at == 0 else r"must be \[N, H, W, [EG]\]"):
        operator(f"{kind}_backward")(*arguments)


def test_rejects_a_footprint_of_nothing() -> None:
    """In a process of its own, which it must survive."""
    code = """
from tests.ops.fused_cases import EPS, KINDS
from tests.ops.test_fused import operator, sample
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
from san.ops.fused import LRL, Normalization, pairwise_attention
x, one = torch.randn(1, 4, 5, 5), torch.ones(4)
norm = Normalization(one, one, one, one)
print(pairwise_attention(x, x, x, LRL(norm, torch.ones(4, 4), norm, torch.ones(2, 4), one[:2]), 3, True, 1e-5)[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "[1, 4, 5, 5]" in done.stdout, done.stderr


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
@pytest.mark.parametrize("hidden", [3, 17])
def test_statistics_do_not_hang_on_single_pixels(kind: str, hidden: int) -> None:
    """The first ones of every fourth row are unlike all others: squares of distances from them would cancel."""
    tensors = {name: x.float() for name, x in sample(kind, Sizes(batch=4, height=112, width=112, hidden=hidden)).items()}
    for name in ("center", "around"):
        tensors[name] = torch.zeros_like(tensors[name])
        tensors[name][:, ::4, :2] = 1
    _, _, *found = run(kind, 3, True)(tensors)
    _, *wanted = defined(kind, {name: x.double() for name, x in tensors.items()}, 3, True)
    for var in (1, 3):
        assert ((found[var] - wanted[var]) / wanted[var]).abs().max() < 1e-5


@pytest.mark.parametrize("hidden", [3, 17])
def test_statistics_of_positions_that_do_not_see_a_bright_border(hidden: int) -> None:
    """The mean of what they see is far from the map's: squares of distances from that would cancel."""
    sizes = Sizes(batch=2, height=28, width=28, footprint=7, hidden=hidden)
    tensors = {name: x.float() for name, x in sample("patchwise", sizes).items()}
    tensors["around"] = tensors["around"] * 0.01
    tensors["around"][:, :3] += 10
    _, _, *found = run("patchwise", 7, True)(tensors)
    _, *wanted = defined("patchwise", {name: x.double() for name, x in tensors.items()}, 7, True)
    assert ((found[1] - wanted[1]) / wanted[1]).abs().max() < 1e-6


def test_statistics_of_a_slope() -> None:
    """Neighbours differ by a thousandth of what the map spans."""
    tensors = {name: x.float() for name, x in sample("pairwise", Sizes(batch=2, height=224, width=224)).items()}
    tensors["center"], tensors["around"] = (_slope(x).contiguous() for x in (tensors["center"], tensors["around"]))
    _, _, *found = run("pairwise", 3, True)(tensors)
    _, *wanted = defined("pairwise", {name: x.double() for name, x in tensors.items()}, 3, True)
    assert ((found[1] - wanted[1]) / wanted[1]).abs().max() < 1e-6


LARGE_MEANS_SEEN: dict[str, tuple[float, float]] = {
    "difference": (1, 1),
    "sum": (1, -1),
    "of center": (1, 0),
    "of around": (0, 1),
}


@every_kind
@every_mode
@pytest.mark.parametrize("which", LARGE_MEANS_SEEN)
@pytest.mark.parametrize(
    "sizes", [Sizes(height=16, width=16, hidden=17, values=34), Sizes(height=16, width=16, hidden=3)], ids=str
)
def test_large_means_change_nothing(kind: str, training: bool, which: str, sizes: Sizes) -> None:
    """BatchNorm takes them off before float32 rounds anything."""
    tensors = sample(kind, sizes, torch.float32)
    of_center, of_around = (1000 * x for x in LARGE_MEANS_SEEN[which])
    shift = of_center - of_around if kind == "pairwise" else of_around
    tensors |= {name: tensors[name] + x for name, x in (("center", of_center), ("around", of_around), ("mean1", shift))}
    if kind == "patchwise":
        tensors["mean1"][: sizes.relation] += of_center - shift
    exact = {name: x.double() for name, x in tensors.items()}
    y, _, *ours = differentiated(run(kind, sizes.footprint, training), tensors)
    wanted = differentiated(lambda t: defined(kind, t, sizes.footprint, training), exact)
    assert (y - wanted[0]).norm() <= 2e-6 * wanted[0].norm()
    for name, got, want in zip(NAMES, ours[-PARAMETERS:], wanted[-PARAMETERS:], strict=False):
        # Rounded statistics are an error of mean and variance in backward, of 3e-5 here.
        assert (got - want).norm() <= 1e-4 * max(want.norm().item(), 1.0), name


@every_mode
def test_a_border_pixel_that_is_no_number_stays_where_it_is_seen(training: bool) -> None:
    """In rows that do not fill their vectors, whose rest must not enter sums over pixels."""
    tensors = sample("patchwise", Sizes(1, 8, 37, hidden=3), torch.float32)
    tensors["beta"][0, 3, -1] = float("nan")
    at = NAMES.index("bias3") - PARAMETERS
    ours = differentiated(run("patchwise", 3, training), tensors)[at]
    wanted = differentiated(lambda t: defined("patchwise", t, 3, training), tensors)[at]
    assert torch.equal(ours.isfinite(), wanted.isfinite())


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
    """torch keeps the weights; recomputed ones must be as exact. Over several samples: in one, a sum may nearly cancel, and how
    it rounds is chance, which depends on the processor."""
    errors: dict[str, list[Tensor]] = defaultdict(list)
    for seed in range(4):
        tensors = sample("pairwise", Sizes(height=16, width=16), dtype=torch.float32, seed=seed)
        tensors["weight2"] *= times
        exact = differentiated(lambda t: defined("pairwise", t, 3, training), {name: x.double() for name, x in tensors.items()})
        plain = differentiated(lambda t: defined("pairwise", t, 3, training), tensors)
        ours = differentiated(run("pairwise", 3, training), tensors)
        for name, got, torch_got, want in zip(NAMES, *(x[-PARAMETERS:] for x in (ours, plain, exact)), strict=False):
            errors[name].append(torch.stack([(x - want).norm() / want.norm() for x in (got, torch_got)]))
    del errors["bias3"]  # softmax cancels it: its gradient is zero
    for name, found in errors.items():
        error, allowed = torch.stack(found).mean(0).tolist()
        assert error <= 10 * allowed + 1e-5, name
