"""Which image is seen when, and by which rank: exact arithmetic, no images.

An epoch is cut into `steps` global batches, a global batch into one share per rank, both as evenly as whole
numbers allow. So every image is seen exactly once per epoch, all ranks take the same number of steps, and no
small last batch upsets BatchNorm. The cut into global batches does not depend on the number of ranks.
"""

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import DataError

Indices = NDArray[np.int64]


def epoch_order(count: int, seed: int, epoch: int) -> Indices:
    """A permutation of `range(count)`, int64, that depends on nothing but its three arguments (all >= 0)."""
    # PCG64 by name: numpy may change what default_rng returns, and old runs must stay repeatable.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(np.arange(count, dtype=np.int64))


def steps(count: int, batch: int) -> int:
    """Steps per epoch of `count` images in global batches of at most `batch` images."""
    return -(-count // batch)


def seen_after(count: int, batch: int, done: int) -> int:
    """Images in the first `done` global batches of an epoch of `count`."""
    smaller, larger = divmod(count, max(steps(count, batch), 1))
    return done * smaller + min(done, larger)


def share(order: Indices, steps: int, rank: int, world: int) -> list[Indices]:
    """The indices that `rank` of `world` sees, one array per step.

    Global batches differ in size by at most one, so do the shares of a batch; a share is empty where the
    global batch has fewer images than there are ranks.
    """
    if steps == 0:
        return []
    return [np.array_split(global_batch, world)[rank] for global_batch in np.array_split(order, steps)]


def require_full_ranks(count: int, batch: int, world: int) -> None:
    """Raises `DataError` unless every rank gets an image in every step; else training would hang."""
    smallest = count // max(steps(count, batch), 1)
    if 0 < smallest < world:
        raise DataError(
            f"{count} images with batch size {batch} give steps of only "
            f"{smallest} {'image' if smallest == 1 else 'images'}, too few for {world} workers; "
            "increase recipe.batch_size, add images, or lower placement.workers"
        )
