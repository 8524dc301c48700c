"""Models with torch.compile, torch.export and ONNX, in channels-last memory, and as backbones."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn

import san
from san.ops.functional import Backend
from tests.nn.kinds import randomize_vectors

SMALL: dict[str, Any] = {"num_stages": 2, "width_mult": 0.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pairwise": ("san10_pairwise", {}),
    "pairwise hadamard absolute LRLRL": (
        "san10_pairwise",
        {"relation": "hadamard", "position": "absolute", "mapping": "LRLRL"},
    ),
    "pairwise dot none": ("san10_pairwise", {"relation": "dot", "position": "none"}),
    "pairwise, one transformation": ("san10_pairwise", {"transformation": "phi_eq_psi_eq_beta", "r1": 4}),
    "patchwise": ("san10_patchwise", {}),
    "patchwise star": ("san10_patchwise", {"relation": "star"}),
    "patchwise clique": ("san10_patchwise", {"relation": "clique", "footprint": 3}),
    "scalar": ("san10_scalar", {}),
    "resnet": ("resnet26", {}),
}
every_model = pytest.mark.parametrize("which", MODELS)
EVERYDAY = ("pairwise", "patchwise", "scalar", "resnet")
each_kind = pytest.mark.parametrize(
    "which", [which if which in EVERYDAY else pytest.param(which, marks=pytest.mark.slow) for which in MODELS]
)
"""All models, of which only one of each kind is tested every day, because compilers and exporters take seconds."""


def made(which: str, size: dict[str, Any] = SMALL) -> nn.Module:
    """A model in evaluation mode with random scales and biases and updated running statistics."""
    torch.manual_seed(0)
    name, fields = MODELS[which]
    model = san.create_model(name, 10, **size, **fields)
    model(torch.randn(4, 3, 24, 28))
    randomize_vectors(model)
    return model.eval()


IMAGES = torch.randn(3, 3, 24, 28, generator=torch.Generator().manual_seed(1))


@each_kind
def test_compiles_to_one_graph(which: str) -> None:
    torch.compiler.reset()
    model = made(which)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(IMAGES), model(IMAGES))


def test_is_not_compiled_again_after_another_model_was_deleted() -> None:
    """Evaluated layers remember folded weights, and training forgets them."""
    torch.compiler.reset()
    graphs: list[fx.GraphModule] = []

    def counted(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    model, other = made("pairwise"), made("resnet")
    with torch.no_grad():
        other(IMAGES)
    compiled = torch.compile(model.train(), fullgraph=True, backend=counted)
    compiled(IMAGES)
    del other
    gc.collect()
    compiled(IMAGES)
    assert len(graphs) == 1


def results(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Returns logits, gradients and running statistics."""
    logits = model(images)
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    return [logits, *gradients, *model.buffers()]


SIZES = [(2, 8, 10), (3, 8, 10), (2, 12, 14)]


@pytest.mark.slow
@pytest.mark.xfail(torch.__version__ < (2, 13), reason="inductor cannot compare symbolic strides on the CPU")
@pytest.mark.parametrize(
    ("which", "backend", "training", "sizes"),
    [
        pytest.param("pairwise", "auto", True, SIZES, id="pairwise training"),
        pytest.param("patchwise", "auto", False, SIZES[:2], id="patchwise evaluation"),
        pytest.param("patchwise", "reference", True, SIZES[:2], id="patchwise training on the reference"),
    ],
)
def test_compiled_model_accepts_images_of_any_size(
    which: str, backend: Backend, training: bool, sizes: list[tuple[int, int, int]]
) -> None:
    """`dynamic=True` makes sizes symbolic in the first call; otherwise a second size would do so."""
    torch.compiler.reset()
    model = made(which, {"depths": (1,), "widths": (32,)}).train(training)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with san.ops.backend(backend):
        for batch, height, width in sizes:
            images = torch.randn(batch, 3, height, width)
            torch.testing.assert_close(results(compiled, images), results(plain, images), rtol=1e-4, atol=1e-5)


