"""torchvision: feature extraction. `test_guides.py` trains a Faster R-CNN."""

from __future__ import annotations

import pytest
import torch

import san

pytest.importorskip("torchvision", reason="torchvision is missing: run `make test-clients`")

from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor

IMAGES = torch.randn(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))


def test_stages_can_be_extracted() -> None:
    torch.manual_seed(0)
    for name in ("san10_pairwise", "san10_patchwise", "san10_scalar", "resnet26"):
        model = san.create_model(name, 10, width_mult=0.5, num_stages=4).eval()
        offset = len(model.channels) - len(model.stage_names)  # ResNets also have a map of the first convolution
        stages = {model.stage_names[1]: "early", model.stage_names[-1]: "late"}
        maps = model.features(IMAGES)
        expected = {"early": maps[offset + 1], "late": maps[-1]}
        for extractor in (IntermediateLayerGetter(model, stages), create_feature_extractor(model, stages)):
            found = extractor(IMAGES)
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key], value, rtol=0, atol=1e-5 * float(value.detach().abs().max()), msg=f"{name}, {key}"
                )
