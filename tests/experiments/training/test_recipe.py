"""Learning rate, mixup and weight averaging, and the checks of a recipe."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import san
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.runner.grid_run import open_grid_run
from experiments.training.recipe import MixedBatch, balancing_weights, cutmix, erased, mixed, mixup, optimizer, schedule
from tests.experiments.config.test_grid import expand
from tests.experiments.conftest import SMALL_GRID, OpenGrid
from tests.experiments.training.test_engine import batches, network, recipe


@given(st.integers(1, 30), st.integers(1, 12), st.floats(0, 0.999))
def test_learning_rate_rises_linearly_then_follows_a_cosine(steps: int, epochs: int, share: float) -> None:
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    course = schedule(sgd, recipe(epochs=epochs, warmup_epochs=share * epochs), steps)
    total, warm = steps * epochs, math.floor(steps * (share * epochs))
    assert warm < total
    for step in range(total + 1):
        cosine = (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2
        assert sgd.param_groups[0]["lr"] == pytest.approx(0.3 * (step / warm if step < warm else cosine))
        sgd.step()
        course.step()
    if not warm:
        assert course.lr_lambdas[0](1) == (1 + math.cos(math.pi * 1 / total)) / 2, "bit-identical to the formula of the paper"


@given(st.floats(1e-4, 1e2), st.integers(1, 4096), st.integers(1, 4096))
def test_learning_rate_is_scaled_with_the_batch_size(lr: float, batch: int, lr_batch_size: int) -> None:
    scaled = recipe(lr=lr, batch_size=batch, lr_batch_size=lr_batch_size)
    assert scaled.lr_used == pytest.approx(lr * batch / lr_batch_size)
    assert (scaled.scaling is None) == (batch == lr_batch_size)
    assert recipe(lr=lr, batch_size=batch).lr_used == lr == recipe(lr=lr, batch_size=batch, lr_batch_size=batch).lr_used


@given(st.lists(st.integers(0, 3), min_size=1).map(lambda labels: [*labels, 0, 1, 2, 3]), st.integers(1, 4))
def test_balanced_classes_have_the_same_share_of_the_loss(labels: list[int], parts: int) -> None:
    """The loss of a batch does not depend on its parts."""
    weight_C = balancing_weights(labels, 4)
    assert weight_C[labels].mean().item() == pytest.approx(1)
    sums = torch.zeros(4).index_add(0, torch.tensor(labels), weight_C[labels])
    torch.testing.assert_close(sums, torch.full((4,), len(labels) / 4))
    logits_NC, labels_N = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0)), torch.tensor(labels)
    batch = MixedBatch(torch.zeros(len(labels), 3, 1, 1), labels_N)
    pieces = [
        len(part.labels_N) / len(labels) * part.loss(logits, 0.1, weight_C)
        for part, logits in zip(batch.parts(parts), logits_NC.tensor_split(parts), strict=True)
        if len(part.labels_N)
    ]
    torch.testing.assert_close(sum(pieces), batch.loss(logits_NC, 0.1, weight_C))
    torch.testing.assert_close(batch.loss(logits_NC, 0.1, torch.ones(4)), batch.loss(logits_NC, 0.1))


@given(st.integers(0, 1000), st.floats(0.1, 10))
def test_cutmix_weights_labels_by_area(seed: int, alpha: float) -> None:
    """Every pixel comes from the image or from its partner."""
    images_NCHW, labels_N = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 10), torch.arange(4)
    torch.manual_seed(seed)
    batch = cutmix(images_NCHW, labels_N, alpha)
    assert batch.others_N is not None and batch.shares_2 is not None
    from_other_NCHW = batch.images_NCHW == batch.others_N[:, None, None, None]
    moved = batch.others_N != labels_N
    assert (from_other_NCHW | (batch.images_NCHW == images_NCHW)).all()
    shares = from_other_NCHW[moved].float().mean((1, 2, 3))
    torch.testing.assert_close(shares, batch.shares_2[1].expand_as(shares))


def test_both_kinds_of_mixing_take_turns() -> None:
    images_NCHW, labels_N = torch.randn(4, 3, 8, 8), torch.arange(4)
    both = [mixed(images_NCHW, labels_N, recipe(mixup_alpha=0.5, cutmix_alpha=0.5)).images_NCHW for _ in range(40)]
    unchanged = [bool((images == images_NCHW).any()) for images in both]
    assert 5 < sum(unchanged) < 35
    assert mixed(images_NCHW, labels_N, recipe()).images_NCHW is images_NCHW


def test_mixup_blends_images_and_labels_alike() -> None:
    (images, labels), smoothing, alpha = batches()[0], 0.1, 0.2
    torch.manual_seed(5)
    mixed = mixup(images, labels, alpha)
    torch.manual_seed(5)
    share = float(torch.distributions.Beta(alpha, alpha).sample())  # type: ignore[no-untyped-call]
    order = torch.randperm(len(labels))
    assert mixed.shares_2 is not None
    torch.testing.assert_close(mixed.shares_2, torch.tensor([share, 1 - share]))
    torch.testing.assert_close(mixed.images_NCHW, share * images + (1 - share) * images[order])
    logits = network()(mixed.images_NCHW)
    soft = share * one_hot(labels, 4) + (1 - share) * one_hot(labels[order], 4)
    expected = cross_entropy(logits, soft, label_smoothing=smoothing)
    torch.testing.assert_close(mixed.loss(logits, smoothing), expected)
    parts = mixed.parts(3)
    assert [len(part.labels_N) for part in parts] == [3, 3, 2]
    mean = sum(
        len(part.labels_N) / 8 * part.loss(its, smoothing) for part, its in zip(parts, logits.tensor_split(3), strict=True)
    )
    torch.testing.assert_close(mean, expected)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**40))
def test_erases_one_rectangle_of_each_image(count: int, height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    for image_CHW in erased(torch.ones(count, 3, height, width), 1.0):
        gone_HW = image_CHW[0] == 0
        rows, columns = gone_HW.any(1), gone_HW.any(0)
        assert torch.equal(gone_HW, rows[:, None] & columns) and (image_CHW == (~gone_HW).float()).all()
        assert gone_HW.any() and (height * width < 100 or gone_HW.float().mean() < 0.4)
        for flags in (rows, columns):
            assert flags.sum() == flags.nonzero().max() - flags.nonzero().min() + 1


def test_erases_a_share_of_the_images() -> None:
    images_NCHW = torch.ones(4000, 1, 16, 16)
    erased_N = (erased(images_NCHW, 0.25) == 0).flatten(1).any(1)
    assert 0.22 < erased_N.float().mean() < 0.28 and (images_NCHW == 1).all()


@pytest.mark.parametrize("options", [{"nesterov": True}, {"optimizer": "adamw"}, {"decay": "weights"}], ids=str)
def test_optimizer_steps_like_torch(options: dict[str, Any]) -> None:
    ours, theirs = network(), network()
    settings = recipe(lr=0.01, weight_decay=0.1, **options)
    if "optimizer" in options:
        expected: torch.optim.Optimizer = torch.optim.AdamW(theirs.parameters(), 0.01, (0.9, 0.999), weight_decay=0.1)
    else:
        weights, rest = ([w for w in theirs.parameters() if (w.dim() > 1) is several] for several in (True, False))
        both = {"momentum": 0.9, "nesterov": "nesterov" in options}
        decay_of_rest = 0.0 if "decay" in options else 0.1
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": decay_of_rest}]
        expected = torch.optim.SGD(groups, 0.01, **both)
    for model, steps in ((ours, optimizer(ours, settings)), (theirs, expected)):
        for images, labels in batches():
            steps.zero_grad()
            cross_entropy(model(images), labels).backward()
            steps.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_every_parameter_is_in_one_group() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    for decay in ("all", "weights"):
        groups = optimizer(model, recipe(decay=decay)).param_groups
        assert {id(weight) for group in groups for weight in group["params"]} == {id(weight) for weight in model.parameters()}


def test_without_mixup_and_erasing_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    images, labels = batches()[0]
    assert mixup(erased(images, 0.0), labels, 0.0).images_NCHW is images
    assert torch.equal(torch.get_rng_state(), before)


def test_mlflow_run_has_the_learning_rate_and_the_numbers_of_workers(open_small_grid: OpenGrid) -> None:
    for workers in (1, 1, 2, 1):
        grid_run = open_small_grid(f"resources.workers={workers}", "recipe.batch_size=64")
        run = grid_run.tracker.open(grid_run.trials[0])
    assert grid_run.tracker.client.get_run(run.run_id).data.tags["san.workers"] == "1,2,1"
    # From a worker that was killed while it described the run.
    grid_run.tracker.client.log_param(run.run_id, "resources.workers", 7)
    run.describe(grid_run.trials[0], san.complexity(grid_run.trials[0].config.model.spec().build(10), 24))
    params = grid_run.tracker.client.get_run(run.run_id).data.params
    assert (params["recipe.lr"], params["recipe.lr_used"], params["recipe.ema_decay"]) == ("0.1", "0.2", "0.0")
    assert params["resources.workers"] == "7"


OFF = """
    warmup_epochs=0 mixup_alpha=0 cutmix_alpha=0 drop_path=0 ema_decay=0 grad_accum_steps=1 precision=float32
    sync_batchnorm=false lr_batch_size=null optimizer=sgd nesterov=false decay=all random_erasing=0
