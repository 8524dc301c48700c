"""The one DALI graph, for training and validation, CPU and GPU. Only this imports DALI; import it late.

    file name -> bytes -> decode (-> random crop) -> resize (-> centre crop) (-> mirror) -> normalise

In go file names as bytes, out come images, float32 NCHW.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import nvidia.dali
from numpy.typing import NDArray

from pipelines.augment import Transform

# DALI's stubs know only half of its names.
fn: Any = nvidia.dali.fn
types: Any = nvidia.dali.types
Pipeline: Any = nvidia.dali.pipeline.Pipeline

FileName = NDArray[np.uint8]
PREFETCH = 2
"""Batches prepared ahead; more costs memory and hides nothing that two do not."""


def encode_name(path: str) -> FileName:
    """The form in which DALI takes a file name: its bytes."""
    return np.frombuffer(path.encode(), dtype=np.uint8)


def image_pipeline(
    transform: Transform,
    batches: Iterable[list[FileName]],
    *,
    train: bool,
    max_batch: int,
    seed: int,
    threads: int,
    device_id: int | None,
) -> Any:
    """A built pipeline whose `run()` gives the images of the next batch of names, float32 NCHW.

    Names are asked for up to `PREFETCH` batches ahead. `device_id=None` keeps everything on the CPU and needs
    no driver; a number decodes and goes on with that GPU.
    """
    pipeline = Pipeline(
        batch_size=max_batch,
        num_threads=threads,
        device_id=device_id,
        seed=seed,
        prefetch_queue_depth=PREFETCH,
        exec_dynamic=True,
    )
    with pipeline:
        names = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=1)
        encoded, shape = _parsed(fn.io.file.read(names))
        device = "cpu" if device_id is None else "mixed"
        if train:
            images = _training(encoded, shape, transform, device)
        else:
            images = _validation(encoded, transform, device)
        pipeline.set_outputs(images)
    pipeline.build()
    return pipeline


def decoding_pipeline(batches: Iterable[list[FileName]]) -> Any:
    """A built CPU pipeline that only decodes, in batches of one: it fails where a file is at fault."""
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        names = fn.external_source(source=batches, batch=True, dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(fn.io.file.read(names), device="cpu", output_type=types.RGB))
    pipeline.build()
    return pipeline


def _parsed(encoded: Any) -> tuple[Any, Any]:
    """The encoded images, their headers now known to be sound, and their shapes (height, width, channels)."""
    # A header that cannot be parsed makes nvImageCodec 0.9.0 crash the process while it decodes the rest of
    # the batch. To look at all headers first turns that into an error; the decoder waits for the look because
    # of the nothing that is appended.
    shape = fn.peek_image_shape(encoded)
    nothing = fn.slice(fn.cast(shape, dtype=types.UINT8), 0, 0, axes=[0])
    return fn.cat(encoded, nothing, axis=0), shape


def _training(encoded: Any, shape: Any, transform: Transform, device: str) -> Any:
    area, ratio = list(transform.crop_area), list(transform.crop_ratio)
    start, extent = fn.random_crop_generator(shape, random_area=area, random_aspect_ratio=ratio)
    if device == "cpu":
        crops = fn.decoders.image_slice(encoded, device=device, output_type=types.RGB, start=start, shape=extent, axes=[0, 1])
    else:
        # nvImageCodec 0.9.0 fails or crashes when it decodes a part of an image on the GPU (its issue 55).
        crops = fn.slice(_decoded(encoded, device), start=start, shape=extent, axes=[0, 1])
    size = (transform.size, transform.size)
    squares = fn.resize(crops, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
    mirror = fn.random.coin_flip(probability=0.5) if transform.flip else 0
    return _normalised(squares, transform, mirror)


def _validation(encoded: Any, transform: Transform, device: str) -> Any:
    images = _decoded(encoded, device)
    # Without antialias, accuracy falls by about a percent behind what Pillow's bilinear filter gives.
    resized = fn.resize(images, resize_shorter=transform.resize, interp_type=types.INTERP_LINEAR, antialias=True)
    return _normalised(resized, transform, mirror=0)


def _decoded(encoded: Any, device: str) -> Any:
    # Fancy upsampling makes the GPU's chroma agree with the CPU's.
    return fn.decoders.image(encoded, device=device, output_type=types.RGB, jpeg_fancy_upsampling=True)


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
