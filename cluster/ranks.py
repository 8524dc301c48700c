"""What several workers of a cell need to find each other. Imports torch, so it is imported late."""

from __future__ import annotations

import os
from typing import Any

from ray.train._internal.utils import get_address_and_port
from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend


class Ranks(TorchConfig):
    """Tells each worker its rank and where the first one is, and leaves it to them to join a process group.

    Ray's own would make all workers join before the function is called: where a GPU cannot be used that fails inside NCCL,
    and nobody learns why.
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_set_ranks, address, port)


def _set_ranks(address: str, port: int) -> None:
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    _set_torch_distributed_env_vars()  # type: ignore[no-untyped-call]
