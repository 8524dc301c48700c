"""Makes Python programs see a machine with GPUs. Python imports this file if its folder is on PYTHONPATH, in Ray's workers too.

The variable `SAN_STUB` holds a JSON object: the versions `torch` and `cuda`, whether torch can use the GPUs (`usable`), how
many the driver shows (`gpus`), the `capability` and `memory` (GiB) of each, and the only folder in which an `nvcc` is found.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

REAL: list[str] = []
"""The version of torch that is installed."""
STUB: dict[str, Any] = json.loads(os.environ.get("SAN_STUB", "{}"))


def torch(module: ModuleType) -> None:
    REAL.append(str(module.__version__))  # type: ignore[attr-defined]
    module.__version__ = STUB["torch"]  # type: ignore[attr-defined]
    module.version.cuda = STUB["cuda"]
    properties = SimpleNamespace(total_memory=STUB["memory"] * 2**30)
    answers = {
        "is_available": STUB["usable"],
        "device_count": STUB["gpus"] if STUB["usable"] else 0,
        "get_device_capability": tuple(STUB["capability"]),
        "get_device_properties": properties,
        "get_device_name": "a GPU",
    }
    for name, answer in answers.items():
        setattr(module.cuda, name, lambda *_, answer=answer: answer)


class RealVersion(ModuleType):
    """torch for `cuda_ext.build`, which would build all kernels anew for another version."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)


def build(module: ModuleType) -> None:
    module.torch = RealVersion("torch")  # type: ignore[attr-defined]
    module.torch.__version__ = REAL[0]
    find = shutil.which

    def which(name: str, path: str | None = None) -> str | None:
        found = find(name, path=path)
        return found if name != "nvcc" or (found and found.startswith(STUB["nvcc"])) else None

    module.shutil = SimpleNamespace(which=which, rmtree=shutil.rmtree)  # type: ignore[attr-defined]


def nvidia_gpu(module: ModuleType) -> None:
    manager = module.NvidiaGPUAcceleratorManager
    manager.get_current_node_num_accelerators = staticmethod(lambda: STUB["gpus"])
    manager.get_current_node_accelerator_type = staticmethod(lambda: None)


PATCHES = {"torch": torch, "cuda_ext.build": build, "ray._private.accelerators.nvidia_gpu": nvidia_gpu}


class Patcher(importlib.abc.MetaPathFinder):
    """Patches modules as they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                PATCHES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if STUB:
    sys.meta_path.insert(0, Patcher())