DYNAMIC = {0: torch.export.Dim("N"), 2: torch.export.Dim("H", min=16), 3: torch.export.Dim("W", min=16)}
OTHER_SIZES = [torch.randn(size, generator=torch.Generator().manual_seed(2)) for size in ((3, 3, 16, 40), (1, 3, 33, 17))]


@each_kind
def test_exports_without_our_operators_for_any_size(which: str) -> None:
    model = made(which)
    program = torch.export.export(model, (IMAGES[:2],), dynamic_shapes=(DYNAMIC,))
    assert not [node.target for node in program.graph.nodes if "san" in str(node.target)]
    for images in (IMAGES, *OTHER_SIZES):
        torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["pairwise", "patchwise"])
def test_an_aot_inductor_package_takes_any_size(which: str, tmp_path: Path) -> None:
    model = made(which, {"depths": (1,), "widths": (32,)})
    with torch.no_grad():
        program = torch.export.export(model, (IMAGES[:2],), dynamic_shapes=(DYNAMIC,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for images in OTHER_SIZES:
        torch.testing.assert_close(package(images), model(images), rtol=1e-4, atol=1e-5)


def check_onnx(path: Path, model: nn.Module) -> None:
    """onnxruntime gives the model's numbers at every size."""
    session = onnxruntime.InferenceSession(path)
    for images in (IMAGES, *OTHER_SIZES):
        (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        np.testing.assert_allclose(logits, model(images).detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("which", "opset"),
    [
        pytest.param(which, opset, marks=() if (which, opset) == ("pairwise", 18) else pytest.mark.slow)
        for which in MODELS
        for opset in (18, 25)
    ],
)
def test_onnxruntime_gives_the_same_numbers_at_any_size(which: str, opset: int, tmp_path: Path) -> None:
    model, path = made(which), tmp_path / "model.onnx"
    torch.onnx.export(model, (IMAGES[:2],), path, dynamo=True, dynamic_shapes=(DYNAMIC,), opset_version=opset, verbose=False)
    check_onnx(path, model)


@each_kind
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:Constant folding")
def test_traces_and_legacy_onnx_files_need_no_kernels(which: str, tmp_path: Path) -> None:
    model, path = made(which), tmp_path / "model.onnx"
    traced = torch.jit.trace(model, IMAGES[:2])
    assert "san::" not in str(traced.inlined_graph)
    for images in OTHER_SIZES:
        torch.testing.assert_close(traced(images), model(images))
    axes = {"images": {0: "N", 2: "H", 3: "W"}}
    torch.onnx.export(model, (IMAGES[:2],), path, dynamo=False, input_names=["images"], dynamic_axes=axes, opset_version=18)
    check_onnx(path, model)


@every_model
def test_keeps_channels_last(which: str) -> None:
    name, fields = MODELS[which]
    backbone = san.create_model(name, features_only=True, **SMALL, **fields).eval()
    expected = backbone(IMAGES)
    backbone.to(memory_format=torch.channels_last)
    maps = backbone(IMAGES.to(memory_format=torch.channels_last))
    for got, want in zip(maps, expected, strict=True):
        assert got.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@every_model
def test_backbone_accepts_any_size_and_the_weights_of_a_classifier(which: str) -> None:
    name, fields = MODELS[which]
    fields = fields | {"footprint": 3}
    classifier = san.create_model(name, 10, **SMALL, **fields).eval()
    backbone = san.create_model(name, features_only=True, **SMALL, **fields).eval()
    missing, unexpected = backbone.load_state_dict(classifier.state_dict(), strict=False)
    assert not missing
    assert {key.split(".")[0] for key in unexpected} <= {"head", "fc"}
    size = 33, 46
    images = torch.randn(2, 3, *size)
    maps = backbone(images)
    assert [m.shape[1] for m in maps] == list(backbone.channels)
    assert len(maps) == len(backbone.reductions)
    for features, reduction in zip(maps, backbone.reductions, strict=True):
        assert abs(features.shape[2] - size[0] / reduction) < 1
    head = classifier.get_submodule("fc" if name == "resnet26" else "head")
    torch.testing.assert_close(head(maps[-1].mean((2, 3))), classifier(images))
