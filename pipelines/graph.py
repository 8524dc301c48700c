"""The DALI graphs, for training and validation, CPU and GPU. Only this imports DALI; import it late.

    reading:  file name -> bytes -> size
    images:   bytes -> decode (-> crop) -> resize (-> centre crop) (-> mirror) -> normalise

Two pipelines, because the random crop is computed from the size between them (`pipelines.augment`), in numpy: as operators
of the graph the same arithmetic is thirty tiny tasks per image. Reading ahead is the second gain: a slow disk does not keep
the decoding threads waiting.

Nothing in the graphs is random.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import nvidia.dali
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from pipelines.augment import Transform

# DALI's stubs know only half of its names.
fn: Any = nvidia.dali.fn
types: Any = nvidia.dali.types
Pipeline: Any = nvidia.dali.pipeline.Pipeline

Bytes = NDArray[np.uint8]

READERS = 4
"""Threads that read files. They wait for the disk most of the time, so their number does not depend on the CPUs."""
READ_AHEAD = 2
"""Batches of encoded images that wait for the decoder."""
PREFETCH = 4
"""Finished batches that wait for the network, at most. The least is two: with one, nothing happens while the network runs."""
PREFETCH_BYTES = 256 * 2**20
"""Memory for that, on the CPU or the GPU; larger batches than half of it take more."""

CPU_DECODER = {"device": "cpu", "output_type": types.RGB}
GPU_DECODER = {
    "device": "mixed",
    "output_type": types.RGB,
    # The GPU's chroma then agrees with the CPU's.
    "jpeg_fancy_upsampling": True,
    # The share of the images that goes to the hardware decoder (A100, H100 and later; others ignore it). The rest is decoded by
    # the GPU's kernels at the same time. DALI's own default, to be tuned on the machine.
    "hw_decoder_load": 0.65,
    # The sides of ImageNet's largest images: the hardware decoder's memory is allocated once, not whenever a larger image
    # comes, which would stop the GPU.
    "preallocate_width_hint": 5980,
    "preallocate_height_hint": 6430,
    # The same for the GPU's kernels, bytes per thread: enough for 5000 x 4000 pixels. NVIDIA's examples take 211 MB for the
    # largest of ImageNet, which at 16 threads is 3.4 GB for a handful of images; those few are allocated when they come.
    "device_memory_padding": 64 * 2**20,
    "host_memory_padding": 32 * 2**20,
}
# Without antialias, accuracy falls by about a percent behind what Pillow's bilinear filter gives.
RESIZE = {"interp_type": types.INTERP_LINEAR, "antialias": True}


def reading_pipeline(batches: Iterator[list[Bytes]], *, packed: bool, max_batch: int) -> Any:
    """A built pipeline that reads batch after batch, for `read`. It needs no GPU.

    What comes in is the bytes of file names, or of the encoded images themselves where they are packed.
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
        pipeline.set_outputs(encoded, fn.peek_image_shape(encoded))
    pipeline.build()
    return pipeline


def read(pipeline: Any) -> tuple[Any, NDArray[np.int64]]:
    """The next batch of a reading pipeline: the encoded images, and their sizes (height, width), (N, 2), pixels.

    Raises:
        RuntimeError: a file is missing, or its header makes no sense.
    """
    encoded, shapes = pipeline.run()
    return encoded, np.array(shapes.as_array())[:, :2]


def image_pipeline(
    transform: Transform,
    batches: Iterator[tuple[Any, ...]],
    *,
    train: bool,
    max_batch: int,
    threads: int,
    device_id: int | None,
) -> Any:
    """A built pipeline whose `run()` gives the images of the next batch, float32 NCHW.

    It takes the batches of `images`, asks for them `prefetch` ahead and does not copy them: they must live until their images
    are there. `device_id=None` keeps everything on the CPU and needs no driver; a number decodes and goes on with that GPU.
    """
    pipeline = Pipeline(
        batch_size=max_batch,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch(transform, max_batch),
        exec_dynamic=True,
    )
    with pipeline:
        pipeline.set_outputs(images(transform, batches, train=train, gpu=device_id is not None, threads=threads))
    pipeline.build()
    return pipeline


