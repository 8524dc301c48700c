"""torchvision: feature extraction, a feature pyramid, Faster R-CNN."""

from __future__ import annotations

import pytest
import torch

import san

torchvision = pytest.importorskip("torchvision", reason="torchvision is missing: run `make test-clients`")

from torchvision.models._utils import IntermediateLayerGetter  # noqa: E402
from torchvision.models.detection import FasterRCNN  # noqa: E402
from torchvision.models.detection.backbone_utils import BackboneWithFPN  # noqa: E402
from torchvision.models.feature_extraction import create_feature_extractor  # noqa: E402

IMAGES = torch.randn(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))


def small(name: str) -> san.models.base.BaseModel:
    return san.create_model(name, 10, width_mult=0.5, num_stages=4).eval()


@pytest.mark.parametrize("name", ["san10_pairwise", "san10_patchwise", "san10_scalar", "resnet26"])
def test_stages_can_be_extracted(name: str) -> None:
    model = small(name)
    offset = len(model.channels) - len(model.stage_names)  # ResNets also have a map of the first convolution
    stages = {model.stage_names[1]: "early", model.stage_names[-1]: "late"}
    maps = model.features(IMAGES)
    expected = {"early": maps[offset + 1], "late": maps[-1]}
    for extractor in (IntermediateLayerGetter(model, stages), create_feature_extractor(model, stages)):
        found = extractor(IMAGES)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_faster_rcnn_trains_and_predicts() -> None:
    stages = {"stage2": "0", "stage3": "1", "stage4": "2"}
    model = small("san10_pairwise")
    backbone = BackboneWithFPN(model, stages, [model.channels[number] for number in (1, 2, 3)], 32)
    anchors = torchvision.models.detection.anchor_utils.AnchorGenerator(((16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 4)
    pool = torchvision.ops.MultiScaleRoIAlign(["0", "1", "2"], 7, 2)
    detector = FasterRCNN(backbone, 3, min_size=96, max_size=160, rpn_anchor_generator=anchors, box_roi_pool=pool)
    images = [torch.rand(3, 90, 130), torch.rand(3, 121, 97)]
    targets = [{"boxes": torch.tensor([[5.0, 5, 60, 60]]), "labels": torch.tensor([1])} for _ in images]
    losses = detector.train()(images, targets)
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert detector.backbone.body.stage2.linear.weight.grad.abs().sum() > 0
    predictions = detector.eval()(images)
    assert [set(found) for found in predictions] == [{"boxes", "labels", "scores"}] * 2
