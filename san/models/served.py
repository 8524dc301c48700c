"""A file of weights as a model of MLflow's, `mlflow.pyfunc.load_model`: pixels in, logits out. Needs no MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from san.models.checkpoint import load_checkpoint
from san.models.spec import Trunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Served:
    """A classifier on the GPU, where torch sees one, that takes and gives arrays."""

    def __init__(self, model: Trunk) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)

    @torch.inference_mode()
    def predict(self, images_N3HW: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [N, classes] of normalised images, all of them as one batch."""
        return self.model(torch.as_tensor(images_N3HW, device=self.device)).cpu().numpy()


def _load_pyfunc(path: str) -> Served:
    """What MLflow calls, with a file of `save_checkpoint`."""
    return Served(load_checkpoint(path))
