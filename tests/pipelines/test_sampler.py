"""The distribution of images over ranks and steps."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import DataError, sampler

counts = st.integers(min_value=0, max_value=300)
batches = st.integers(min_value=1, max_value=70)
worlds = st.integers(min_value=1, max_value=9)


def all_shares(count: int, batch: int, world: int) -> list[list[sampler.Indices]]:
    """Returns the indices by rank and step."""
    return shares_after(0, count, batch, world)


def shares_after(seen: int, count: int, batch: int, world: int) -> list[list[sampler.Indices]]:
    """Returns the indices by rank and step for the rest of an epoch after `seen` images."""
    rest = sampler.epoch_order(count, seed=3, epoch=5)[seen:]
    return [sampler.rank_indices(rest, sampler.steps(len(rest), batch), rank, world) for rank in range(world)]


def together(shares: list[list[sampler.Indices]]) -> list[list[int]]:
    """Returns the global batch of each step, over all ranks."""
    return [np.concatenate(parts).tolist() for parts in zip(*shares, strict=True)]


@given(counts, batches, worlds)
def test_sizes_and_steps_are_even(count: int, batch: int, world: int) -> None:
    shares = all_shares(count, batch, world)
    assert {len(of_rank) for of_rank in shares} == {sampler.steps(count, batch)}
    sizes = np.array([[len(share) for share in of_rank] for of_rank in shares])
    whole = sizes.sum(axis=0)
    if len(whole):
        assert whole.max() <= batch and np.ptp(whole) <= 1
        assert np.ptp(sizes) <= 1, "there must be at most two batch sizes, because each one compiles the model again"


@given(counts, batches, worlds, worlds, st.data())
def test_resumed_epoch_continues_with_any_number_of_ranks(
    count: int, batch: int, before: int, after: int, data: st.DataObject
) -> None:
    whole = together(all_shares(count, batch, before))
    done = data.draw(st.integers(0, len(whole)))
    seen = sampler.seen_after(count, batch, done)
    assert seen == sum(map(len, whole[:done]))
    rest = shares_after(seen, count, batch, after)
    assert together(rest) == whole[done:]


@given(counts, batches, batches, worlds, worlds, st.data())
def test_resumed_epoch_with_another_batch_size_is_complete(
    count: int, batch: int, other: int, before: int, after: int, data: st.DataObject
) -> None:
    whole = together(all_shares(count, batch, before))
    seen = list(chain.from_iterable(whole[: data.draw(st.integers(0, len(whole)))]))
    left = chain.from_iterable(together(shares_after(len(seen), count, other, after)))
    assert sorted([*seen, *left]) == list(range(count))


@given(counts, batches, worlds)
def test_require_full_ranks_rejects_empty_batches(count: int, batch: int, world: int) -> None:
    smallest = min((len(share) for of_rank in all_shares(count, batch, world) for share in of_rank), default=1)
    if smallest >= 1:
        sampler.require_full_ranks(count, batch, world)
    else:
        with pytest.raises(DataError, match=f"{count} images with batch size {batch} .* {world} workers"):
            sampler.require_full_ranks(count, batch, world)


def test_epoch_order_is_pinned() -> None:
    """A change would make earlier runs irreproducible."""
    assert sampler.epoch_order(8, seed=1, epoch=2).tolist() == [6, 0, 7, 5, 1, 4, 3, 2]


def test_epoch_order_differs_between_epochs_and_seeds() -> None:
    orders = [sampler.epoch_order(100, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(one) for one in orders}) == 4
