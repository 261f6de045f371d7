"""Transposed block lists name the same blocks, ascending, whatever the order and the padding of the input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.errors import MaskError
from flexbwd.sparsity.tensors import BlockSparseTensors
from flexbwd.sparsity.transpose import transpose, transpose_slots


def random_lists(seed: int, shape: tuple[int, int, int], columns: int, density: float):
    """(lists in random order with garbage past the counts, their grid [B, H, rows, columns])."""
    generator = torch.Generator().manual_seed(seed)
    grid = (torch.rand(*shape, columns, generator=generator) < density).int()
    grid *= 1 + (torch.rand(*shape, columns, generator=generator) < 0.5).int()
    pairs = []
    for kind in (1, 2):
        counts = (grid == kind).sum(-1, dtype=torch.int32)
        index = torch.randint(-(2**31), 2**31 - 1, (*shape, columns + 2), generator=generator).int()  # garbage
        for at in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist():
            entries = (grid[tuple(at)] == kind).nonzero()[:, 0]
            index[tuple(at)][: len(entries)] = entries[torch.randperm(len(entries), generator=generator)].int()
        pairs += [counts, index]
    return BlockSparseTensors(*pairs), grid


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9)),
    columns=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_transpose_equals_the_grids_transpose(brute, seed, shape, columns, density):
    lists, grid = random_lists(seed, shape, columns, density)
    turned = transpose(lists, columns)
    assert (brute.classes_in(turned, shape[2]) == grid.transpose(2, 3)).all()
    for counts, index in (turned[:2], turned[2:]):
        assert index.shape[-1] == max(1, int(counts.max()))
        past = torch.arange(index.shape[-1]) >= counts[..., None]
        assert (index[past] == 0).all()


def test_slots_follow_their_blocks():
    lists, _ = random_lists(3, (2, 2, 7), 5, 0.6)
    slots = torch.randint(-(2**31), 2**31 - 1, lists.mask_block_idx.shape, dtype=torch.int32)
    turned = transpose(lists, 5)
    moved = transpose_slots(lists, slots, 5)
    assert moved.shape == turned.mask_block_idx.shape

    def by_block(tensors, values, flip):
        found = {}
        for at in torch.cartesian_prod(*(torch.arange(n) for n in tensors.mask_block_cnt.shape)).tolist():
            for p in range(int(tensors.mask_block_cnt[tuple(at)])):
                other = int(tensors.mask_block_idx[(*at, p)])
                pair = (other, at[2]) if flip else (at[2], other)
                found[(at[0], at[1], *pair)] = int(values[(*at, p)])
        return found

    assert by_block(lists, slots, False) == by_block(turned, moved, True)


def test_twice_transposed_ascending_lists_are_the_same():
    lists, _ = random_lists(5, (1, 2, 6), 6, 0.5)
    once = transpose(lists, 6)
    again = transpose(transpose(once, 6), 6)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_lists_without_full_blocks_stay_without():
    lists, _ = random_lists(1, (1, 1, 4), 4, 0.5)
    assert transpose(BlockSparseTensors(*lists[:2]), 4)[2:] == (None, None)


def test_expanded_dimensions_stay_expanded():
    lists, _ = random_lists(2, (1, 3, 4), 4, 0.5)
    wide = BlockSparseTensors(*(t.expand(1000, *t.shape[1:]) for t in lists))
    turned = transpose(wide, 4)
    assert all(t.stride(0) == 0 and t.shape[0] == 1000 for t in turned)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(turned, transpose(lists, 4), strict=True))


def test_more_columns_than_16_bits_hold():
    index = torch.tensor([[[[70000, 3], [70000, 65536]]]], dtype=torch.int32)
    turned = transpose(BlockSparseTensors(torch.tensor([[[2, 2]]], dtype=torch.int32), index), 70001)
    assert turned.mask_block_idx[0, 0, 70000].tolist() == [0, 1]
    assert turned.mask_block_cnt[0, 0, [3, 65536]].tolist() == [1, 1]
    assert turned.mask_block_idx[0, 0, [3, 65536], 0].tolist() == [0, 1]
    assert int(turned.mask_block_cnt.sum()) == 4


@pytest.mark.parametrize(
    ("counts", "entries", "message"),
    [
        ([1, 2], [[0, 9], [1, 4]], "mask_block_idx lists block 4, but there are only 4"),
        ([1, 2], [[0, 9], [1, -1]], "mask_block_idx lists block -1"),
        ([1, 3], [[0, 9], [1, 2]], "room for 2 entries a row but a count is 3"),
    ],
    ids=["too-large", "negative", "count"],
)
def test_entries_outside_the_grid_are_named(counts, entries, message):
    counts, entries = (torch.tensor(x, dtype=torch.int32)[None, None] for x in (counts, entries))
    with pytest.raises(MaskError, match=message):
        transpose(BlockSparseTensors(counts, entries), 4)
