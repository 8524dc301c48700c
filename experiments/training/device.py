"""Which device a trial trains on, and clear errors where that device cannot be used.

`resources.gpus` decides, not what the machine has: a trial that asked for a GPU must not train on the CPU for days while the
GPU is reserved for it.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experiments.config.config import EngineConfig, TrialConfig
from experiments.errors import MachineError, UserError
from san.ops import library

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # options of glibc's mallopt


def available_device() -> torch.device:
    """A GPU if torch can use one, else the CPU: for commands that have no `resources.gpus`."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def training_device(config: TrialConfig) -> torch.device:
    """The CPU for a trial without GPUs, else this worker's GPU.

    Raises:
        MachineError: the trial needs a GPU, but torch cannot use one here or the CUDA kernels cannot run.
    """
    if config.resources.gpus == 0:
        return torch.device("cpu")
    gpus = config.resources.gpus
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words on an old driver, which `gpu_problem` has too
        if not torch.cuda.is_available():
            raise MachineError(f"resources.gpus={gpus:g}: torch cannot use a GPU on {os.uname().nodename}: {gpu_problem()}")
    if not config.engine.reference_operators and (missing := library.missing("cuda")) is not None:
        raise MachineError(
            f"the CUDA kernels are not available on {os.uname().nodename}: {missing}. Without the kernels, training is several "
            "times slower and needs about four times as much memory; to accept this, set engine.reference_operators=true"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def prepare_cpu(threads: int) -> None:
    """Sets the number of torch's threads, and lets glibc keep freed memory for the next maps of the same size.

    glibc otherwise returns large blocks to the system, which zeroes each page of new memory. Other C libraries are left alone.
    """
    torch.set_num_threads(threads)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)):
            libc.mallopt(option, value)


def compute_tags(config: EngineConfig, device: torch.device) -> dict[str, str]:
    """The device, operators and precision of a trial, for its log and the tags of its run."""
    missing, settings = library.missing(device.type), config.on(device.type)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "operators": "kernels" if missing is None else f"reference ({missing})",
        "tf32": str(settings.tf32).lower(),
        "channels_last": str(settings.channels_last).lower(),
    }


def gpu_problem() -> str:
    """Why torch cannot use a GPU on this machine, and what to do about it."""
    otherwise = "or train on the CPU with resources.gpus=0"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch, {otherwise}"
    return (
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no usable GPU; check that `nvidia-smi` lists "
        f"one with a driver for this version of CUDA, and the variable CUDA_VISIBLE_DEVICES, {otherwise}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch or DALI ran out of memory, on a GPU or a CPU."""
    texts = ("defaultcpuallocator", "out of memory", "cudaerrormemoryallocation", "alloc_failed")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error).lower() for text in texts)


def _failed_allocations(device: torch.device) -> int:
    """Of GPU memory, so far. An error inside of our kernels does not say why it failed: torch's stable ABI drops the cause."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


@contextmanager
def explain_oom(config: TrialConfig, device: torch.device, is_training: bool = True) -> Iterator[None]:
    """Inside the block, running out of GPU memory is a mistake in the config: a retry would only repeat it.

    Raises:
        UserError: out of GPU memory; the message has the numbers, and the overrides that help.
    """
    before = _failed_allocations(device)
    try:
        yield
    except Exception as error:
        if device.type == "cuda" and (_is_out_of_memory(error) or _failed_allocations(device) > before):
            raise UserError(_out_of_memory(config, device, is_training)) from error
        raise


def _out_of_memory(config: TrialConfig, device: torch.device, is_training: bool) -> str:
    recipe, workers = config.recipe, config.resources.workers
    gib = 2**30
    peak, total = torch.cuda.max_memory_allocated(device) / gib, torch.cuda.get_device_properties(device).total_memory / gib
    at_once = recipe.images_at_once(workers)
    remedies = []
    if at_once > 1:
        halved = f"processes {-(-at_once // 2)} images at a time, also for BatchNorm"
        remedies.append(f"recipe.grad_accum_steps={2 * recipe.grad_accum_steps} ({halved})")
    if recipe.precision == "float32":
        remedies.append("recipe.precision=bfloat16 (halves most activations)")
    remedies.append(f"resources.workers={2 * workers} (splits each batch over more GPUs)")
    if not is_training:
        smaller = f"recipe.batch_size={-(-recipe.batch_size // 2)}"
        remedies = [f"{smaller} (in `san run` instead resources.workers={2 * workers}, which is not part of a key)"]
    return (
        f"out of GPU memory: tensors took {peak:.1f} of {total:.1f} GiB with {at_once} images of {config.data.size} x "
        f"{config.data.size} pixels at a time (recipe.batch_size={recipe.batch_size}, resources.workers={workers}, "
        f"recipe.grad_accum_steps={recipe.grad_accum_steps}); set one of: {', '.join(remedies)}"
    )
