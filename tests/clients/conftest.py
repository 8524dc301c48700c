"""Makes torchvision importable beside the CPU build of torch, for which PyPI has no wheels: they need CUDA libraries."""

from __future__ import annotations

import importlib.util

import torch

if torch.version.cuda is None and importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
    # torchvision cannot load its own operators and fails without these two. Only `nms` is used here.
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def nms(boxes_N4: torch.Tensor, scores_N: torch.Tensor, threshold: float) -> torch.Tensor:
        """Non-maximum suppression: indices of the boxes that overlap no better box by more than the threshold."""
        from torchvision.ops import box_iou

        kept: list[int] = []
        for index in scores_N.argsort(descending=True).tolist():
            if not kept or bool((box_iou(boxes_N4[index, None], boxes_N4[kept]) <= threshold).all()):
                kept.append(index)
        return torch.tensor(kept, dtype=torch.int64)

    library.impl("nms", nms, "CPU")

    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None  # roi_align has a version in Python
