"""Models with torch.compile, torch.export and ONNX, in channels-last memory, and as backbones."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import san
from tests.nn.kinds import randomize_vectors

SMALL: dict[str, Any] = {"num_stages": 2, "width_mult": 0.5}
ONE_BLOCK: dict[str, Any] = {"depths": (1,), "widths": (32,)}
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
KINDS = ("pairwise", "patchwise", "scalar", "resnet")
"""Tested with two stages where nothing else is said; the other models with one block."""
Sizes = Mapping[str, Mapping[str, Any] | None]
"""Models with fields that set their size."""


def every_day(which: str) -> pytest.MarkDecorator:
    """One model with one block is tested every day, the others in a slow test: compilers and exporters take seconds."""
    others: Sizes = {name: None for name in MODELS if name != which}
    return pytest.mark.parametrize(
        "sizes", [pytest.param({which: ONE_BLOCK}, id=which), pytest.param(others, marks=pytest.mark.slow, id="others")]
    )


def made(which: str, size: Mapping[str, Any] | None = None) -> nn.Module:
    """A model in evaluation mode with random scales and biases and updated running statistics."""
    torch.manual_seed(0)
    name, fields = MODELS[which]
    size = size or (SMALL if which in KINDS else ONE_BLOCK)
    model = san.create_model(name, 10, **size, **fields)
    model(torch.randn(4, 3, 24, 28))
    randomize_vectors(model)
    return model.eval()


IMAGES = torch.randn(3, 3, 24, 28, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_compiles_to_one_graph() -> None:
    for which in MODELS.keys() - {"pairwise", "patchwise", "scalar"}:  # tests/ops/test_fused_modules.py compiles these
        torch.compiler.reset()
        model = made(which)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(compiled(IMAGES), model(IMAGES), which)


def assert_close(found: Tensor, expected: Tensor, which: str, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda problem: f"{which}: {problem}")


def results(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Returns logits, gradients and running statistics."""
    logits = model(images)
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    return [logits, *gradients, *model.buffers()]


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.xfail(torch.__version__ < (2, 13), reason="inductor cannot compare symbolic strides on the CPU")
def test_compiled_model_trains_with_any_batch_size() -> None:
    """`dynamic=True` makes the batch size symbolic in the first call; otherwise a second one would do so."""
    torch.compiler.reset()
    model = made("pairwise", ONE_BLOCK).train()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for batch in (2, 3):
        images = torch.randn(batch, 3, 8, 10)
        torch.testing.assert_close(results(compiled, images), results(plain, images), rtol=1e-4, atol=1e-5)


COMPILED_GRADIENT = """
import torch, san.ops
x = torch.ones(1, 4, 5, 5, requires_grad=True)
y = torch.compile(lambda x: san.ops.subtraction(x, x.detach(), 3))(x)
y.backward(torch.ones_like(y))
print(x.grad.sum().item())
"""


@pytest.mark.slow
@pytest.mark.compiles
def test_stored_graphs_are_not_those_of_other_derivatives(tmp_path: Path) -> None:
    """torch.compile stores graphs on disk, and an update of this package may change how operators are differentiated."""
    for package in ("san", "cuda_ext"):
        shutil.copytree(package, tmp_path / package, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "graphs")}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # finding out which instructions work takes longer than the test

    def gradient() -> float:
        command = [sys.executable, "-c", COMPILED_GRADIENT]
        return float(subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout)

    before = gradient()
    source = tmp_path / "san/ops/library.py"
    changed = source.read_text().replace("(*(grad.to(", "(*(2 * grad.to(")
    assert changed != source.read_text()
    source.write_text(changed)
    assert gradient() == 2 * before != 0


DYNAMIC = {0: torch.export.Dim("N"), 2: torch.export.Dim("H", min=16), 3: torch.export.Dim("W", min=16)}
OTHER_SIZES = [torch.randn(size, generator=torch.Generator().manual_seed(2)) for size in ((3, 3, 16, 40), (1, 3, 33, 17))]


