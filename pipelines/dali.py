"""The DALI graphs, CPU and GPU. Only this imports DALI; import it late.

    reading:     file name -> bytes -> size
    on a GPU:    bytes -> decode -> crop -> resize -> crop -> mirror -> normalise
    on the CPU:  bytes -> decode a part, of which `pipelines.resample` makes the same squares

Two pipelines, because the random crop is computed from the size between them (`pipelines.transform`), in numpy: as operators
of the graph the same arithmetic is thirty tiny tasks per image. Reading ahead is the second gain: a slow disk does not keep
the decoding threads waiting.

Nothing in the graphs is random.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.transform import Transform

# Memory of decoded images is kept for later ones. DALI looks at this when it is loaded.
os.environ.setdefault("DALI_MALLOC_POOL_THRESHOLD", "1024M")

import nvidia.dali

# DALI's stubs know only half of its names.
fn: Any = nvidia.dali.fn
types: Any = nvidia.dali.types
Pipeline: Any = nvidia.dali.pipeline.Pipeline

Bytes = NDArray[np.uint8]

READERS = 16
"""Threads that read files. They wait for the disk most of the time, so their number does not depend on the CPUs: where a file
server takes 4 ms to open a file, 16 read 2900 images/s and 4 read 900."""
READ_AHEAD = 2
"""Batches of encoded images that wait for the decoder."""
PREFETCH = 4
"""Finished batches that wait for the network, at most. The least is two: with one, nothing happens while the network runs."""
PREFETCH_BYTES = 256 * 2**20
"""Memory for that, on the CPU or the GPU; larger batches than half of it take more."""

GPU_DECODER = {
    "device": "mixed",
    "output_type": types.RGB,
    # The GPU's chroma then agrees with the CPU's.
    "jpeg_fancy_upsampling": True,
    # The share of the images that goes to the hardware decoder (A100, H100 and later; others ignore it). The rest is decoded by
    # the GPU's kernels at the same time. DALI's own default, to be tuned on the machine.
    "hw_decoder_load": 0.65,
    # The hardware decoder's memory, allocated once for all images that it gets of a batch: at 32 a batch some 60 MB. For
    # ImageNet's largest image (5980x6430), as in NVIDIA's examples, it would be 2.4 GB. Larger images make it grow. The memory
    # of the GPU's kernels is DALI's default: that of a training and a validation loader is there at the same time.
    "preallocate_width_hint": 1024,
    "preallocate_height_hint": 1024,
}


def reading_pipeline(batches: Callable[[], list[Bytes]], *, packed: bool, max_batch: int) -> Any:
    """A built pipeline that reads batch after batch, for `read`. It needs no GPU.

    What comes in is the bytes of file names, or of the encoded images themselves where they are packed. Here and below,
    `batches` gives the next batch and raises StopIteration at the end of an epoch; after `reset()` the pipeline asks for more.
    """
    pipeline = Pipeline(
        batch_size=max_batch, num_threads=READERS, device_id=None, prefetch_queue_depth=READ_AHEAD, exec_dynamic=True
    )
    with pipeline:
        encoded = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=1)
        if not packed:
            encoded = fn.io.file.read(encoded, dont_use_mmap=True)
        # A header that cannot be parsed makes nvImageCodec 0.9.0 crash the process while it decodes the rest of the batch.
        # So all headers of a batch are looked at before the decoder gets it, in validation too.
        pipeline.set_outputs(encoded, fn.peek_image_shape(encoded), encoded[:2], encoded[-2:])
    pipeline.build()
    return pipeline


class Encoded(NamedTuple):
    """A batch of encoded images."""

    images: Any
    """As DALI holds them."""
    bytes_N: list[int]
    sizes_N2: NDArray[np.int64]
    """(height, width), pixels."""
    endless_N: NDArray[np.bool_]
    """JPEGs without their end mark in the last place: cut off, or with something behind it."""


def read(pipeline: Any) -> Encoded:
    """The next batch of a reading pipeline.

    Raises:
        RuntimeError: a file is missing, or its header makes no sense.
    """
    encoded, shapes, first, last = pipeline.run()
    endless_N = (first.as_array() == (0xFF, 0xD8)).all(axis=1) & (last.as_array() != (0xFF, 0xD9)).any(axis=1)
    return Encoded(encoded, [count for (count,) in encoded.shape()], np.array(shapes.as_array())[:, :2], endless_N)


def image_pipeline(
    transform: Transform, batches: Callable[[], tuple[Any, ...]], *, max_batch: int, threads: int, device_id: int | None
) -> Any:
    """A built pipeline whose `run()` gives the images of the next batch.

    With a number `device_id` that GPU decodes and goes on to normalised squares, float32 NCHW; a batch is then (encoded images,
    *Windows). With None the CPU decodes parts, uint8 (height, width, 3); a batch is (encoded images, (top, left), (height,
    width)). Batches are asked for `prefetch` ahead and not copied: they must live until their images are there.
    """
    pipeline = Pipeline(
        batch_size=max_batch,
        num_threads=threads + 1,  # At the end of a batch all but one may be idle.
        device_id=device_id,
        prefetch_queue_depth=prefetch(transform, max_batch),
        exec_dynamic=True,
    )
    with pipeline:
        pipeline.set_outputs(decoded(batches) if device_id is None else squares(transform, batches))
    pipeline.build()
    return pipeline


def prefetch(transform: Transform, batch: int) -> int:
    """How many batches of so many images are prepared ahead."""
    return max(2, min(PREFETCH, PREFETCH_BYTES // (batch * 3 * transform.size**2 * 4)))


def decoded(batches: Callable[[], tuple[Any, ...]]) -> Any:
    """The graph from encoded images to parts of them, uint8 HWC, on the CPU."""
    encoded, start, extent = _source(batches, [1, 1, 1])
    return fn.decoders.image_slice(encoded, start=start, shape=extent, axes=[0, 1], device="cpu", output_type=types.RGB)


def squares(transform: Transform, batches: Callable[[], tuple[Any, ...]]) -> Any:
    """The graph from encoded images to normalised squares, float32 CHW, on the GPU."""
    encoded, start, extent, length, offset, mirror = _source(batches, [1, 1, 1, 1, 1, 0])
    # Decoded whole: nvImageCodec 0.9.0 fails or crashes when it decodes a part of an image on the GPU (its issue 55).
    crops = fn.slice(fn.decoders.image(encoded, **GPU_DECODER), start=start, shape=extent, axes=[0, 1])
    # Without antialias, accuracy falls by about a percent behind what Pillow's bilinear filter gives.
    resized = fn.resize(crops, size=fn.cast(length, dtype=types.FLOAT), interp_type=types.INTERP_LINEAR, antialias=True)
    whole = (transform.size, transform.size)
    return fn.crop_mirror_normalize(
        fn.slice(resized, start=offset, shape=whole, axes=[0, 1]),
        mirror=mirror,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in transform.mean],
        std=[255 * value for value in transform.std],
    )


def _source(batches: Callable[[], tuple[Any, ...]], dimensions: list[int]) -> Any:
    """Encoded images and int32 numbers from outside."""
    dtypes = [types.UINT8] + [types.INT32] * (len(dimensions) - 1)
    return fn.external_source(
        source=batches, num_outputs=len(dtypes), batch=True, dtype=dtypes, ndim=dimensions, device="cpu", no_copy=True
    )
