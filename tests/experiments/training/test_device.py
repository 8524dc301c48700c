"""The device of a trial, and the error messages if it is not available. The GPUs are fakes, so none is needed."""

from typing import Any

import pytest
import torch

from experiments.config.config import EngineConfig, TrialConfig
from experiments.errors import UserError
from experiments.training.device import (
    available_device,
    compute_tags,
    explain_oom,
    gpu_problem,
    prepare_cpu,
    training_device,
)
from experiments.training.engine import numerics
from san.ops import library
from tests.experiments.config.test_grid import expand
from tests.experiments.conftest import SMALL_GRID


def config(*overrides: str) -> TrialConfig:
    return expand(SMALL_GRID, *overrides)["pairwise_3"].config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fake GPUs, for which the kernels are available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(library, "missing", lambda device: None)


def test_config_decides_on_the_device(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_device() == torch.device("cuda", 0)
    assert training_device(config()) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert training_device(config("resources.gpus=1")) == torch.device("cuda", 1)


@pytest.mark.parametrize(("cuda", "remedy"), [(None, "CUDA build of torch"), ("13.0", "`nvidia-smi`")])
def test_rejects_an_unusable_gpu(cuda: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert remedy in gpu_problem() and "resources.gpus=0" in gpu_problem()
    with pytest.raises(UserError, match=r"resources.gpus=1: .*resources.gpus=0"):
        training_device(config("resources.gpus=1"))


def test_reference_operators_on_a_gpu_need_an_option(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda device: "nvcc was not found")
    with pytest.raises(UserError, match=r"nvcc was not found\. .*engine\.reference_operators=true"):
        training_device(config("resources.gpus=1"))
    accepted = config("resources.gpus=1", "engine.reference_operators=true")
    assert training_device(accepted).type == "cuda"
    assert compute_tags(accepted.engine, torch.device("cuda"))["operators"] == "reference (nvcc was not found)"


@pytest.mark.parametrize(("where", "on"), [("cuda", "true"), ("cpu", "false")])
def test_defaults_depend_on_the_device(where: str, on: str, gpu: None) -> None:
    found = compute_tags(config().engine, torch.device(where))
    assert (found["tf32"], found["channels_last"]) == (on, on)


@pytest.mark.parametrize(("wanted", "allowed"), [(None, True), (False, False)], ids=str)
def test_tf32_is_set_for_matmul_and_cudnn(wanted: bool | None, allowed: bool) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = not allowed
    try:
        with numerics(EngineConfig(tf32=wanted), torch.device("cuda")):
            assert matmul.allow_tf32 == cudnn.allow_tf32 == allowed
            assert (matmul.fp32_precision == "tf32") == allowed, "what the kernels read"
        assert matmul.allow_tf32 == cudnn.allow_tf32 == (not allowed), "as before"
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 98 MiB"),
        RuntimeError("cudaErrorMemoryAllocation in DALI"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError('torch_call_dispatcher("aten::new_empty") API call failed'),
        RuntimeError('torch_call_dispatcher("aten::contiguous") API call failed'),
    ],
    ids=["torch", "dali", "cublas", "kernel", "another error of a kernel"],
)
def test_out_of_memory_error_names_numbers_and_remedies(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Any = type("Properties", (), {"total_memory": 24 * 2**30})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 22.5 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    wanted = config("resources.gpus=1", "recipe.batch_size=256", "recipe.grad_accum_steps=2")
    failed = 0
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_ooms": failed})
    with pytest.raises(Exception) as found, explain_oom(wanted, torch.device("cuda")):
        failed += "new_empty" in str(error)
        raise error
    if "contiguous" in str(error):
        assert found.value is error
        return
    assert isinstance(found.value, UserError)
    parts = ("22.5 of 24.0 GiB", "128 images", "grad_accum_steps=4 (processes 64 images", "precision=bfloat16")
    assert all(part in str(found.value) for part in parts), found.value
    with (
        pytest.raises(UserError, match=r"set one of: recipe\.batch_size=128 \(in `san run` instead resources\.workers=2"),
        explain_oom(wanted, torch.device("cuda"), False),
    ):
        failed += 1
        raise error


def test_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    prepare_cpu(before + 1)
    assert torch.get_num_threads() == before + 1
    prepare_cpu(before)