"""
ON = """
    warmup_epochs=1 mixup_alpha=0.2 cutmix_alpha=1 drop_path=0.1 ema_decay=0.9 grad_accum_steps=2 precision=bfloat16
    lr_batch_size=16 batch_size=64 optimizer=adamw nesterov=true decay=weights random_erasing=0.1
"""


def test_options_at_their_defaults_do_not_change_the_key() -> None:
    def key(*overrides: str) -> str:
        return expand(SMALL_GRID, *(f"recipe.{override}" for override in overrides))["resnet26_3"].key

    assert [option for option in OFF.split() if key(option) != key()] == []
    assert len({key(), *map(key, ON.split())}) == len(ON.split()) + 1
    assert key("lr=0.05", "lr_batch_size=16") == key(), "only the scaled rate is part of the key"


@pytest.mark.parametrize(
    ("overrides", "most"), [(["recipe.grad_accum_steps=12", "resources.workers=3"], 10), (["recipe.grad_accum_steps=32"], 31)]
)
def test_rejects_more_accumulation_steps_than_images_in_a_step(overrides: list[str], most: int, tmp_path: Path) -> None:
    """By the batch size before the images are listed, and by the smallest step of an epoch after that."""
    with pytest.raises(UserError, match=rf"^override 'recipe.grad_accum_steps=.*': recipe.grad_accum_steps: .*{most} images"):
        open_grid_run(GridRequest(SMALL_GRID, "digits", overrides, tmp_path))
