"""Engine, metrics and checkpoint: the recipe is what it says, and a resumed run is the same run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.grids.config import EngineConfig, RecipeConfig
from experiments.runs.summary import Epoch
from experiments.training.engine import Engine
from experiments.training.job import Job
from experiments.training.metrics import Accuracy
from experiments.training.trainer import run_trial

RECIPE = RecipeConfig(epochs=2, batch_size=8, lr=0.5, momentum=0.9, weight_decay=1e-2, label_smoothing=0.1)
EPOCH = Epoch(epoch=0, lr=0.1, train_loss=1.0, images_per_second=2.0, wait_share=0.5, val_loss=1.0, top1=50.0, top5=100.0)


def silent(metrics: Mapping[str, float]) -> None:
    """Reports nothing."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


@pytest.fixture
def engine(process_group: None) -> Engine:
    return Engine(network(), RECIPE, steps=3, micro_batch=8)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Large inputs make large gradients: clipping at 1.0, DeepSpeed's silent default, would show.
    return [(50 * torch.randn(8, 6, generator=generator), torch.arange(8) % 4) for _ in range(6)]


def test_engine_trains_like_plain_torch(engine: Engine) -> None:
    plain = network()
    sgd = torch.optim.SGD(plain.parameters(), lr=RECIPE.lr, momentum=0.9, weight_decay=1e-2)
    for step, (x, labels) in enumerate(batches()):
        sgd.param_groups[0]["lr"] = RECIPE.lr * (1 + math.cos(math.pi * step / 6)) / 2
        assert engine.lr == pytest.approx(sgd.param_groups[0]["lr"])
        loss = cross_entropy(plain(x), labels, label_smoothing=0.1)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert engine.train_step(x, labels) == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(engine.model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert engine.lr == pytest.approx(0)


def test_deepspeed_waits_for_no_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *arguments: waits.append(arguments))
    for batch in batches():
        engine.train_step(*batch)
    assert not waits


