"""The engine: its options, and saving and loading of its state."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.config.config import EngineConfig, RecipeConfig
from experiments.errors import UserError
from experiments.training.engine import Engine, numerics, validated_weights
from experiments.training.metrics import Accuracy, Scores
from tests.experiments.processes import together

pytestmark = pytest.mark.usefixtures("process_group")
RECIPE = RecipeConfig(epochs=2, batch_size=8, lr=0.5, momentum=0.9, weight_decay=1e-2, label_smoothing=0.1)


def recipe(**changes: Any) -> RecipeConfig:
    return RecipeConfig(**RECIPE.model_dump() | {"lr": 0.01} | changes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Large inputs make large gradients, which show whether DeepSpeed clips them at 1.0, its default.
    return [(50 * torch.randn(8, 6, generator=generator), torch.arange(8) % 4) for _ in range(6)]


def maps() -> list[tuple[Tensor, Tensor]]:
    return [(images.repeat(1, 8).view(8, 3, 4, 4), labels) for images, labels in batches()]


def test_engine_trains_like_plain_torch() -> None:
    engine, plain = Engine(network(), RECIPE, steps=3, micro_batch=8), network()
    sgd = torch.optim.SGD(plain.parameters(), lr=RECIPE.lr, momentum=0.9, weight_decay=1e-2)
    for step, (x, labels) in enumerate(batches()):
        sgd.param_groups[0]["lr"] = RECIPE.lr * (1 + math.cos(math.pi * step / 6)) / 2
        assert engine.lr == pytest.approx(sgd.param_groups[0]["lr"])
        logits = plain(x)
        loss = cross_entropy(logits, labels, label_smoothing=0.1)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        accuracy = float((logits.argmax(1) == labels).float().mean())
        assert engine.train_step(x, labels).tolist() == pytest.approx([loss.item(), accuracy], rel=1e-5)
    for ours, theirs in zip(engine.model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert engine.lr == pytest.approx(0)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def train_on_a_half(rank: int) -> tuple[list[Tensor], Tensor, Scores]:
    """The weights after three steps on this worker's half of each batch, a buffer after averaging, and the scores for images
    that only the first worker has."""
    model = perceptron()
    model.register_buffer("seen", torch.tensor(float(rank)))
    engine = Engine(model, recipe(), 3, 4)
    for images, labels in batches()[:3]:
        engine.train_step(images[rank::2], labels[rank::2])
    engine.average_buffers()
    accuracy = Accuracy(4, torch.device("cpu"))
    if rank == 0:
        accuracy.add(torch.eye(4), torch.tensor([0, 1, 2, 2]))
    return [weight.detach() for weight in engine.module.parameters()], model.seen, accuracy.over_workers()


def test_two_workers_train_like_one(tmp_path: Path) -> None:
    """Gradients and BatchNorm's statistics are the mean over the workers; a worker may lack validation images."""
    alone = Engine(perceptron(), recipe(), 3, 8)
    for images, labels in batches()[:3]:
        alone.train_step(images, labels)
    for weights, seen, scores in together(train_on_a_half, tmp_path):
        for ours, theirs in zip(weights, alone.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        assert seen == 0.5
        assert (scores.top1, scores.confusion) == (75.0, ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1), (0, 0, 0, 0)))


@pytest.mark.slow
@pytest.mark.compiles
def test_several_models_can_be_compiled_in_one_process() -> None:
    """A process may train many trials, and torch limits how often it compiles the same code."""
    x, labels = batches()[0]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for model in (network(), nn.Sequential(nn.Linear(6, 4)), nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4))):
            Engine(model, RECIPE, steps=3, micro_batch=8, config=EngineConfig(compile=True)).train_step(x, labels)


def test_ema_averages_weights_and_statistics() -> None:
    """But not indices."""
    model = network()
    model.register_buffer("index", torch.arange(225))
    engine = Engine(model, recipe(ema_decay=0.8), 3, 8)
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
    assert torch.equal(engine.model.get_buffer("index"), torch.arange(225))


