"""Named models: parameter counts, classifiers, input channels, error messages."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import san
from san import ops
from san.choice import ChoiceError
from san.models import model_spec
from san.models.base import BaseModel
from san.models.registry import VARIANTS
from san.models.san import PairwiseSpec, PatchwiseSpec, SANSpec, ScalarSpec
from san.nn.folding import MOST_KEPT

ROOT = Path(__file__).parents[2]
SMALL = {"num_stages": 2, "width_mult": 0.5}
EXACT = {"san10_pairwise": (10_531_848, 2_155_268_622), "san10_patchwise": (11_841_124, 1_865_421_568)}
TABLE = yaml.safe_load((ROOT / "experiments/paper/tables.yaml").read_text())
PRINTED = {row["id"]: row for row in TABLE["comparison"]["rows"]} | {"san10_scalar": TABLE["scalar_attention"]["rows"][0]}

every_variant = pytest.mark.parametrize("name", VARIANTS)
every_kind = pytest.mark.parametrize("name", ["resnet26", "san10_pairwise", "san10_patchwise", "san10_scalar"])


def on_meta(name: str, **overrides: object) -> nn.Module:
    with torch.device("meta"):
        return san.create_model(name, **overrides)


@every_variant
def test_counts_match_the_paper(name: str) -> None:
    counted = san.complexity(on_meta(name))
    assert f"{counted.params / 1e6:.1f}" == str(PRINTED[name]["params"])
    assert f"{counted.flops_paper / 1e9:.1f}" == str(PRINTED[name]["flops"])
    if name in EXACT:
        assert (counted.params, counted.flops_paper) == EXACT[name]
    assert counted.flops_actual > 1.5 * counted.flops_paper


@every_kind
def test_evaluation_follows_weights_written_through_data(name: str) -> None:
    """As averages of weights and old code write them. The same holds for running statistics and `eps`."""
    model, fresh = (san.create_model(name, 10, **SMALL).eval() for _ in range(2))
    with torch.no_grad():
        before = model(IMAGES)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.mul_(0.5)
        for layer in (*model.modules(), *fresh.modules()):
            if isinstance(layer, nn.BatchNorm2d):
                layer.eps = 0.5
        fresh.load_state_dict(model.state_dict())
        after = model(IMAGES)
        assert torch.equal(after, fresh(IMAGES)) and not torch.equal(after, before)


@every_kind
def test_folded_copy_gives_the_same_results(name: str) -> None:
    """With float64 weights, too, for which other values are kept; in copies; for other sizes; with gradients of images."""
    model = san.create_model(name, 10, **SMALL)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
    folded = san.fold(model)
    copies = (folded, copy.deepcopy(folded), pickle.loads(pickle.dumps(folded)))
    model.eval()
    for dtype in (torch.float32, torch.float64):
        images = IMAGES.to(dtype, copy=True).requires_grad_()
        expected = model.to(dtype)(images)
        for copied in copies:
            copied.to(dtype)
            with torch.inference_mode():
                torch.testing.assert_close(copied(images), expected.detach(), rtol=1e-4, atol=1e-4)
            logits = copied(images)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            gradients = (torch.autograd.grad(y.square().sum(), images, retain_graph=True)[0] for y in (logits, expected))
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    for size in range(20, 20 + 2 * MOST_KEPT):
        images = torch.randn(1, 3, size, 24, dtype=dtype)
        torch.testing.assert_close(folded(images), model(images), rtol=1e-4, atol=1e-4)
    assert max(len(layer.__dict__["_san_kept"]) for layer in folded.modules()) <= MOST_KEPT


def test_folded_copy_is_frozen() -> None:
    model = san.create_model("san10_pairwise", 10, **SMALL)
    folded = san.fold(model)
    assert model.training and not folded.eval().training
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    for whole, part in ((model, folded), (model.stage1, folded.stage1)):
        for change in (part.train, functools.partial(part.load_state_dict, whole.state_dict())):
            with pytest.raises(RuntimeError, match=r"san\.fold"):
                change()


@torch.no_grad()
def test_folded_copy_of_convolutions_with_shared_weights() -> None:
    model = san.create_model("resnet26", 5, depths=(3,), widths=(64,), num_stages=2).eval()
    for vector in (x for x in model.parameters() if x.dim() == 1):
        vector.add_(torch.randn_like(vector) / 5)
    _, first, second = model.layer1
    second.conv2 = first.conv2
    torch.testing.assert_close(san.fold(model)(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


def test_input_check_reads_no_weight_that_a_hook_sets() -> None:
    model = small().eval()
    prune.l1_unstructured(model.stem, "weight", 0.3)
    assert model.double()(IMAGES.double()).dtype == torch.float64


@every_kind
def test_reset_classifier_changes_the_classes(name: str, tmp_path: Path) -> None:
    model = san.create_model(name, 10, **SMALL).to(torch.bfloat16).eval()
    before = model.state_dict()
    assert model.num_classes == 10
    model.reset_classifier(3)
    after = model.state_dict()
    assert list(after) == list(before)
    changed = [key for key in after if after[key].shape != before[key].shape or not torch.equal(after[key], before[key])]
    assert changed == [key for key in after if key.startswith(("head.", "fc."))]
    assert {value.dtype for value in after.values() if value.is_floating_point()} == {torch.bfloat16}
    assert (model.num_classes, tuple(model.float()(IMAGES).shape)) == (3, (1, 3))
    assert not any(module.training for module in model.modules())
    san.save_checkpoint(model, tmp_path / "a.pt")
    loaded = san.load_checkpoint(tmp_path / "a.pt")
    assert loaded.num_classes == 3 and torch.equal(loaded(IMAGES), model(IMAGES))


@every_kind
def test_first_layer_can_be_replaced(name: str) -> None:
    model = san.create_model(name, 10, **SMALL).eval()
    first = "conv1" if name == "resnet26" else "stem"
    before = model(IMAGES)
    model.add_module(first, nn.Sequential(model.get_submodule(first)))
    torch.testing.assert_close(model(IMAGES), before)


def test_reset_classifier_restores_a_removed_head() -> None:
    model = small().eval()
    model.head = nn.Identity()
    assert model.num_classes == 0 and model(IMAGES).shape == (1, model.channels[-1])
    model.reset_classifier(5)
    assert model.num_classes == 5 and model(IMAGES).shape == (1, 5)


@every_kind
def test_images_with_4_channels(name: str, tmp_path: Path) -> None:
    images = torch.randn(2, 4, 24, 24)
    model = san.create_model(name, 10, in_channels=4, **SMALL).eval()
    san.save_checkpoint(model, tmp_path / "a.pt")
    loaded = san.load_checkpoint(tmp_path / "a.pt")
    assert loaded.in_channels == 4 and torch.equal(loaded(images), model(images))
    backbone = san.create_model(name, in_channels=4, features_only=True, **SMALL)
    assert [x.shape[1] for x in backbone(images)] == list(backbone.channels)


@every_kind
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_num_stages_counts_the_halvings_of_the_map(name: str, stages: int) -> None:
    model = san.create_model(name, 10, num_stages=stages, width_mult=0.5, footprint=3)
    assert [x.shape[-1] for x in model.eval().features(torch.randn(1, 3, 64, 64))][-1] == 64 >> stages
    assert model.reductions[-1] == 2**stages


REFUSALS = {
    "unknown name": (("san11_pairwise", {}), r"'san11_pairwise'; did you mean `san1\d_pairwise`"),
    "field of another kind": (("san10_patchwise", {"position": "none"}), "no field position"),
    "misspelled field": (("resnet26", {"footprnt": 4}), "footprnt; did you mean `footprint`"),
    "text for a number": (("san10_pairwise", {"footprint": "7"}), "footprint.*'7'"),
    "number for a name": (("san10_pairwise", {"relation": 1}), "relation.*1"),
    "unknown relation": (("san10_patchwise", {"relation": "dot"}), "'dot'.*clique"),
    "empty stem": (("resnet26", {"stem_width": 0}), "not 0 and 64"),
    "empty bottlenecks": (("resnet26", {"widths": [2, 4, 8, 16]}), "not 64 and 0"),
    "too many channels": (("san10_pairwise", {"width_mult": 1e9}), "65536 channels, not 2048000000000"),
    "even convolution": (("resnet26", {"footprint": 4}), "odd.* not 4"),
    "no weights": (("resnet26", {"pretrained": True}), "'resnet26'.*resnet26_cifar10"),
    "other weights": (("resnet26_cifar10", {"pretrained": True, "width_mult": 1}), "width_mult"),
    "weights for grey images": (("resnet26_cifar10", {"pretrained": True, "in_channels": 1}), "3 channels, not 1"),
    "widths and depths differ": (("resnet26", {"widths": [64]}), "4 depths but 1 widths"),
    "empty stage": (("resnet26", {"depths": [1, 0, 4, 1]}), r"one block.*depths \(1, 0, 4, 1\)"),
    "too many stages": (("san10_pairwise", {"num_stages": 6}), "num_stages.*not 6"),
    "no stage of a ResNet": (("resnet26", {"num_stages": 1}), "num_stages.*not 1"),
    "no width": (("san10_pairwise", {"width_mult": 0}), "width_mult.*not 0"),
    "channels not divided": (("san10_pairwise", {"width_mult": 0.25}), "stage 1.*4 value channels.*group_size=8"),
}


@pytest.mark.parametrize(
    ("attention", "spec"),
    [(san.PairwiseAttention, PairwiseSpec), (san.PatchwiseAttention, PatchwiseSpec), (san.ScalarAttention, ScalarSpec)],
)
def test_modules_and_specs_have_the_same_defaults(attention: type[nn.Module], spec: type[SANSpec]) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    parameters = inspect.signature(attention).parameters.values()
    assert all(p.default == defaults[p.name] for p in parameters if p.name != "channels")


def test_errors_can_be_pickled() -> None:
    with pytest.raises(ChoiceError) as caught:
        san.PairwiseAttention(64, relation="star")
    unpickled = pickle.loads(pickle.dumps(caught.value))
    assert (str(unpickled), unpickled.field) == (str(caught.value), "relation")


IMAGES = torch.randn(1, 3, 24, 24)
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "negative classes": (lambda: san.create_model("resnet26", -1), "num_classes.*not -1"),
    "classes as text": (lambda: san.create_model("resnet26", "ten"), "num_classes.*'ten'"),  # type: ignore[arg-type]
    "negative classes in a reset": (lambda: small().reset_classifier(-1), "num_classes.*not -1"),
    "another pooling": (lambda: small().reset_classifier(3, "max"), "global_pool.*'max'"),
    "dropout of 1": (lambda: small().set_drop_rates(1.0), "drop_rate.*1.0"),
    "no input channels": (lambda: san.create_model("san10_pairwise", in_channels=0), "in_channels.*not 0"),
    "classifier of a backbone": (
        lambda: san.create_model("resnet26", features_only=True, **SMALL).reset_classifier(3),
        "features_only=True",
    ),
    "grey images": (lambda: small()(IMAGES[:, :1]), r"\[N, 3, H, W\], not \[1, 1, 24, 24\]"),
    "image without a batch": (lambda: small("resnet26")(IMAGES[0]), r"\[N, 3, H, W\], not \[3, 24, 24\]"),
    "another dtype": (lambda: small()(IMAGES.double()), "torch.float64.*torch.float32"),
    "another device": (lambda: small()(IMAGES.to("meta")), "meta.*cpu"),
    "size as text": (lambda: san.complexity(small(), "224"), "input_size.*'224'"),  # type: ignore[arg-type]
    "no pixels": (lambda: san.complexity(small(), 0), "input_size.*not 0"),
}


def small(name: str = "san10_pairwise") -> BaseModel:
    return san.create_model(name, 10, **SMALL)


@pytest.mark.parametrize("what", BAD_CALLS)
def test_rejects_bad_calls(what: str) -> None:
    call, message = BAD_CALLS[what]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("what", REFUSALS)
def test_rejects_bad_overrides(what: str) -> None:
    (name, overrides), message = REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        san.create_model(name, 10, **overrides)


@pytest.mark.parametrize(("name", "least"), [("san10_pairwise", 128), ("san10_patchwise", 128), ("resnet26", 32)])
def test_rejects_an_input_that_is_too_small(name: str, least: int) -> None:
    spec = model_spec(name)
    spec.check_input(least)
    with pytest.raises(ValueError, match=str(least - 1) if name == "resnet26" else "footprint"):
        spec.check_input(least - 1)


def test_error_for_small_images_names_the_stage_and_the_smallest_input() -> None:
    model = san.create_model("san10_pairwise", 10, depths=(1, 1, 1, 1, 1), width_mult=0.5).eval()
    with pytest.raises(ValueError, match=r"stage 5 .*96 x 160 .*128 x 128"):
        model(torch.zeros(1, 3, 96, 160))


def test_complexity_does_not_change_the_model() -> None:
    model = san.create_model("san10_pairwise", 10, **SMALL)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    san.complexity(model, (24, 32))
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_counts_actual_flops_of_the_aggregation() -> None:
    beta, weight = torch.zeros(2, 16, 5, 6, requires_grad=True), torch.zeros(2, 4, 9, 30)
    with FlopCounterMode(display=False) as forward:
        y = ops.aggregation(beta, weight, 3)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == 2 * (2 * 16 * 30) * 9
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
