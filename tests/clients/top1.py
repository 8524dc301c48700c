"""Top-1 of the pretrained networks on CIFAR-10's test images in other runtimes, next to PyTorch.

    PYTHONPATH=.clients python -m tests.clients.top1 [NAME ...]

Requires `make test-clients` and `san data prepare cifar10`. Prints the number of right images of each network in PyTorch, in
Lightning, and after an export to ONNX Runtime and AOTInductor, and for how many images the predicted classes differ.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import san
from experiments.evaluation.evaluate import evaluation_loader, open_checkpoint, open_images
from experiments.training.images import transform
from san.models import pretrained
from tests.clients import conftest  # noqa: F401 (makes torchvision importable)

# isort: split
import lightning  # imports torchvision

Batches = list[tuple[Tensor, Tensor]]


class Predictor(lightning.LightningModule):
    """Keeps the predictions of a validation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.predictions = model, list[Tensor]()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.predictions.append(self.model(batch[0]).argmax(1))


def with_lightning(model: nn.Module, batches: Batches) -> Tensor:
    predictor = Predictor(model)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(accelerator="cpu", **quiet).validate(predictor, DataLoader(batches, batch_size=None), verbose=False)
    return torch.cat(predictor.predictions)


def predicted(call: Callable[[Tensor], Tensor], batches: Batches) -> Tensor:
    return torch.cat([call(images_NCHW).argmax(1) for images_NCHW, _ in batches])


def calls(model: nn.Module, images_NCHW: Tensor, folder: Path) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """PyTorch and the exported model in each runtime."""
    yield "PyTorch", model
    sizes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(model, (images_NCHW,), folder / "model.onnx", dynamo=True, dynamic_shapes=sizes, verbose=False)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    name = session.get_inputs()[0].name
    yield "ONNX Runtime", lambda images_NCHW: torch.from_numpy(session.run(None, {name: images_NCHW.numpy()})[0])
    program = torch.export.export(model, (images_NCHW,), dynamic_shapes=sizes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    yield "AOTInductor", torch._inductor.aoti_load_package(package)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=pretrained.included())
    print("| network | runtime | right | other classes than PyTorch |", "|---|---|---:|---:|", sep="\n")
    for network in parser.parse_args().names:
        opened = open_checkpoint(pretrained.WEIGHTS_DIR / network)
        images = open_images(opened)
        loader = evaluation_loader(opened, images, transform(opened.config.data), 100)
        batches = [(images_NCHW.clone(), labels_N.clone()) for images_NCHW, labels_N in loader.epoch(0)]
        labels_N = torch.cat([labels_N for _, labels_N in batches])
        model = san.create_model(network, pretrained=True)
        with tempfile.TemporaryDirectory() as folder:
            found = {name: predicted(call, batches) for name, call in calls(model, batches[0][0], Path(folder))}
        found["Lightning"] = with_lightning(model, batches)
        for name, classes_N in found.items():
            right, other = int((classes_N == labels_N).sum()), int((classes_N != found["PyTorch"]).sum())
            print(f"| {network} | {name} | {right:,} of {len(labels_N):,} | {other} |", flush=True)


if __name__ == "__main__":
    main()
