"""The DALI graphs. Only this module imports DALI; import it only when an epoch starts.

    reading:     file name -> bytes -> image size
    on a GPU:    bytes -> decode -> crop -> resize -> crop -> mirror -> normalize
    on a CPU:    bytes -> decode a region, from which `pipelines.resample` makes the same squares

Between reading and decoding, `pipelines.transform` computes the crops from the image sizes in numpy. As operators of a DALI
graph, the same arithmetic would be thirty tiny tasks per image. Separate pipelines also read ahead, so that slow disks do not
stall decoding. The graphs contain no random operators.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.transform import Transform

# DALI reads this setting when it is loaded, and then reuses the memory of decoded images.
os.environ.setdefault("DALI_MALLOC_POOL_THRESHOLD", "1024M")

import nvidia.dali

# DALI's type stubs are incomplete.
fn: Any = nvidia.dali.fn
types: Any = nvidia.dali.types
Pipeline: Any = nvidia.dali.pipeline.Pipeline

Bytes = NDArray[np.uint8]

READERS = 16
"""Threads that read files. They mostly wait for the disk, so their number does not depend on the number of CPUs. If a file
server takes 4 ms to open a file, 16 threads read 2900 images/s and 4 threads read 900."""
READ_AHEAD = 2
"""Batches of encoded images that are read ahead."""
PREFETCH = 4
"""Maximum number of batches that are decoded ahead. The minimum is two; with one, decoding stops while the network runs."""
PREFETCH_BYTES = 256 * 2**20
"""Memory for these batches on the CPU or GPU. Two batches are decoded ahead even if they need more."""

MOST_PIXELS = 178_956_970
"""Larger images are rejected before they are decoded, because a header can claim more pixels than fit into memory. This is
the size at which Pillow raises an error."""

GPU_DECODER = {
    "device": "mixed",
    "output_type": types.RGB,
    # Upsamples chroma like the CPU's decoder.
    "jpeg_fancy_upsampling": True,
    # Fraction of the images for the hardware decoder (A100, H100 and later; ignored by others). CUDA kernels decode the rest at
    # the same time. This is DALI's default; tune it on your machine.
    "hw_decoder_load": 0.65,
    # Size of the hardware decoder's preallocated memory, about 60 MB for 32 images; it grows for larger images. ImageNet's
    # largest image (5980x6430, as in NVIDIA's examples) would need 2.4 GB, once for training and once for validation.
    "preallocate_width_hint": 1024,
    "preallocate_height_hint": 1024,
}


class Settings(NamedTuple):
    """The arguments of a pair of pipelines."""

    transform: Transform
    packed: bool
    max_batch: int
    threads: int
    device_id: int | None


def reading_pipeline(settings: Settings, batches: Callable[[], list[Bytes]]) -> Any:
    """A pipeline on the CPU that reads images, for `Pipelines.read`.

    `batches` returns the next batch, and raises StopIteration at the end of an epoch; after `reset()`, the pipeline calls it
    again. A batch contains the bytes of file names, or the encoded images if the dataset is packed.
    """
    pipeline = Pipeline(
        batch_size=settings.max_batch, num_threads=READERS, device_id=None, prefetch_queue_depth=READ_AHEAD, exec_dynamic=True
    )
    with pipeline:
        encoded = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=1)
        if not settings.packed:
            encoded = fn.io.file.read(encoded, dont_use_mmap=True)
        # nvImageCodec 0.9.0 crashes if the decoder meets an invalid header in a batch, so this pipeline parses all headers
        # first, in validation too.
        pipeline.set_outputs(encoded, fn.peek_image_shape(encoded), encoded[:2], encoded[-2:])
    pipeline.build()
    return pipeline


class Encoded(NamedTuple):
    """A batch of encoded images."""

    images: Any
    """DALI's tensors."""
    bytes_N: NDArray[np.int64]
    """Sizes of the files."""
    sizes_N2: NDArray[np.int64]
    """(height, width) in pixels."""
    unsure_N: NDArray[np.bool_]
    """Whether `check` must look at the image before it is decoded here: a JPEG without an end marker at its end (truncated, or
    other bytes follow), a format that has variants which DALI decodes wrongly, an animated PNG, or a huge image."""


