"""The graph for a GPU, as far as DALI looks at it without one, and how far ahead the graphs work."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipelines import Transform, dali


def on_gpu() -> Any:
    nothing: Iterator[tuple[Any, ...]] = iter(())
    pipeline = dali.Pipeline(batch_size=4, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*dali.gpu_graph(Transform(), nothing))
    return pipeline


def test_gpu_graph_can_be_written_down_without_a_driver() -> None:
    """DALI checks the operators, the names and types of their arguments, and the way from CPU to GPU.

    There it ends without a driver: nothing is decoded, and whether the hints to the decoder are good is not seen.
    """
    written = on_gpu().serialize()
    assert b"mixed" in written and b"hw_decoder_load" in written
    assert b"ImageSlice" not in written


def test_hardware_decoder_preallocates_little() -> None:
    decoder = dali.GPU_DECODER
    pixels = decoder["preallocate_width_hint"] * decoder["preallocate_height_hint"]
    assert 32 * decoder["hw_decoder_load"] * 3 * pixels < 100 * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_graph_is_built_no_further_without_a_driver() -> None:
    with pytest.raises(RuntimeError, match="requires a CUDA-capable GPU"):
        on_gpu().build()


@pytest.mark.parametrize(("size", "batch", "ahead"), [(8, 2, 4), (224, 64, 4), (224, 128, 3), (224, 256, 2), (224, 8192, 2)])
def test_large_batches_are_prepared_less_far_ahead(size: int, batch: int, ahead: int) -> None:
    assert dali.prefetch(Transform(size=size, resize=size), batch) == ahead


def test_sixteen_threads_wait_for_files() -> None:
    """A file server takes milliseconds for each; see docs/results/performance.md."""
    assert dali.reading_pipeline(iter([]), packed=True, max_batch=1).num_threads == 16
