"""Accuracy counts every image once."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments.training.metrics import Accuracy

pytestmark = pytest.mark.usefixtures("process_group")


def test_accuracy_counts_images_not_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(37, 9, generator=generator), torch.randint(9, (37,), generator=generator)
    accuracy = Accuracy(9, torch.device("cpu"))
    for start, end in ((0, 16), (16, 32), (32, 37)):
        accuracy.add(logits[start:end], labels[start:end])
    loss, top1, top5, images, _ = accuracy.over_workers()
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert images == 37
    assert loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-6)
    assert top1 == pytest.approx(100 * int((ranks < 1).sum()) / 37)
    assert top5 == pytest.approx(100 * int((ranks < 5).sum()) / 37)


def test_accuracy_with_fewer_than_five_classes() -> None:
    accuracy = Accuracy(3, torch.device("cpu"))
    accuracy.add(torch.eye(3), torch.tensor([0, 1, 0]))
    accuracy.add(torch.eye(3)[:1], torch.tensor([1]))
    assert accuracy.over_workers()[1:] == (50.0, 100.0, 4, ((1, 0, 1), (1, 1, 0), (0, 0, 0)))
    many = Accuracy(51, torch.device("cpu"))
    many.add(torch.eye(51), torch.arange(51))
    assert many.over_workers().confusion is None
