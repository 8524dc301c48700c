"""Makes torchvision importable beside the CPU build of torch, for which PyPI has no wheels: they need CUDA libraries."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch

if torch.version.cuda is None and importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
    # torchvision cannot load its own operators and fails without these two. Only `nms` is used here.
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def nms(boxes_N4: torch.Tensor, scores_N: torch.Tensor, threshold: float) -> torch.Tensor:
        """Non-maximum suppression: indices of the boxes that overlap no better box by more than the threshold."""
        from torchvision.ops import box_iou

        order_N = scores_N.argsort(descending=True)
        overlaps_NN = (box_iou(boxes_N4[order_N], boxes_N4[order_N]) > threshold).numpy()
        kept_N = np.ones(len(order_N), bool)
        for place in range(len(order_N)):
            if kept_N[place]:
                kept_N[place + 1 :] &= ~overlaps_NN[place, place + 1 :]
        return order_N[torch.from_numpy(kept_N)]

    library.impl("nms", nms, "CPU")

    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None  # roi_align has a version in Python