@every_day("pairwise")
def test_exports_without_our_operators_for_any_size(sizes: Sizes) -> None:
    for which, size in sizes.items():
        model = made(which, size)
        program = torch.export.export(model, (IMAGES[:2],), dynamic_shapes=(DYNAMIC,))
        assert not [node.target for node in program.graph.nodes if "san" in str(node.target)], which
        exported = program.module()
        for images in (IMAGES, *OTHER_SIZES):
            assert_close(exported(images), model(images), which)


@pytest.mark.slow
@pytest.mark.compiles
def test_an_aot_inductor_package_takes_any_size(tmp_path: Path) -> None:
    model = made("patchwise", ONE_BLOCK)
    with torch.no_grad():
        program = torch.export.export(model, (IMAGES[:2],), dynamic_shapes=(DYNAMIC,))
    once = {"aot_inductor.precompile_headers": False}  # which helps if several models are compiled
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"), inductor_configs=once)
    package = torch._inductor.aoti_load_package(path)
    for images in OTHER_SIZES:
        torch.testing.assert_close(package(images), model(images), rtol=1e-4, atol=1e-5)


def check_onnx(path: Path, model: nn.Module, which: str) -> None:
    """onnxruntime gives the model's numbers at every size."""
    session = onnxruntime.InferenceSession(path)
    for images in (IMAGES, *OTHER_SIZES):
        (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        expected = model(images).detach().numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4, err_msg=which)


@pytest.mark.slow
def test_onnxruntime_gives_the_same_numbers_at_any_size(tmp_path: Path) -> None:
    path, shapes = tmp_path / "model.onnx", (DYNAMIC,)
    for which, opset in (*((which, 18) for which in KINDS), ("pairwise hadamard absolute LRLRL", 25)):
        model = made(which, SMALL if which == "resnet" else ONE_BLOCK)
        torch.onnx.export(model, (IMAGES[:2],), path, dynamo=True, dynamic_shapes=shapes, opset_version=opset, verbose=False)
        check_onnx(path, model, f"{which}, opset {opset}")


@every_day("pairwise")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:Constant folding")
def test_traces_and_legacy_onnx_files_need_no_kernels(sizes: Sizes, tmp_path: Path) -> None:
    path, axes = tmp_path / "model.onnx", {"images": {0: "N", 2: "H", 3: "W"}}
    for which, size in sizes.items():
        model = made(which, size)
        traced = torch.jit.trace(model, IMAGES[:2])
        assert "san::" not in str(traced.inlined_graph), which
        for images in OTHER_SIZES:
            assert_close(traced(images), model(images), which)
        torch.onnx.export(model, (IMAGES[:2],), path, dynamo=False, input_names=["images"], dynamic_axes=axes, opset_version=18)
        check_onnx(path, model, which)


def test_keeps_channels_last() -> None:
    for which, (name, fields) in MODELS.items():
        backbone = san.create_model(name, features_only=True, **SMALL, **fields).eval()
        expected = backbone(IMAGES)
        backbone.to(memory_format=torch.channels_last)
        maps = backbone(IMAGES.to(memory_format=torch.channels_last))
        for got, want in zip(maps, expected, strict=True):
            assert got.is_contiguous(memory_format=torch.channels_last), which
            assert_close(got, want, which, rtol=1e-4, atol=1e-5)


def test_backbone_accepts_any_size_and_the_weights_of_a_classifier() -> None:
    images = torch.randn(2, 3, 33, 46)
    for which, (name, fields) in MODELS.items():
        fields = fields | {"footprint": 3}
        classifier = san.create_model(name, 10, **SMALL, **fields).eval()
        backbone = san.create_model(name, features_only=True, **SMALL, **fields).eval()
        missing, unexpected = backbone.load_state_dict(classifier.state_dict(), strict=False)
        assert not missing, which
        assert {key.split(".")[0] for key in unexpected} <= {"head", "fc"}, which
        maps = backbone(images)
        assert [features.shape[1] for features in maps] == list(backbone.channels), which
        for features, reduction in zip(maps, backbone.reductions, strict=True):
            assert abs(features.shape[2] - images.shape[2] / reduction) < 1, which
        head = classifier.get_submodule("fc" if name == "resnet26" else "head")
        assert_close(head(maps[-1].mean((2, 3))), classifier(images), which)
