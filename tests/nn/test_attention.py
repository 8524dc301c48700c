"""Attention of every kind: the paper's formulas, kernels against the reference, the set property, layouts, types, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

import san
from san import ops
from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention
from san.nn.relation import PAIRWISE
from tests.nn import specification
from tests.nn.kinds import CHANNELS, KINDS, gradients, made

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_matches_the_papers_formulas(kind: str, training: bool, backend: ops.Backend) -> None:
    module = made(kind, footprint=3).train(training)
    x = torch.randn(2, CHANNELS, 2, 3, dtype=torch.float64)
    with ops.backend(backend):
        ours = gradients(module, module, x)
    wanted = gradients(lambda leaf: specification.attention(module, leaf), module, x)
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@settings(max_examples=120)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    batch=st.integers(0, 2),
    reach=st.integers(0, 3),
    extra=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    channels_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_kernels_match_reference_on_any_shape(
    kind: str, batch: int, reach: int, extra: tuple[int, int], channels_last: bool, seed: int
) -> None:
    module = made(kind, 2 * reach + 1, seed).eval()
    x = torch.randn(batch, CHANNELS, reach + extra[0], reach + extra[1], dtype=torch.float64)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    ours = gradients(module, module, x)
    with ops.backend("reference"):
        wanted = gradients(module, module, x)
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def differences_after_permuting_the_footprint(kind: str) -> list[float]:
    """How far the output at the centre of a 5x5 map, all of which is its footprint, moves when all other pixels are permuted.

    One value per set of random parameters; those whose weights are all equal, which would show nothing, are left out.
    """
    others = torch.cat((torch.arange(12), torch.arange(13, 25)))
    order = torch.arange(25)
    order[others] = others[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    found = []
    for seed in range(8):
        module = made(kind, footprint=5, seed=seed).eval()
        x = torch.randn(1, CHANNELS, 25, dtype=torch.float64)
        before, after = (module(pixels.view(1, CHANNELS, 5, 5))[..., 2, 2] for pixels in (x, x[:, :, order]))
        if module.weights(x.view(1, CHANNELS, 5, 5))[..., 12].std(2).max() > 1e-3:
            found.append((before - after).abs().max().item())
    return found


IS_A_SET = [kind for kind in KINDS if kind.startswith("pairwise") and kind.endswith("-none")]


@pytest.mark.parametrize("kind", IS_A_SET)
def test_pairwise_without_position_does_not_see_a_permutation_of_its_footprint(kind: str) -> None:
    differences = differences_after_permuting_the_footprint(kind)
    assert len(differences) >= 3
    assert max(differences) < 1e-12


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IS_A_SET])
def test_all_others_see_it(kind: str) -> None:
    assert max(differences_after_permuting_the_footprint(kind)) > 1e-3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("patchwise")])
def test_weights_over_the_footprint_sum_to_one(kind: str) -> None:
    weights = made(kind, 3).weights(torch.randn(2, CHANNELS, 4, 5, dtype=torch.float64))
    assert weights.shape[2:] == (9, 20)
    torch.testing.assert_close(weights.sum(2), torch.ones_like(weights.sum(2)))
    assert (weights >= 0).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("patchwise")])
def test_patchwise_weights_are_unbounded(kind: str) -> None:
    weights = made(kind, 3).weights(torch.randn(2, CHANNELS, 4, 5, dtype=torch.float64))
    assert weights.shape[2:] == (9, 20)
    assert (weights < 0).any()


@every_kind
@pytest.mark.parametrize("backend", ["auto", "unfused", "reference"])
@torch.no_grad()
def test_seen_weights_are_those_of_the_output(kind: str, backend: ops.Backend) -> None:
    """The fused kernels never hold them: their output is the aggregation by what `attention_weights` tells."""
    module = made(kind, 3).eval()
    x = torch.randn(2, CHANNELS, 4, 5, dtype=torch.float64)
    with ops.backend(backend):
        y = module(x)
        (weights,) = san.attention_weights(nn.Sequential(nn.Identity(), module).eval(), x).values()
    torch.testing.assert_close(ops.aggregation(module.transform(x)[2], weights, 3), y, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_weights_are_told_of_every_layer_and_nothing_is_left_behind() -> None:
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
    assert san.attention_weights(san.create_model("resnet26", 10, num_stages=1).eval(), x) == {}


@every_kind
def test_channels_last_in_and_out(kind: str) -> None:
    module = made(kind, 3).eval()
    x = torch.randn(2, CHANNELS, 4, 5, dtype=torch.float64)
    y = module(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, module(x))


@every_kind
def test_copies_and_states_round_trip(kind: str) -> None:
    module = made(kind, 3).eval()
    x = torch.randn(2, CHANNELS, 4, 5, dtype=torch.float64)
    fresh = made(kind, 3, seed=1).eval()
    fresh.load_state_dict(module.state_dict())
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(copied(x), module(x))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_half_types_err_at_most_twice_as_much_as_torch(kind: str, dtype: torch.dtype) -> None:
    module = made(kind, 3).to(dtype).eval()
    x = torch.randn(2, CHANNELS, 4, 5).to(dtype)
    ours = module(x).double()
    with ops.backend("reference"):
        plain = module(x).double()
        exact = copy.deepcopy(module).double()(x.double())
    error, allowed = ((y - exact).square().mean().sqrt().item() for y in (ours, plain))
    assert error <= max(2 * allowed, torch.finfo(dtype).eps * exact.abs().mean().item())


@every_kind
def test_bfloat16_autocast_trains(kind: str) -> None:
    module = made(kind, 3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(torch.randn(2, CHANNELS, 4, 5))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@every_kind
def test_compiles_to_one_graph(kind: str) -> None:
    torch.compiler.reset()  # all kinds share the code of `forward`, and torch limits how often that is compiled anew
    module = made(kind, 3).float().eval()
    x = torch.randn(2, CHANNELS, 4, 5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("how", ["autocast", "half"])
def test_positions_do_not_lose_their_steps_in_half_types(how: str) -> None:
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
def test_the_linear_layer_of_the_position_is_called(position: str, backend: ops.Backend) -> None:
    """So its hooks run, and with them pruning, which makes its weight anew before each call."""
    module, x = PairwiseAttention(CHANNELS, 3, position=position), torch.randn(2, CHANNELS, 4, 5)
    linear = module.get_submodule("position.linear")
    seen: list[torch.Size] = []
    linear.register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    l1_unstructured(linear, "weight", 1)
    with ops.backend(backend):
        for _ in range(2):
            module(x).square().sum().backward()
    assert seen == [torch.Size((1, 2, 4, 5))] * 2
    assert linear.get_parameter("weight_orig").grad is not None


def test_repr_tells_all_that_an_experiment_varies() -> None:
    assert PairwiseAttention(64, position="absolute", mapping="L").extra_repr() == (
        "footprint=7, values=16, weights=2, relation=subtraction, mapping=L, transformation=distinct, position=absolute"
    )
    assert PairwiseAttention(64, position="none").extra_repr().endswith(", position=none")
    assert PatchwiseAttention(64, relation="star", transformation="phi_eq_psi").extra_repr() == (
        "footprint=7, values=16, weights=2, relation=star, mapping=LRL, transformation=phi_eq_psi"
    )
    assert ScalarAttention(64).extra_repr() == "footprint=7, values=16, heads=8"


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
    with pytest.raises(ValueError, match="relation 'bad' returned 2 channels but declares 4"):
        add(lambda phi, psi, footprint: ops.unfold(psi[:, :2], footprint))
    with pytest.raises(ValueError, match=r"relation 'bad' returned shape \[1, 4, 3, 3, 9\] but declares 4"):
        san.register_relation("bad", lambda R, K: 4, patchwise=True)(
            lambda phi, psi, footprint: psi[:, :4, ..., None].expand(-1, -1, -1, -1, 9)
        )
    with pytest.raises(ValueError, match="relation 'dot' is a relation of the paper; choose another name"):
        san.register_relation("dot", lambda R, K: 1)(absolute_difference)
    assert "bad" not in PAIRWISE
    # Right for the small map at registration, but not for every number of channels.
    row = san.nn.relation.Relation(lambda R, K: 16, absolute_difference)
    monkeypatch.setitem(PAIRWISE, "bad", row)
    with pytest.raises(ValueError, match="relation 'bad' returned 4 channels but declares 16"):
        PairwiseAttention(64, relation="bad")(torch.randn(1, 64, 8, 8))


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown relation": (
        lambda: PairwiseAttention(64, relation="star"),
        "unknown relation 'star'.* Choose from: summation, sub",
    ),
    "unknown mapping": (lambda: PatchwiseAttention(64, mapping="LR"), "unknown mapping 'LR'; did you mean 'LRL'"),
    "unknown position": (lambda: PairwiseAttention(64, position="rel"), "Choose from: none, absolute, relative"),
    "unknown transformation": (lambda: PairwiseAttention(64, transformation="same"), "Choose from: distinct, phi_eq_psi"),
    "one layer for all, two reductions": (
        lambda: PairwiseAttention(64, transformation="phi_eq_psi_eq_beta"),
        "needs r1 = r2 .* not r1=16 and r2=4",
    ),
    "even footprint": (lambda: PatchwiseAttention(64, 4), "odd and positive .* not 4"),
    "channels not reduced evenly": (lambda: PatchwiseAttention(40), "40 channels are not divisible by r1=16 and by r2=4"),
    "channels not shared evenly": (
        lambda: PairwiseAttention(64, group_size=3),
        "16 value channels .* divisible by group_size=3",
    ),
    "no hidden layer": (lambda: PairwiseAttention(8, r1=4, r2=1), "8 channels are not divisible by 16, which mapping"),
    "group size as a word": (
        lambda: PairwiseAttention(64, group_size="8"),
        "group_size must be an integer of at least 1, not '8'",
    ),  # type: ignore[arg-type]
    "group size as a float": (
        lambda: PatchwiseAttention(64, group_size=8.0),
        "group_size must be an integer of at least 1, not 8.0",
    ),  # type: ignore[arg-type]
    "no group size": (lambda: PatchwiseAttention(64, group_size=0), "group_size must be an integer of at least 1, not 0"),
    "heads as a float": (lambda: ScalarAttention(64, heads=2.0), "heads must be an integer of at least 1, not 2.0"),  # type: ignore[arg-type]
    "a truth for channels": (lambda: PairwiseAttention(True, 1), "channels must be an integer of at least 1, not True"),
    "a truth for a reduction": (lambda: ScalarAttention(64, r1=True), "r1 must be an integer of at least 1, not True"),
    "a truth for the group size": (
        lambda: PairwiseAttention(64, group_size=True),
        "group_size must be an integer of at least 1, not True",
    ),
    "heads": (lambda: ScalarAttention(64, heads=3), "16 relation channels and 16 value channels must be divisible by heads=3"),
    "weights in training": (
        lambda: san.attention_weights(nn.Sequential(PairwiseAttention(64)), torch.zeros(1)),
        "a model in evaluation mode; call model.eval",
    ),
    "a map that is too small": (
        lambda: PairwiseAttention(64)(torch.randn(1, 64, 3, 9)),
        "7x7 footprint with reflection padding needs a feature map of at least 4x4, not 3x9",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_rejects(what: str) -> None:
    call, message = REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        call()