class Pipelines:
    """The reading and the decoding pipeline, reused in each epoch."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # The callbacks refer to this list instead of `self`: a reference cycle would delay freeing the pipelines' memory.
        self._feeds = feeds = [_NOTHING, _NOTHING]
        self._reading = reading_pipeline(settings, lambda: next(feeds[0]))
        self._decoding = decoding_pipeline(settings, lambda: next(feeds[1]))
        self.ahead = prefetch(settings.transform, settings.max_batch) + READ_AHEAD + 1
        """Number of batches that may have caused an error."""

    @contextmanager
    def epoch(self, sources: Iterator[Any], batches: Iterator[Any]) -> Iterator[None]:
        """Feeds both pipelines. The block must decode all batches."""
        self._feeds[:] = sources, batches
        try:
            yield
        finally:
            self._feeds[:] = _NOTHING, _NOTHING
        self._reading.reset()
        self._decoding.reset()

    def read(self) -> Encoded:
        """The next batch of the reading pipeline.

        Raises:
            RuntimeError: a file is missing or has an invalid header.
        """
        encoded, shapes, first, last = self._reading.run()
        first_N2, last_N2, sizes_N2 = first.as_array(), last.as_array(), np.array(shapes.as_array())[:, :2]
        unsure_N = (first_N2 == (0xFF, 0xD8)).all(axis=1) & (last_N2 != (0xFF, 0xD9)).any(axis=1)
        unsure_N |= sizes_N2.astype(np.float64).prod(axis=1) > MOST_PIXELS
        others = np.flatnonzero(first_N2[:, 0] != 0xFF)
        for index in others.tolist():
            unsure_N[index] |= has_variants(first_N2[index].tobytes()) or is_animated_png(np.asarray(encoded.at(index)).data)
        return Encoded(encoded, np.array(encoded.shape(), np.int64)[:, 0], sizes_N2, unsure_N)

    def decode(self) -> tuple[Any, ...]:
        """The outputs for the next batch."""
        outputs: tuple[Any, ...] = self._decoding.run()
        return outputs


_NOTHING: Iterator[Any] = iter(())


def has_variants(first: bytes) -> bool:
    """Whether the first two bytes are those of a format, TIFF or PNM, of which DALI decodes some variants wrongly."""
    return first in (b"II", b"MM") or (first[:1] == b"P" and first[1:].isdigit())


def is_animated_png(encoded: bytes | memoryview) -> bool:
    """Whether this is a PNG with several pictures (a chunk `acTL` before the first). DALI 2.4 crashes on some."""
    if bytes(encoded[:4]) != b"\x89PNG":
        return False
    at, chunk = 8, b""
    while at + 8 <= len(encoded) and chunk not in (b"acTL", b"IDAT"):
        length, chunk = struct.unpack(">I4s", encoded[at : at + 8])
        at += 12 + length
    return chunk == b"acTL"


def size_pipeline() -> Any:
    """A pipeline that reads the size of the image in its input `encoded`: height, width, channels."""
    return _single(fn.peek_image_shape)


def image_pipeline() -> Any:
    """A pipeline that decodes the image in its input `encoded`, on the CPU."""
    return _single(lambda encoded: fn.decoders.image(encoded, output_type=types.RGB))


def _single(operator: Callable[[Any], Any]) -> Any:
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        pipeline.set_outputs(operator(fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)))
    pipeline.build()
    return pipeline


def decoding_pipeline(settings: Settings, batches: Callable[[], tuple[Any, ...]]) -> Any:
    """A pipeline that decodes images.

    With a GPU's number as `device_id`, a batch is (encoded images, *CropParams), and the output is normalized squares, float32
    NCHW. With None, a batch is (encoded images, *Region), and the outputs are the decoded regions, uint8 (height, width, 3),
    and their settings. The pipeline calls `batches` up to `prefetch` batches ahead.
    """
    pipeline = Pipeline(
        batch_size=settings.max_batch,
        num_threads=settings.threads + 1,  # because all but one may be idle at the end of a batch
        device_id=settings.device_id,
        prefetch_queue_depth=prefetch(settings.transform, settings.max_batch),
        exec_dynamic=True,
    )
    with pipeline:
        on_cpu = settings.device_id is None
        pipeline.set_outputs(*(cpu_graph(batches) if on_cpu else gpu_graph(settings.transform, batches)))
    pipeline.build()
    return pipeline


def prefetch(transform: Transform, batch_size: int) -> int:
    """Number of batches that are decoded ahead."""
    return max(2, min(PREFETCH, PREFETCH_BYTES // (batch_size * 3 * transform.size**2 * 4)))


def cpu_graph(batches: Callable[[], tuple[Any, ...]]) -> tuple[Any, Any]:
    """The graph from encoded images to decoded regions on a CPU."""
    encoded, start, extent, settings = _source(batches, [types.INT32, types.INT32, types.INT64], [1, 1, 1])
    regions = fn.decoders.image_slice(encoded, start=start, shape=extent, axes=[0, 1], device="cpu", output_type=types.RGB)
    return regions, settings


def gpu_graph(transform: Transform, batches: Callable[[], tuple[Any, ...]]) -> tuple[Any]:
    """The graph from encoded images to normalized squares on a GPU."""
    encoded, start, extent, resized, offset, mirror = _source(batches, [types.INT32] * 5, [1, 1, 1, 1, 0])
    # Whole images, because nvImageCodec 0.9.0 fails or crashes if it decodes a region on a GPU (its issue 55).
    crops = fn.slice(fn.decoders.image(encoded, **GPU_DECODER), start=start, shape=extent, axes=[0, 1])
    # Without antialiasing, accuracy is about a percent lower than with Pillow's bilinear filter.
    resized = fn.resize(crops, size=fn.cast(resized, dtype=types.FLOAT), interp_type=types.INTERP_LINEAR, antialias=True)
    square = (transform.size, transform.size)
    normalized = fn.crop_mirror_normalize(
        fn.slice(resized, start=offset, shape=square, axes=[0, 1]),
        mirror=mirror,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in transform.mean],
        std=[255 * value for value in transform.std],
    )
    return (normalized,)


def _source(batches: Callable[[], tuple[Any, ...]], dtypes: list[Any], dimensions: list[int]) -> Any:
    """Encoded images, and arrays with these types and numbers of dimensions per image."""
    return fn.external_source(
        source=batches,
        num_outputs=1 + len(dtypes),
        batch=True,
        dtype=[types.UINT8, *dtypes],
        ndim=[1, *dimensions],
        device="cpu",
    )
