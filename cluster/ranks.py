"""Sets the variables with which several workers of a trial find each other. Imports torch, so import this file late."""

from __future__ import annotations

import os
from typing import Any

from ray.train._internal.utils import get_address_and_port
from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend


class Ranks(TorchConfig):
    """Sets each worker's rank and the address of the first one. The workers join a process group themselves.

    With Ray's own configuration, all workers would join before the function is called. If a GPU cannot be used, this fails
    inside NCCL without a useful message. `TorchConfig` has no public hook for this, hence the private imports.
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
