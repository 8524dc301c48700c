"""The attack agrees with foolbox, stays exactly within its bound, and uses the right gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from experiments.evaluation.attack import Attack, OnPixels, predictions, targets, within
from experiments.evaluation.evaluate import LoadedModel, evaluation_loader, open_checkpoint, open_images
from experiments.evaluation.protocols import PROTOCOLS
from experiments.grids.transform import transform
from experiments.training.checkpoint import last_of
from tests.experiments.conftest import Trained

LARGE = Attack(epsilon=64, step=32, steps=3)
"""Succeeds also on images for which an attack by 8 gray levels fails after two epochs of training."""
ATTACKS = [*(c.measure for c in PROTOCOLS["attack"].conditions if isinstance(c.measure, Attack)), LARGE]


def opened(trained: Trained) -> LoadedModel:
    found = open_checkpoint(last_of(trained.folder, 2))
    found.model.requires_grad_(False)
    return found


def pixels_of(trained: Trained) -> tuple[OnPixels, Tensor, Tensor, Tensor]:
    """The trained network on pixels, the 120 images, their labels and their targets."""
    found = opened(trained)
    how = transform(found.config.data)
    plain = replace(how, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    (batch,) = evaluation_loader(found, open_images(found), plain, 120).epoch(0)
    wanted = targets(batch.labels_N.numpy(), 10, found.seed)
    return OnPixels(found.model, how).eval(), batch.images_NCHW, batch.labels_N, wanted


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_matches_foolbox(attack: Attack, trained: Trained) -> None:
    """Success and accuracy agree within one point (one of 120 images is 0.83 points), and almost all pixels are equal.

    Some pixels differ, because rounding can change the sign of a gradient that is almost zero.
    """
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: it is in requirements.txt")
    network, pixels, labels, wanted = pixels_of(trained)
    how = transform(opened(trained).config.data)
    theirs = foolbox.PyTorchModel(
        network.network, bounds=(0, 1), device="cpu", preprocessing={"mean": how.mean, "std": how.std, "axis": -3}
    )
    steps = foolbox.attacks.LinfPGD(abs_stepsize=attack.step / 255, steps=attack.steps, random_start=False)
    goal = foolbox.criteria.TargetedMisclassification(wanted)
    found = steps.run(theirs, pixels, goal, epsilon=attack.epsilon / 255)
    ours = attack.attacked(network, pixels, wanted)
    assert ((ours - found).abs() > 1e-6).double().mean() < 1e-4
    for answer in (wanted, labels):
        agree = [100 * (predictions(network, images) == answer).double().mean().item() for images in (ours, found)]
        assert agree[0] == pytest.approx(agree[1], abs=1)
    if attack is LARGE:
        assert (predictions(network, ours) == wanted).double().mean() > 0.3  # the attack has an effect


def test_success_and_accuracy_are_shares_of_all_images(trained: Trained) -> None:
    """In several batches; rounding can change the class of an image."""
    network, pixels, labels, wanted = pixels_of(trained)
    found = LARGE(opened(trained), open_images(opened(trained)), 50, lambda: None)
    answers = predictions(network, LARGE.attacked(network, pixels, wanted))
    for name, right in (("success", wanted), ("top1", labels)):
        assert found[name] == pytest.approx(100 * (answers == right).double().mean().item(), abs=1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    attack=st.builds(Attack, epsilon=st.integers(1, 255), step=st.integers(1, 255), steps=st.integers(1, 4)),
    levels=st.booleans(),
)
def test_attacked_pixels_stay_in_range_and_within_epsilon(seed: int, attack: Attack, levels: bool) -> None:
    """The check is exact, because differences of float32 are exact in float64."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(2, 3, 4, 4, generator=generator)
    pixels = (pixels * 255).round() * torch.tensor(1 / 255) if levels else pixels
    pixels[0, 0, 0] = torch.tensor([0.0, 1.0, 1e-30, 1 - 2**-24])
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    before = pixels.clone()
    after = attack.attacked(network.requires_grad_(False), pixels, torch.tensor([1, 4]))
    assert torch.equal(pixels, before)
    assert after.dtype == torch.float32 and not after.requires_grad
    assert after.min() >= 0 and after.max() <= 1
    assert (after.double() - pixels.double()).abs().max() <= attack.epsilon / 255


@given(pixel=st.floats(0, 1, width=32), epsilon=st.integers(1, 255))
def test_bound_is_as_wide_as_allowed(pixel: float, epsilon: int) -> None:
    pixels, bound = torch.tensor([pixel]), epsilon / 255
    for edge, end in zip(within(pixels, bound), (0.0, 1.0), strict=True):
        next_one = torch.nextafter(edge, torch.tensor([2 * end - 0.5]))
        assert edge == end or (next_one.double() - pixels.double()).abs() > bound


@given(classes=st.integers(2, 1000), seed=st.integers(0, 99), count=st.integers(1, 40), shorter=st.integers(1, 40))
def test_targets_differ_from_labels_and_depend_on_seed_and_place(classes: int, seed: int, count: int, shorter: int) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, count)
    found = targets(labels, classes, seed)
    assert found.dtype == torch.int64
    assert ((found >= 0) & (found < classes) & (found != torch.from_numpy(labels))).all()
    assert torch.equal(found[:shorter], targets(labels[:shorter], classes, seed))


def test_targets_are_uniform_over_other_classes() -> None:
    labels = np.full(9000, 3)
    counts = torch.bincount(targets(labels, 10, 0), minlength=10)
    assert counts[3] == 0
    assert ((counts[counts > 0] - 1000).abs() < 150).all() and (counts > 0).sum() == 9
    assert not torch.equal(targets(labels, 10, 0), targets(labels, 10, 1))
