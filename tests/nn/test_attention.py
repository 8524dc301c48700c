"""Attention modules: the paper's formulas, memory layouts, types, hooks, error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

import san
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention
from san.nn.relation import PAIRWISE
from tests.nn import specification
from tests.nn.kinds import CHANNELS, KINDS, gradients, made

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.every_isa
@every_kind
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_matches_the_papers_formulas(kind: str, training: bool) -> None:
    module = made(kind, footprint=3).train(training)
    x = torch.randn(2, CHANNELS, 2, 3, dtype=torch.float64)
    wanted = gradients(lambda leaf: specification.attention(module, leaf), module, x)
    backends: tuple[ops.Backend, ...] = ("auto", "reference")
    for backend in backends:
        with ops.backend(backend):
            torch.testing.assert_close(gradients(module, module, x), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["pairwise-subtraction-relative", "patchwise-clique", "scalar-2-heads"])
@torch.no_grad()
def test_output_is_the_aggregation_with_the_returned_weights(kind: str) -> None:
    module = made(kind, 3).eval()
    x = torch.randn(2, CHANNELS, 4, 5, dtype=torch.float64)
    y = module(x)
    (weights,) = san.attention_weights(nn.Sequential(nn.Identity(), module).eval(), x).values()
    torch.testing.assert_close(ops.aggregation(module.transform(x)[2], weights, 3), y, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_attention_weights_covers_every_layer_and_removes_its_hooks() -> None:
    model = san.create_model("san10_patchwise", 10, num_stages=2, width_mult=0.5).eval()
    x = torch.randn(2, 3, 24, 24)
    before = model(x)
    weights = san.attention_weights(model, x)
    assert {name: tuple(found.shape) for name, found in weights.items()} == {
        "stage1.blocks.0.attention": (2, 1, 9, 144),
        "stage1.blocks.1.attention": (2, 1, 9, 144),
        "stage2.blocks.0.attention": (2, 4, 49, 36),
    }
    assert torch.equal(model(x), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert san.attention_weights(san.create_model("resnet26", 10, num_stages=2).eval(), x) == {}
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert len(san.attention_weights(compiled, x)) == len(weights)


@every_kind
def test_bfloat16_autocast_trains(kind: str) -> None:
    module = made(kind, 3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(torch.randn(2, CHANNELS, 4, 5))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.every_isa
@pytest.mark.parametrize("how", ["autocast", "half"])
def test_positions_are_accurate_in_half_types(how: str) -> None:
    position = PairwiseAttention(CHANNELS).position
    assert position is not None
    x = torch.zeros(1, 4, 56, 56)
    exact = position(x, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        got = position(x.bfloat16(), 7) if how == "autocast" else position.bfloat16()(x.bfloat16(), 7)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=2**-7, atol=1e-6 if how == "autocast" else 2**-9)


@pytest.mark.parametrize("position", ["absolute", "relative"])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_of_the_position_run(position: str, backend: ops.Backend, dtype: torch.dtype) -> None:
    """Pruning, for example, uses a hook that recomputes the weight before each call."""
    module, x = PairwiseAttention(CHANNELS, 3, position=position).to(dtype), torch.randn(2, CHANNELS, 4, 5).to(dtype)
    linear = module.get_submodule("position.linear")
    seen: list[torch.Size] = []
    linear.register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    l1_unstructured(linear, "weight", 1)
    with ops.backend(backend):
        for _ in range(2):
            module(x).square().sum().backward()
    assert seen == [torch.Size((1, 2, 4, 5))] * 2
    assert linear.get_parameter("weight_orig").grad is not None


def test_hidden_reduction_sets_the_width_of_the_hidden_layers() -> None:
    widths = {
        (mapping, reduction): [
            layer.out_channels
            for layer in PairwiseAttention(64, mapping=mapping, hidden_reduction=reduction).gamma
            if isinstance(layer, nn.Conv2d)
        ]
        for mapping, reduction in (("LRL", 16), ("LRL", 4), ("LRLRL", 2), ("L", 3))
    }
    assert widths == {("LRL", 16): [4, 2], ("LRL", 4): [16, 2], ("LRLRL", 2): [32, 32, 2], ("L", 3): [2]}


def absolute_difference(phi: Tensor, psi: Tensor, footprint: int) -> Tensor:
    return (phi.flatten(2).unsqueeze(2) - ops.unfold(psi, footprint)).abs()


def test_a_new_relation_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRWISE, "absolute_difference", PAIRWISE["dot"])  # removed after the test
    del PAIRWISE["absolute_difference"]
    for _ in range(2):  # a cell of a notebook may run twice
        assert san.register_relation("absolute_difference", lambda R, K: R)(absolute_difference) is absolute_difference
    model = san.create_model("san10_pairwise", 10, relation="absolute_difference", num_stages=2, width_mult=0.5)
    model(torch.randn(2, 3, 24, 24)).sum().backward()
    known = san.create_model("san10_pairwise", 10, relation="subtraction", num_stages=2, width_mult=0.5)
    assert san.complexity(model, 24).params == san.complexity(known, 24).params


def test_a_new_relation_returns_the_channels_that_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    add = san.register_relation("bad", lambda R, K: 4)
    with pytest.raises(ValueError, match=r"'bad' returned 2 channels .*4"):
        add(lambda phi, psi, footprint: ops.unfold(psi[:, :2], footprint))
    with pytest.raises(ValueError, match=r"'bad' returned shape \[1, 4, 3, 3, 9\]"):
        san.register_relation("bad", lambda R, K: 4, patchwise=True)(
            lambda phi, psi, footprint: psi[:, :4, ..., None].expand(-1, -1, -1, -1, 9)
        )
    with pytest.raises(ValueError, match="'dot'"):
        san.register_relation("dot", lambda R, K: 1)(absolute_difference)
    assert "bad" not in PAIRWISE
    # Right for the small map at registration, but not for every number of channels.
    row = san.nn.relation.Relation(lambda R, K: 16, absolute_difference)
    monkeypatch.setitem(PAIRWISE, "bad", row)
    with pytest.raises(ValueError, match=r"'bad' returned 4 channels .*16"):
        PairwiseAttention(64, relation="bad")(torch.randn(1, 64, 8, 8))


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown relation": (lambda: PairwiseAttention(64, relation="star"), "'star'.*summation"),
    "unknown mapping": (lambda: PatchwiseAttention(64, mapping="LR"), "'LR'.*`LRL`"),
    "unknown position": (lambda: PairwiseAttention(64, position="rel"), "'rel'.*relative"),
    "unknown transformation": (lambda: PairwiseAttention(64, transformation="same"), "'same'.*phi_eq_psi"),
    "two reductions for one layer": (
        lambda: PairwiseAttention(64, transformation="phi_eq_psi_eq_beta"),
        "not r1=16 and r2=4",
    ),
    "even footprint": (lambda: PatchwiseAttention(64, 4), "odd.* not 4"),
    "channels not reduced evenly": (lambda: PatchwiseAttention(40), "40 channels"),
    "channels not shared evenly": (lambda: PairwiseAttention(64, group_size=3), "16 value channels.*group_size=3"),
    "no hidden layer": (lambda: PairwiseAttention(8, r1=4, r2=1), "8 channels.*hidden_reduction=16"),
    "hidden layer of 0": (lambda: PairwiseAttention(64, hidden_reduction=0), "hidden_reduction.*0"),
    "hidden layer not reduced evenly": (lambda: PairwiseAttention(64, hidden_reduction=3), "64 channels.*hidden_reduction=3"),
    "group size as text": (lambda: PairwiseAttention(64, group_size="8"), "group_size.*'8'"),  # type: ignore[arg-type]
    "heads as a float": (lambda: ScalarAttention(64, heads=2.0), "heads.*2.0"),  # type: ignore[arg-type]
    "boolean channels": (lambda: PairwiseAttention(True, 1), "channels.*True"),
    "heads": (lambda: ScalarAttention(64, heads=3), "heads=3"),
    "weights in training": (
        lambda: san.attention_weights(nn.Sequential(PairwiseAttention(64)), torch.zeros(1)),
        "evaluation",
    ),
    "map smaller than the pairwise footprint": (lambda: PairwiseAttention(64)(torch.randn(1, 64, 3, 9)), "4x4, not 3x9"),
    "map smaller than the patchwise footprint": (lambda: PatchwiseAttention(64)(torch.randn(1, 64, 3, 9)), "4x4, not 3x9"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_rejects(what: str) -> None:
    call, message = REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        call()
