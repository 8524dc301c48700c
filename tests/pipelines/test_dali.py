"""The DALI graph for GPUs, as far as it can be checked without one, and the number of prefetched batches."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipelines import Transform, dali


def test_gpu_graph_can_be_serialized_without_a_driver() -> None:
    """DALI checks the operators and the names and types of their arguments. Without a driver it decodes nothing."""
    nothing: Iterator[tuple[Any, ...]] = iter(())
    with dali.Pipeline(batch_size=4, num_threads=1, device_id=None) as pipeline:
        pipeline.set_outputs(*dali.gpu_graph(Transform(), nothing))
    serialized = pipeline.serialize()
    assert b"mixed" in serialized and b"hw_decoder_load" in serialized
    assert b"ImageSlice" not in serialized


@pytest.mark.parametrize(("size", "batch", "ahead"), [(8, 2, 4), (224, 64, 4), (224, 128, 3), (224, 256, 2), (224, 8192, 2)])
def test_prefetches_fewer_large_batches(size: int, batch: int, ahead: int) -> None:
    assert dali.prefetch(Transform(size=size, resize=size), batch) == ahead
