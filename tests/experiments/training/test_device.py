"""The device of a trial, and the error messages if it is not available. Torch and the driver are fakes, so no GPU is needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.errors import UserError
from experiments.grids.config import EngineConfig, TrialConfig
from experiments.training.device import (
    available_device,
    computing,
    enough_memory,
    gpu_problem,
    precision_warning,
    prepare_cpu,
    to_device,
    training_device,
)
from experiments.training.engine import arithmetic
from san.ops import library
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.grids.test_grid import expand


def config(*overrides: str) -> TrialConfig:
    return expand(SMALL_GRID, *overrides)["pairwise_3"].config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fake GPUs, for which the kernels are available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(library, "missing", lambda device: None)


def test_trial_without_gpus_trains_on_the_cpu(gpu: None) -> None:
    assert training_device(config()) == torch.device("cpu")
    assert available_device() == torch.device("cuda", 0)


def test_worker_uses_the_gpu_of_its_local_rank(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert training_device(config("placement.gpus=1")) == torch.device("cuda", 1)


def test_rejects_an_unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"placement.gpus=1: torch cannot use a GPU on .+; .+placement.gpus=0"):
        training_device(config("placement.gpus=1"))


def test_reference_operators_on_a_gpu_need_an_option(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda device: "nvcc was not found")
    with pytest.raises(UserError, match=r"nvcc was not found\. .*engine\.reference_operators=true"):
        training_device(config("placement.gpus=1"))
    accepted = config("placement.gpus=1", "engine.reference_operators=true")
    assert training_device(accepted).type == "cuda"
    assert computing(accepted.engine, torch.device("cuda"))["operators"] == "reference (nvcc was not found)"


@pytest.mark.parametrize(
    ("engine", "where", "tf32", "channels_last"),
    [
        ((), "cuda", "true", "true"),
        ((), "cpu", "false", "false"),
        (("engine.tf32=false", "engine.channels_last=false"), "cuda", "false", "false"),
        (("engine.zero_stage=1",), "cuda", "true", "false"),
        (("engine.channels_last=true",), "cpu", "false", "true"),
    ],
    ids=str,
)
def test_defaults_depend_on_the_device(engine: tuple[str, ...], where: str, tf32: str, channels_last: str, gpu: None) -> None:
    found = computing(config(*engine).engine, torch.device(where))
    assert (found["tf32"], found["channels_last"]) == (tf32, channels_last)


@pytest.mark.parametrize(
    ("cuda", "remedy"), [(None, "install a CUDA build of torch"), ("13.0", "check that `nvidia-smi` lists one")]
)
def test_gpu_problem_names_a_remedy(cuda: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert remedy in gpu_problem() and "placement.gpus=0" in gpu_problem()


@pytest.mark.parametrize(("wanted", "allowed"), [(None, True), (True, True), (False, False)], ids=str)
def test_tf32_is_set_for_matmul_and_cudnn(wanted: bool | None, allowed: bool) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = not allowed
    try:
        with arithmetic(EngineConfig(tf32=wanted), torch.device("cuda")):
            assert matmul.allow_tf32 == cudnn.allow_tf32 == allowed
            assert (matmul.fp32_precision == "tf32") == allowed, "what the kernels read"
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def test_copy_to_a_gpu_is_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(Tensor, "to", lambda self, where, non_blocking=False: calls.append(f"{where} {non_blocking}"))
    to_device(torch.zeros(2), torch.device("cuda", 1))
    assert calls == ["pinned", "cuda:1 True"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 98 MiB"),
        RuntimeError("cudaErrorMemoryAllocation in DALI"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
    ],
    ids=["torch", "dali", "cuda", "cublas", "nccl"],
)
def test_out_of_memory_error_names_numbers_and_remedies(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Any = type("Properties", (), {"total_memory": 24 * 2**30})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 22.5 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    wanted = config("placement.gpus=1", "recipe.batch_size=256", "recipe.grad_accum_steps=2")
    with pytest.raises(UserError) as found, enough_memory(wanted, torch.device("cuda")):
        raise error
    assert "22.5 of 24.0 GiB" in str(found.value)
    assert "128 images of" in str(found.value)
    assert "recipe.grad_accum_steps=4 (processes 64 images at a time" in str(found.value)
    assert "recipe.precision=bfloat16" in str(found.value)


def test_other_errors_are_not_changed(gpu: None) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"), enough_memory(config(), torch.device("cuda")):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("libc", ["glibc", "musl"])
def test_glibc_keeps_freed_memory(libc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: calls.append(option)) if libc == "glibc" else SimpleNamespace()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    prepare_cpu(torch.get_num_threads())
    assert [option for option, _ in calls] == ([-4, -1, -2] if libc == "glibc" else [])


@pytest.mark.parametrize(
    ("precision", "device", "capabilities", "is_slow"),
    [
        ("bfloat16", "cpu", {"cpu_name": "an old CPU"}, True),
        ("bfloat16", "cpu", {"avx512_bf16": True}, False),
        ("bfloat16", "cpu", {"amx_bf16": True}, False),
        ("float32", "cpu", {}, False),
        ("bfloat16", "cuda", {}, False),
    ],
)
def test_warns_of_bfloat16_without_instructions_for_it(
    precision: str, device: str, capabilities: dict[str, Any], is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    warning = precision_warning(precision, torch.device(device))
    assert (warning is not None) == is_slow and (not is_slow or "an old CPU" in str(warning))
