"""The loader module of registered models: `mlflow.pyfunc.load_model` imports this file and calls `_load_pyfunc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from san import load_checkpoint
from san.models.base import BaseModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Classifier:
    """A classifier for NumPy arrays; runs on the GPU if torch finds one."""

    def __init__(self, model: BaseModel) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)

    @torch.inference_mode()
    def predict(self, images_N3HW: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [N, classes] of normalized images, which are computed as one batch."""
        logits: NDArray[np.float32] = self.model(torch.as_tensor(images_N3HW, device=self.device)).cpu().numpy()
        return logits


def _load_pyfunc(path: str) -> Classifier:
    """Loads a file of `save_checkpoint`."""
    return Classifier(load_checkpoint(path))
