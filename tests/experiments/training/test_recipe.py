"""Options of the recipe and of the engine: what each one computes, that it resumes, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import san
from experiments.errors import UserError
from experiments.grids.config import EngineConfig, RecipeConfig
from experiments.runs.workspace import Workspace
from experiments.training.checkpoint import Checkpoint, Checkpoints
from experiments.training.engine import Engine, arithmetic
from experiments.training.job import Job, open_job
from experiments.training.recipe import averaged, mixup, schedule
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.grids.test_grid import expand, told
from tests.experiments.processes import Kill, ended, start, weights
from tests.experiments.training.test_training import RECIPE, batches, network

TINY = (
    *("recipe.epochs=2", "recipe.batch_size=50", "data.train_per_class=20"),  # 4 steps an epoch
    *("model.num_stages=1", "reliability.check_every_n_steps=1", "reliability.checkpoint_every_n_minutes=1e-9"),
)
ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr_batch_size": ({"lr_batch_size": 16}, {}),
    "warmup_epochs": ({"warmup_epochs": 0.7}, {}),
    "mixup": ({"mixup_alpha": 0.4}, {}),
    "ema": ({"ema_decay": 0.9}, {}),
    "grad_accum_steps": ({"grad_accum_steps": 3}, {}),
    "bfloat16": ({"precision": "bfloat16"}, {}),
    "zero1": ({}, {"zero_stage": 1}),
    "zero2": ({}, {"zero_stage": 2}),
    "zero2_without_momentum": ({"momentum": 0.0}, {"zero_stage": 2}),
    "compile": ({}, {"compile": True}),
    "channels_last": ({}, {"channels_last": True}),
    "much": ({"mixup_alpha": 0.4, "ema_decay": 0.9, "grad_accum_steps": 2, "precision": "bfloat16"}, {"zero_stage": 2}),
}
"""Options, of the recipe and of the engine."""


def recipe(**changes: Any) -> RecipeConfig:
    return RecipeConfig(**RECIPE.model_dump() | {"lr": 0.01} | changes)


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 4))


def maps() -> list[tuple[Tensor, Tensor]]:
    return [(images.repeat(1, 8).view(8, 3, 4, 4), labels) for images, labels in batches()]


@given(st.integers(1, 30), st.integers(1, 12), st.floats(0, 0.999))
def test_the_rate_rises_linearly_then_follows_a_cosine(steps: int, epochs: int, share: float) -> None:
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
        assert course.lr_lambdas[0](1) == (1 + math.cos(math.pi * 1 / total)) / 2, "the paper's, to the last bit"


@given(st.floats(1e-4, 1e2), st.integers(1, 4096), st.integers(1, 4096))
def test_the_rate_is_scaled_linearly(lr: float, batch: int, lr_batch_size: int) -> None:
    scaled = recipe(lr=lr, batch_size=batch, lr_batch_size=lr_batch_size)
    assert scaled.lr_used == pytest.approx(lr * batch / lr_batch_size)
    assert (scaled.scaling is None) == (batch == lr_batch_size)
    assert recipe(lr=lr, batch_size=batch).lr_used == lr == recipe(lr=lr, batch_size=batch, lr_batch_size=batch).lr_used


def test_a_scaled_rate_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = open_job(SMALL_GRID, "digits", ("recipe.batch_size=48",), tmp_path)
    assert job.trials[0].config.recipe.lr_used == pytest.approx(0.3)
    said = capsys.readouterr().err
    assert said == "learning rate scaled to 0.3 for recipe.batch_size=48 (recipe.lr=0.2 is for recipe.lr_batch_size=32)\n"
    open_job(SMALL_GRID, "digits", ("recipe.batch_size=48", "recipe.lr_batch_size=null"), tmp_path)
    open_job(SMALL_GRID, "digits", (), tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_blends_images_and_labels_alike(alpha: float) -> None:
    (images, labels), smoothing = batches()[0], 0.1
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


def test_without_mixup_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    images, labels = batches()[0]
    assert mixup(images, labels, 0.0).images_NCHW is images
    assert torch.equal(torch.get_rng_state(), before)


def test_the_average_is_exponential_of_weights_and_statistics(process_group: None) -> None:
    engine = Engine(network(), recipe(ema_decay=0.8), 3, 8)
    mean: dict[str, Tensor] | None = None
    for step, batch in enumerate(batches()):
        engine.train_step(*batch)
        now = {name: value.clone().double() for name, value in engine.module.state_dict().items()}
        mean = now if mean is None else {name: 0.8 * mean[name] + 0.2 * value for name, value in now.items()}
        kept = engine.model.state_dict()
        for name, value in mean.items():
            if "num_batches" not in name:
                torch.testing.assert_close(kept[name].double(), value, rtol=1e-5, atol=1e-7, msg=f"{name}, step {step}")
    assert not torch.equal(engine.model[0].weight, engine.module[0].weight)  # type: ignore[index]


def test_the_average_follows_the_model_it_is_of() -> None:
    model = network()
    average = averaged(model, 0.5)
    average.update_parameters(model)
    assert all(map(torch.equal, average.module.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_step_make_the_step(parts: int, process_group: None) -> None:
    """Without BatchNorm; three parts of eight images are of different sizes."""
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    whole, cut = (Engine(copy.deepcopy(plain), recipe(grad_accum_steps=n), 3, 8 // n) for n in (1, parts))
    for images, labels in batches():
        assert float(cut.train_step(images / 50, labels)) == pytest.approx(
            float(whole.train_step(images / 50, labels)), rel=1e-5
        )
    assert cut.lr == whole.lr == pytest.approx(0)
    for ours, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_is_of_the_layers_alone(process_group: None) -> None:
    exact, rounded = Engine(network(), recipe(), 3, 8), Engine(network(), recipe(precision="bfloat16"), 3, 8)
    batch = batches()[0]
    first, second = float(exact.train_step(*batch)), float(rounded.train_step(*batch))
    assert first != second == pytest.approx(first, rel=0.02)
    state = rounded.state_dict()
    tensors = [*state["model"].values(), *(moment["momentum_buffer"] for moment in state["optimizer"]["state"].values())]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
    images = batch[0]
    assert torch.equal(rounded.model.eval()(images), copy.deepcopy(rounded.model)(images))
    assert rounded.model(images).dtype == torch.float32


@pytest.mark.parametrize("name", ALONE)
def test_each_option_trains_and_goes_on_bit_by_bit(name: str, process_group: None, tmp_path: Path) -> None:
    options, how = recipe(**ALONE[name][0]), EngineConfig(**ALONE[name][1])
    first = Engine(convolution(), options, 3, 8, how)
    losses = [first.train_step(*batch) for batch in maps()[:2]]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    losses += [first.train_step(*batch) for batch in maps()[2:4]]
    assert all(map(torch.isfinite, losses))
    second = Engine(convolution(), options, 3, 8, how)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [second.train_step(*batch) for batch in maps()[2:4]] == losses[2:]
    assert set(first.state_dict()["model"]) == set(convolution().state_dict())
    for ours, theirs in ((first.module, second.module), (first.model, second.model)):
        for left, right in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize(("before", "after", "momentum"), [(0, 2, 0.9), (2, 0, 0.9), (1, 2, 0.9), (2, 0, 0.0)])
def test_a_checkpoint_serves_every_stage_of_zero(before: int, after: int, momentum: float, process_group: None) -> None:
    options = recipe(momentum=momentum)
    first, plain = (Engine(network(), options, 3, 8, EngineConfig(zero_stage=stage)) for stage in (before, 0))
    for batch in batches()[:2]:
        assert torch.equal(first.train_step(*batch), plain.train_step(*batch))
    saved, expected = first.state_dict()["optimizer"], plain.state_dict()["optimizer"]
    assert saved["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for number, moment in expected["state"].items():
        assert torch.equal(saved["state"][number]["momentum_buffer"], moment["momentum_buffer"])
    second = Engine(network(), options, 3, 8, EngineConfig(zero_stage=after))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in batches()[2:5]:
        assert torch.equal(second.train_step(*batch), plain.train_step(*batch))
    assert second.lr == plain.lr


def test_channels_last_changes_roundings_only(process_group: None) -> None:
    first, second = (
        Engine(convolution(), recipe(ema_decay=0.5), 3, 8, EngineConfig(channels_last=wanted)) for wanted in (False, True)
    )
    for batch in maps():
        torch.testing.assert_close(first.train_step(*batch), second.train_step(*batch))
    assert second.module[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    torch.testing.assert_close(first.model.eval()(maps()[0][0]), second.model.eval()(maps()[0][0]))


def test_determinism_is_left_with_the_block() -> None:
    with arithmetic(EngineConfig(deterministic=True), torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def last(workspace: Workspace, job: Job) -> Checkpoint:
    path = Checkpoints(workspace.checkpoints(job.trials[1]), job.trials[1].key, 2, 600).newest()
    assert path is not None
    return Checkpoint.read(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, ("mixup_alpha=0.2", "ema_decay=0.9", "warmup_epochs=0.5", "grad_accum_steps=2", "precision=bfloat16")),
        (2, ("mixup_alpha=0.2", "ema_decay=0.9", "grad_accum_steps=2")),
    ],
)
def test_a_killed_trial_with_options_ends_as_the_uninterrupted_one(
    world: int, options: tuple[str, ...], open_small_job: Callable[..., Job], place: Callable[[str], Workspace]
) -> None:
    """And a second run from the start has the same bits, with two threads in one worker and with two workers."""
    how = ("engine.deterministic=true", f"placement.cpus={3 - world}", f"engine.zero_stage={2 * world - 2}")
    job = open_small_job(*TINY, *how, *(f"recipe.{option}" for option in options))
    whole, killed, again = place("whole"), place("killed"), place("again")
    assert ended(start(whole, job.trials[1], world)) == [0] * world
    assert ended(start(again, job.trials[1], world)) == [0] * world
    assert ended(start(killed, job.trials[1], world, Kill("step", 7)))[-1] == -9
    begun = last(killed, job).running
    assert ended(start(killed, job.trials[1], world)) == [0] * world
    assert f"resuming from epoch-{begun.number:04d}-step-{begun.steps:07d}.pt" in killed.log(job.trials[1]).read_text()
    for rank in range(world):
        for name, value in weights(whole, rank).items():
            assert torch.equal(value, weights(killed, rank)[name]), (rank, name)
            assert torch.equal(value, weights(again, rank)[name]), (rank, name)
    finished = last(killed, job).engine
    for name, value in weights(whole).items():
        assert torch.equal(value, finished["average"][name]), "the averaged model is what is returned"
    assert not torch.equal(finished["average"]["conv1.weight"], finished["model"]["conv1.weight"])


@pytest.mark.long
def test_a_trial_goes_on_with_fewer_workers_and_another_stage_of_zero(
    open_small_job: Callable[..., Job], place: Callable[[str], Workspace]
) -> None:
    plain, shared, alone = (open_small_job(*TINY, f"engine.zero_stage={stage}") for stage in (0, 2, 0))
    assert plain.trials[1].key == shared.trials[1].key
    first, second = place("plain"), place("shared")
    for job, workspace in ((plain, first), (shared, second)):
        assert ended(start(workspace, job.trials[1], 2, Kill("step", 7)))[-1] == -9
    expected, saved = last(first, plain).engine, last(second, shared).engine
    for name, value in expected["model"].items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-3, atol=1e-5)
    assert saved["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for number, moment in expected["optimizer"]["state"].items():
        ours = saved["optimizer"]["state"][number]["momentum_buffer"]
        torch.testing.assert_close(ours, moment["momentum_buffer"], rtol=1e-2, atol=1e-4)
    assert ended(start(second, alone.trials[1], 1)) == [0]
    assert "the number of workers changed from 2 to 1" in second.log(alone.trials[1]).read_text()
    assert len(last(second, alone).history) == 2


def test_the_run_tells_the_rate_and_the_numbers_of_workers(open_small_job: Callable[..., Job]) -> None:
    for workers in (1, 1, 2, 1):
        job = open_small_job(f"placement.workers={workers}", "recipe.batch_size=64")
        run = job.tracker.open(job.trials[0])
    assert job.tracker.client.get_run(run.run_id).data.tags["san.workers"] == "1,2,1"
    job.tracker.client.log_param(run.run_id, "placement.workers", 7)  # of a worker that was killed while it described the run
    run.describe(job.trials[0], san.complexity(job.trials[0].config.model.spec().build(10), 24))
    params = job.tracker.client.get_run(run.run_id).data.params
    assert (params["recipe.lr"], params["recipe.lr_used"], params["recipe.ema_decay"]) == ("0.2", "0.4", "0.0")
    assert params["placement.workers"] == "7"


def test_options_that_are_off_do_not_count_in_a_key() -> None:
    key = expand(SMALL_GRID)["resnet26_3"].key
    off = (
        "warmup_epochs=0",
        "mixup_alpha=0",
        "ema_decay=0",
        "grad_accum_steps=1",
        "precision=float32",
        "sync_batchnorm=false",
        "lr_batch_size=null",
    )
    for option in off:
        assert expand(SMALL_GRID, f"recipe.{option}")["resnet26_3"].key == key, option
    on = (
        "warmup_epochs=1",
        "mixup_alpha=0.2",
        "ema_decay=0.9",
        "grad_accum_steps=2",
        "precision=bfloat16",
        "lr_batch_size=16",
        "batch_size=64",
    )
    keys = {expand(SMALL_GRID, f"recipe.{option}")["resnet26_3"].key for option in on}
    assert len(keys | {key}) == len(on) + 1
    same_rate = expand(SMALL_GRID, "recipe.lr=0.1", "recipe.lr_batch_size=16")["resnet26_3"]
    assert same_rate.key == key, "the rate that is used counts, not how it is written"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.warmup_epochs=18"], "recipe.warmup_epochs: must be less than recipe.epochs=18, not 18"),
        (["recipe.warmup_epochs=-1"], "recipe.warmup_epochs: must be a number of at least 0, not -1"),
        (["recipe.mixup_alpha=-0.1"], "recipe.mixup_alpha: must be a number of at least 0, not -0.1"),
        (["recipe.epochs=10000"], "recipe.epochs: must be an integer of at least 1 and at most 9999, not 10000"),
        (
            ["reliability.hang_timeout_minutes=1e20"],
            "reliability.hang_timeout_minutes: must be a number greater than 0 and at most 100000, not '1e20'",
        ),
        (["recipe.ema_decay=1"], "recipe.ema_decay: must be a number of at least 0 and less than 1, not 1"),
        (["recipe.grad_accum_steps=0"], "recipe.grad_accum_steps: must be an integer of at least 1, not 0"),
        (["recipe.precision=float16"], "recipe.precision: must be 'float32' or 'bfloat16', not 'float16'"),
        (["recipe.lr_batch_size=0"], "recipe.lr_batch_size: must be an integer of at least 1, not 0"),
        (
            ["recipe.sync_batchnorm=true"],
            "recipe.sync_batchnorm: needs a GPU, but placement.gpus is 0; leave out this key, or set placement.gpus=1",
        ),
        (["engine.zero_stage=3"], "engine.zero_stage: must be 0, 1 or 2, not 3"),
        (
            ["engine.zero_stage=1", "engine.channels_last=true"],
            "engine.channels_last: cannot be combined with engine.zero_stage=1, which keeps all weights in one flat buffer; "
            "leave out engine.channels_last or engine.zero_stage",
        ),
        (["engine.compil=true"], "engine.compil: unknown key; did you mean `engine.compile`?"),
    ],
)
def test_rejects_what_cannot_be(overrides: list[str], message: str) -> None:
    (line,) = told(lambda: expand(SMALL_GRID, *overrides)).splitlines()
    assert line.startswith(f"override {overrides[-1]!r}: {message}")


def test_rejects_parts_without_images(tmp_path: Path) -> None:
    """Before the images are looked at; by the steps of an epoch, whose sizes differ by one, only then."""
    wrong = (
        "recipe.grad_accum_steps: must be at most {1}, not {0}: in some steps each worker has {1} images "
        "(recipe.batch_size=32, placement.workers={2})"
    )
    with pytest.raises(UserError) as raised:
        open_job(SMALL_GRID, "digits", ("recipe.grad_accum_steps=12", "placement.workers=3"), tmp_path)
    assert str(raised.value) == f"override 'recipe.grad_accum_steps=12': {wrong.format(12, 10, 3)}"
    with pytest.raises(UserError) as raised:
        open_job(SMALL_GRID, "digits", ("recipe.grad_accum_steps=32",), tmp_path)
    assert str(raised.value) == f"{SMALL_GRID}: row patchwise_3: {wrong.format(32, 31, 1)}"


def test_tells_all_that_cannot_be_in_the_transform_with_its_places(write_grid: Callable[[str], Path]) -> None:
    path = write_grid("""
        question: Where is it wrong?
        base: {data: {crop_area: [0.9, 0.1]}, model: {name: resnet26}}
        rows: [{id: a, data: {crop_ratio: [2, 1]}}, {id: b, recipe: {grad_accum_steps: 64}}]
    """)
    assert told(lambda: expand(path, "data.resize=20")).splitlines() == [
        "override 'data.resize=20': data.resize: must be at least size (24), not 20",
        f"{path}: every row: data.crop_area: must be two increasing numbers between 0 and 1, not (0.9, 0.1)",
        f"{path}: row a: data.crop_ratio: must be two increasing numbers above 0, not (2.0, 1.0)",
        f"{path}: row b: recipe.grad_accum_steps: must be at most 32, not 64: in some steps each worker has 32 images "
        "(recipe.batch_size=32, placement.workers=1)",
    ]


def test_synchronised_batchnorm_replaces_every_layer() -> None:
    """As far as can be seen without a GPU; each layer of a SAN too, which then runs operator by operator."""
    config = expand(SMALL_GRID)["pairwise_3"].config
    model = nn.SyncBatchNorm.convert_sync_batchnorm(config.model.spec().build(10))
    kinds = {type(layer) for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    assert kinds == {nn.SyncBatchNorm}
    assert model.eval()(torch.zeros(2, 3, 24, 24)).shape == (2, 10)