def test_gradients_are_the_mean_over_the_workers(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker, which is only pretended, always has gradients of 1."""

    class TwoWorkers:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.distributed, name)

        def get_world_size(self) -> int:
            return 2

        def all_reduce(self, gradients: Tensor) -> None:
            assert gradients.is_contiguous()
            gradients += 1

    monkeypatch.setattr("experiments.training.engine.dist", TwoWorkers())
    recipe = RECIPE.model_copy(update={"momentum": 0.0, "weight_decay": 0.0, "label_smoothing": 0.0})
    engine, alone = Engine(network(), recipe, steps=3, micro_batch=8), network()
    copies: list[object] = []
    monkeypatch.setattr(engine._engine, "allreduce_gradients", lambda *arguments: copies.append(arguments))
    before = [weight.detach().clone() for weight in alone.parameters()]
    x, labels = batches()[0]
    cross_entropy(alone.train()(x), labels).backward()

    engine.train_step(x, labels)
    for weight, old, its in zip(engine.module.parameters(), before, alone.parameters(), strict=True):
        assert its.grad is not None
        torch.testing.assert_close(weight, old - recipe.lr * (its.grad + 1) / 2)
    assert not copies, "DeepSpeed averages them too"


def test_the_compiler_sees_no_hooks_and_makes_code_for_each_size(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[object, object]] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled.append((call, options)) or call)
    model = network()
    forward = model.forward
    Engine(model, RECIPE, steps=3, micro_batch=8, config=EngineConfig(compile=True))
    assert compiled == [(forward, {"dynamic": False})]
    assert model._compiled_call_impl is None, "hooks would be compiled too"


def test_deepspeed_compiles_nothing_at_start(engine: Engine) -> None:
    import deepspeed

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__, "DeepSpeed renamed the switch that the engine sets"
    assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] or torch.cuda.is_available()


def test_engine_state_round_trip(engine: Engine, tmp_path: Path) -> None:
    first, second = batches()[:2]
    engine.train_step(*first)
    other = Engine(network(), RECIPE, steps=3, micro_batch=8)
    torch.save(engine.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert engine.train_step(*second) == other.train_step(*second)
    for ours, theirs in zip(engine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_accuracy_counts_images_not_batches(process_group: None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(37, 9, generator=generator), torch.randint(9, (37,), generator=generator)
    accuracy = Accuracy(torch.device("cpu"))
    for start, end in ((0, 16), (16, 32), (32, 37)):
        accuracy.add(logits[start:end], labels[start:end])
    loss, top1, top5, images = accuracy.over_workers()
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert images == 37
    assert loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-6)
    assert top1 == pytest.approx(100 * int((ranks < 1).sum()) / 37)
    assert top5 == pytest.approx(100 * int((ranks < 5).sum()) / 37)


def test_accuracy_with_fewer_than_five_classes(process_group: None) -> None:
    accuracy = Accuracy(torch.device("cpu"))
    accuracy.add(torch.eye(3), torch.tensor([0, 1, 0]))
    assert accuracy.over_workers()[1:] == (pytest.approx(200 / 3), 100.0, 3)


def test_resumed_trial_is_the_uninterrupted_one(
    open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    """Killed after its first epoch and started again: the same bits, one run, no epoch missing or doubled."""
    job = open_small_job("recipe.epochs=2", "recipe.batch_size=256")
    whole = replace(job.workspace, runs=job.workspace.runs / "whole")
    first, second = (trial for trial in job.trials if trial.row in ("resnet26_3", "pairwise_3"))
    expected = run_trial(whole, first, silent).state_dict()

    def killed(metrics: Mapping[str, float]) -> None:
        if metrics["epoch"] == 1:
            raise KeyboardInterrupt

    job.tracker.client.delete_run(job.tracker.results()[first.key].run_id)
    with pytest.raises(KeyboardInterrupt):
        run_trial(job.workspace, first, killed)
    assert not job.tracker.results()[first.key].finished
    resumed = run_trial(job.workspace, first, silent).state_dict()
    for name, value in expected.items():
        assert torch.equal(value, resumed[name]), name

    result = job.tracker.results()[first.key]
    assert result.finished
    history = job.tracker.client.get_metric_history(result.run_id, "val/top1")
    assert [metric.step for metric in history] == [0, 1]
    assert second.key not in job.tracker.results()


def test_trial_logs_what_the_architecture_names(open_small_job: Callable[..., Job], process_group: None) -> None:
    job = open_small_job("recipe.epochs=1", "recipe.batch_size=480")
    reports: list[Mapping[str, float]] = []
    run_trial(job.workspace, job.trials[0], reports.append)
    run = job.tracker.client.get_run(job.tracker.results()[job.trials[0].key].run_id)
    assert {"train/loss", "train/images_per_second", "train/wait_share", "val/loss", "val/top1", "val/top5", "lr"} <= set(
        run.data.metrics
    )
    assert {"params", "flops_paper", "flops_actual"} <= set(run.data.metrics)
    first, result = reports
    assert (first["epoch"], first["epochs"], first["step"], first["steps"]) == (0, 1, 1, 3)
    assert len(job.tracker.client.get_metric_history(run.info.run_id, "train/loss")) == 1
    assert not {"step", "steps"} & set(run.data.metrics)
    said = job.workspace.log(job.trials[0]).read_text()
    assert re.findall(r"worker 0: (epoch \S+ (?:step \S+, )?loss|epoch \S+ top-1)", said) == [
        "epoch 1/1, step 1/3, loss",
        "epoch 1/1, top-1",
    ]
    assert run.data.metrics["summary/best_top1"] == run.data.metrics["summary/last_top1"] == result["val/top1"]
    assert run.data.metrics["summary/best_epoch"] == 1
    assert run.data.metrics["summary/images_per_second"] == pytest.approx(result["train/images_per_second"])
    assert run.data.metrics["summary/training_hours"] * 3600 == pytest.approx(1437 / result["train/images_per_second"])
    assert run.data.params["model.name"] == "san10_pairwise"
    assert run.data.params["data.size"] == "24"
    assert run.data.params["recipe.epochs"] == "1"
    assert run.data.params["seed"] == "0"
    assert run.data.tags["san.trial"] == job.trials[0].key
    assert {"san.grid", "san.row", "san.data_digest", "mlflow.parentRunId"} <= set(run.data.tags)
    assert run.data.tags["san.device"] == "cpu"
    assert run.data.tags["san.operators"] == "kernels"
    assert (run.data.tags["san.tf32"], run.data.tags["san.channels_last"]) == ("false", "false")
    artifacts = {file.path for file in job.tracker.client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config.yaml", "environment.txt", "model"}
    assert result["epoch"] == result["epochs"] == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_system_metrics(
    wanted: bool, open_small_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", str(wanted).lower())
    job = open_small_job("recipe.epochs=2", "recipe.batch_size=256")
    run_trial(job.workspace, job.trials[1], silent)
    metrics = job.tracker.results()[job.trials[1].key].metrics
    assert ("system/cpu_utilization_percentage" in metrics) == wanted


def test_the_load_of_gpus_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By MLflow, through `nvidia-ml-py`, of which it says nothing when missing file."""
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=6e9, total=24e9),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87),
        "nvmlDeviceGetPowerUsage": 300_000,
        "nvmlDeviceGetEnforcedPowerLimit": 450_000,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monitor = GPUMonitor()
    monitor.collect_metrics()
    assert monitor.aggregate_metrics()["gpu_0_utilization_percentage"] == 87


@pytest.mark.slow
def test_one_model_after_another_is_compiled(process_group: None) -> None:
    """A process may have many cells; torch counts how often it compiles the same code."""
    x, labels = batches()[0]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for model in (network(), nn.Sequential(nn.Linear(6, 4)), nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4))):
            Engine(model, RECIPE, steps=3, micro_batch=8, config=EngineConfig(compile=True)).train_step(x, labels)