def prefetch(transform: Transform, batch: int) -> int:
    """How many batches of so many images are prepared ahead."""
    return max(2, min(PREFETCH, PREFETCH_BYTES // (batch * 3 * transform.size**2 * 4)))


def images(transform: Transform, batches: Iterator[tuple[Any, ...]], *, train: bool, gpu: bool, threads: int) -> Any:
    """The graph from batches of encoded images to normalised ones, float32 CHW.

    A batch for validation is (encoded images, (height, width) to resize to, (top, left) of the crop in that); for training
    (encoded images, (top, left), (height, width), mirror), where the crop comes first. All int32: pixels, (N, 2) each, and 1
    for an image that is mirrored, (N,).
    """
    dtypes = [types.UINT8, types.INT32, types.INT32] + [types.INT32] * train
    dimensions = [1, 1, 1] + [0] * train
    encoded, *numbers = fn.external_source(
        source=batches, num_outputs=len(dtypes), batch=True, dtype=dtypes, ndim=dimensions, device="cpu", no_copy=True
    )
    decoder = GPU_DECODER if gpu else CPU_DECODER
    if not train:
        lengths, offset = numbers
        squares = _squares(fn.decoders.image(encoded, **decoder), lengths, offset, transform.size, gpu, threads)
        return _normalised(squares, transform, mirror=0)
    start, extent, mirror = numbers
    if gpu:
        # nvImageCodec 0.9.0 fails or crashes when it decodes a part of an image on the GPU (its issue 55).
        crops = fn.slice(fn.decoders.image(encoded, **decoder), start=start, shape=extent, axes=[0, 1])
    else:
        crops = fn.decoders.image_slice(encoded, start=start, shape=extent, axes=[0, 1], **decoder)
    whole, corner = (np.array(pair, np.int32) for pair in ((transform.size, transform.size), (0, 0)))
    return _normalised(_squares(crops, whole, corner, transform.size, gpu, threads), transform, mirror)


def _squares(images: Any, lengths: Any, offset: Any, size: int, gpu: bool, threads: int) -> Any:
    """Resizes each image to its lengths (height, width) and cuts the square of `size` at its offset (top, left)."""
    if gpu:
        resized = fn.resize(images, size=fn.cast(lengths, dtype=types.FLOAT), **RESIZE)
        return fn.slice(resized, start=offset, shape=(size, size), axes=[0, 1])
    # DALI's own resize takes as long as the decoding on a CPU, and five times as long as torch's, which is Pillow's to the bit.
    return fn.python_function(
        images, lengths, offset, function=_resampled(size, threads), batch_processing=True, output_layouts="HWC"
    )


def _resampled(size: int, threads: int) -> Callable[[list[Bytes], list[Bytes], list[Bytes]], list[Bytes]]:
    """Makes squares of a batch of images, HWC."""
    pool = ThreadPoolExecutor(threads)

    def square(image: Bytes, lengths: Bytes, offset: Bytes) -> Bytes:
        # The first dimension must be there before the others change places: torch then sees channels last, and is faster.
        x_1CHW = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
        resized = interpolate(x_1CHW, lengths.tolist(), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
        top, left = offset.tolist()
        return np.ascontiguousarray(resized[top : top + size, left : left + size])

    def some(batch: list[tuple[Bytes, ...]]) -> list[Bytes]:
        return [square(*one) for one in batch]

    def all_of(*lists: list[Bytes]) -> list[Bytes]:
        # One piece of work per thread: futures for single images would cost a tenth of the time.
        batch = list(zip(*lists, strict=True))
        squares: list[Any] = [None] * len(batch)
        for k, share in enumerate(pool.map(some, [batch[k::threads] for k in range(threads)])):
            squares[k::threads] = share
        return squares

    return all_of


def _normalised(images: Any, transform: Transform, mirror: Any) -> Any:
    return fn.crop_mirror_normalize(
        images,
        crop=(transform.size, transform.size),
        mirror=mirror,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in transform.mean],
        std=[255 * value for value in transform.std],
    )
