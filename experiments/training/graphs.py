"""CUDA graphs of forward and backward, which save the CPU time of about 1,500 launches per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from experiments.training.recipe import MixedBatch

WARM_UP = 3
"""Number of runs before a capture, in which kernels are compiled and tuned and libraries allocate their workspaces."""

ForwardBackward = Callable[[MixedBatch, int], Tensor]


class StepGraphs:
    """Captures forward and backward once for each batch size, and replays them.

    Args:
        run: runs forward and backward for a part of a step, given the number of images in the step; adds to gradients, whose
            addresses must not change, and returns a tensor.
        state: tensors that `run` changes, such as gradients and running statistics; they are restored after a capture.
    """

    def __init__(self, run: ForwardBackward, state: Iterable[Tensor]) -> None:
        self._run, self._state = run, list(state)
        # One memory pool for all batch sizes, because their graphs never run at the same time and a result is read before the
        # next replay. It must not outlive its graphs: torch refuses to capture into a pool whose graphs are gone.
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int], tuple[MixedBatch, Callable[[], object], Tensor]] = {}

    def __call__(self, part: MixedBatch, images: int) -> Tensor:
        """Returns the result of `run`, which the next call overwrites."""
        size = len(part.labels_N), images
        if size not in self._captured:
            self._captured[size] = self._capture(part, images)
        static, replay, result = self._captured[size]
        for captured, source in zip(static.tensors, part.tensors, strict=True):
            captured.copy_(source)
        replay()
        return result

    def _capture(self, part: MixedBatch, images: int) -> tuple[MixedBatch, Callable[[], object], Tensor]:
        static = part.clone()
        before = [tensor.clone() for tensor in self._state]
        replay, result = record(lambda: self._run(static, images), self._pool)
        for tensor, value in zip(self._state, before, strict=True):
            tensor.copy_(value)
        return static, replay, result


def record(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], object], Tensor]:
    """Captures a function after a warm-up; returns a function that replays it, and the tensor with the result. `pool` holds the
    memory of the graph."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # The default, `global`, fails if a thread of the loader allocates memory during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result
