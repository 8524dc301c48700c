"""Assigns images to steps and ranks.

An epoch is split into `steps` global batches, and each global batch into one part per rank. Sizes differ by at most one image.
So every epoch contains each image once, all ranks take the same number of steps, and BatchNorm never sees a tiny last batch.
The global batches do not depend on the number of ranks.
"""

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import DataError

Indices = NDArray[np.int64]


def epoch_order(count: int, seed: int, epoch: int) -> Indices:
    """A permutation of `range(count)`, int64, that depends only on the three arguments (all >= 0)."""
    # An explicit PCG64: numpy may change the generator of default_rng, and old runs must stay repeatable.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(np.arange(count, dtype=np.int64))


def steps(count: int, batch_size: int) -> int:
    """Steps in an epoch of `count` images with at most `batch_size` images in a global batch."""
    return -(-count // batch_size)


def seen_after(count: int, batch_size: int, done: int) -> int:
    """Images in the first `done` global batches of an epoch of `count` images."""
    smaller, larger = divmod(count, max(steps(count, batch_size), 1))
    return done * smaller + min(done, larger)


def rank_indices(order: Indices, steps: int, rank: int, world_size: int) -> list[Indices]:
    """The indices for `rank`, one array per step; an array is empty if its global batch has fewer images than ranks."""
    if steps == 0:
        return []
    return [np.array_split(global_batch, world_size)[rank] for global_batch in np.array_split(order, steps)]


def require_full_ranks(count: int, batch_size: int, world_size: int) -> None:
    """Raises DataError unless each rank has an image in every step; otherwise, training would hang."""
    smallest = count // max(steps(count, batch_size), 1)
    if 0 < smallest < world_size:
        raise DataError(
            f"{count} images with batch size {batch_size} give steps of only "
            f"{smallest} {'image' if smallest == 1 else 'images'}, too few for {world_size} workers; "
            "increase recipe.batch_size, add images, or lower resources.workers"
        )