def test_synchronized_norms_replace_no_norm_that_computes_more() -> None:
    class Activated(nn.BatchNorm1d):
        """As in timm."""

        def forward(self, x_NC: Tensor) -> Tensor:
            return super().forward(x_NC).relu()

    with pytest.raises(UserError, match=r"recipe\.sync_batchnorm: .*Activated"):
        Engine(nn.Sequential(nn.Linear(6, 4), Activated(4)), recipe(sync_batchnorm=True), 3, 8)


def test_accumulated_gradients_equal_the_gradients_of_the_whole_batch() -> None:
    """For a model without BatchNorm. Three parts of eight images have different sizes."""
    whole, cut = (Engine(perceptron(), recipe(grad_accum_steps=n), 3, 8 // n) for n in (1, 3))
    for images, labels in batches():
        torch.testing.assert_close(cut.train_step(images / 50, labels), whole.train_step(images / 50, labels))
    assert cut.lr == whole.lr == pytest.approx(0)
    for ours, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_does_not_affect_stored_tensors_and_validation() -> None:
    exact, rounded = Engine(network(), recipe(), 3, 8), Engine(network(), recipe(precision="bfloat16"), 3, 8)
    batch = batches()[0]
    first, second = (float(engine.train_step(*batch)[0]) for engine in (exact, rounded))
    assert first != second == pytest.approx(first, rel=0.02)
    state = rounded.state_dict()
    tensors = [*state["model"].values(), *(moment["momentum_buffer"] for moment in state["optimizer"]["state"].values())]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
    images = batch[0]
    assert torch.equal(rounded.model.eval()(images), copy.deepcopy(rounded.model)(images))
    assert rounded.model(images).dtype == torch.float32


OPTIONS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"warmup_epochs": 0.7}, {}, id="warmup"),
    pytest.param({"cutmix_alpha": 1.0}, {}, id="cutmix"),
    pytest.param({"momentum": 0.0}, {}, id="without momentum"),
    pytest.param({}, {"compile": True}, id="compiled", marks=[pytest.mark.slow, pytest.mark.compiles]),
    pytest.param({"mixup_alpha": 0.4, "ema_decay": 0.9, "grad_accum_steps": 2, "precision": "bfloat16"}, {}, id="several"),
]


@pytest.mark.parametrize(("of_recipe", "of_engine"), OPTIONS)
def test_state_round_trip(of_recipe: dict[str, Any], of_engine: dict[str, Any], tmp_path: Path) -> None:
    options, how = recipe(**of_recipe), EngineConfig(**of_engine)
    first = Engine(convolution(), options, 3, 8, how)
    losses = [first.train_step(*batch)[0] for batch in maps()[:2]]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    losses += [first.train_step(*batch)[0] for batch in maps()[2:4]]
    assert all(map(torch.isfinite, losses))
    second = Engine(convolution(), options, 3, 8, how)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [second.train_step(*batch)[0] for batch in maps()[2:4]] == losses[2:]
    assert set(first.state_dict()["model"]) == set(convolution().state_dict())
    for ours, theirs in ((first.module, second.module), (first.model, second.model)):
        for left, right in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert torch.equal(left, right)


def test_channels_last_gives_the_same_results() -> None:
    first, second = (
        Engine(convolution(), recipe(ema_decay=0.5), 3, 8, EngineConfig(channels_last=wanted)) for wanted in (False, True)
    )
    for batch in maps():
        torch.testing.assert_close(first.train_step(*batch), second.train_step(*batch))
    assert second.module[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    torch.testing.assert_close(first.model.eval()(maps()[0][0]), second.model.eval()(maps()[0][0]))


def test_deterministic_algorithms_are_disabled_after_the_block() -> None:
    with numerics(EngineConfig(deterministic=True), torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_statistics_of_workers_are_averaged() -> None:
    workers = [{"buffers": [{"mean": torch.tensor([first, 2.0]), "count": torch.tensor(3)}]} for first in (1.0, 3.0)]
    weights = validated_weights({"model": {}, "average": None, "workers": workers})
    assert weights["mean"].tolist() == [2.0, 2.0] and weights["count"] == 3
