"""captum: attribution methods see the ReLUs and the last feature map."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import san

pytest.importorskip("captum", reason="captum is missing: run `make test-clients`")

from captum.attr import GuidedBackprop, IntegratedGradients, LayerGradCam, Saliency

IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_attributions() -> None:
    for name in ("san10_pairwise", "san10_patchwise", "san10_scalar", "resnet26"):
        check_attributions(name)


def check_attributions(name: str) -> None:
    model = san.create_model(name, 10, width_mult=0.5, num_stages=3).eval()
    # Guided backpropagation changes the gradient of every ReLU, so it must differ from the plain gradient.
    guided, plain = GuidedBackprop(model).attribute(IMAGES, target=1), Saliency(model).attribute(IMAGES, target=1, abs=False)
    assert not torch.allclose(guided, plain, rtol=0.1), name
    outside = [module for key, module in model.named_modules() if isinstance(module, nn.ReLU) and "gamma" not in key]
    assert len(outside) >= 7, name
    difference = IntegratedGradients(model).attribute(IMAGES, target=1, n_steps=64).sum()
    assert difference == pytest.approx((model(IMAGES) - model(0 * IMAGES))[0, 1].item(), abs=0.02), name
    assert LayerGradCam(model, model.get_submodule(model.stage_names[-1])).attribute(IMAGES, target=1).shape[1] == 1, name
