"""Kernel tile lists say what the block lists say."""

import pytest
import torch

from flexbwd import BlockMask
from flexbwd.sm90.lists import Grid, Heads, tile_lists, work_order


def random_mask(block, lengths, batch=1, heads=2, seed=0):
    """Random classes 0 / 1 / 2 per block, lists in random order."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    classes = torch.randint(0, 3, (batch, heads, rows, cols), generator=g)
    shuffle = torch.rand(classes.shape, generator=g)

    def lists(kind):
        chosen = classes == kind
        idx = (shuffle + 2 * (~chosen)).argsort(-1).int()
        return chosen.sum(-1).int(), idx

    mask = BlockMask.from_kv_blocks(*lists(1), *lists(2), BLOCK_SIZE=block, seq_lengths=lengths)
    return mask, classes


def visited(found, b, h, row):
    """{tile: kind} of one row: 0 partial, 1 edge, 2 full."""
    counts, tiles = found.counts[b % len(found.counts)], found.tiles[b % len(found.tiles)]
    n = counts[h % len(counts)][row].tolist()
    assert n[3] == 0
    entries = tiles[h % len(tiles)][row].tolist()[: sum(n)]
    kinds = [k for k in range(3) for _ in range(n[k])]
    assert len(set(entries)) == len(entries)
    return dict(zip(entries, kinds, strict=True))


CASES = [
    ((128, 128), (128, 128), (256, 384)),
    ((128, 128), (64, 128), (300, 500)),
    ((128, 128), (128, 64), (300, 420)),
    ((64, 64), (128, 128), (300, 500)),
    ((48, 80), (64, 128), (200, 333)),
    ((256, 128), (128, 32), (700, 130)),
    ((16, 16), (64, 64), (65, 129)),
]


@pytest.mark.parametrize("keys_are_rows", [False, True], ids=["q_to_kv", "kv_to_q"])
@pytest.mark.parametrize(("block", "tile", "lengths"), CASES)
def test_every_tile_has_the_class_of_the_elements_under_it(block, tile, lengths, keys_are_rows):
    mask, classes = random_mask(block, lengths)
    fine = classes.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, : lengths[0], : lengths[1]]
    lists, lens, blocks, tiles = mask.q_to_kv, lengths, block, tile
    if keys_are_rows:
        lists, fine = mask.kv_to_q, fine.mT
        lens, blocks, tiles = lengths[::-1], block[::-1], tile[::-1]
    grid = Grid(blocks, tiles, lens, keys_are_rows)
    found = tile_lists(lists, grid, Heads(1, 2, 1, 1))
    keys = lengths[1]
    for h in range(2):
        for row in range(grid.rows):
            got = visited(found, 0, h, row)
            for col in range(grid.columns):
                part = fine[0, h, row * tiles[0] : (row + 1) * tiles[0], col * tiles[1] : (col + 1) * tiles[1]]
                key_tile, key_size = (row, tiles[0]) if keys_are_rows else (col, tiles[1])
                ragged = (key_tile + 1) * key_size > keys
                if not part.any():
                    assert col not in got
                elif (part == 2).all():
                    assert got[col] == (1 if ragged else 2)
                else:
                    assert got[col] == 0


def test_the_same_lists_give_the_same_object_until_they_change():
    mask, _ = random_mask((128, 128), (256, 256))
    grid, heads = Grid((128, 128), (128, 128), (256, 256), False), Heads(1, 2, 1, 1)
    first = tile_lists(mask.q_to_kv, grid, heads)
    assert tile_lists(mask.q_to_kv, grid, heads) is first
    mask.q_to_kv.mask_block_cnt.zero_()
    again = tile_lists(mask.q_to_kv, grid, heads)
    assert again is not first
    assert not again.counts[..., 0].any()


def test_work_goes_longest_first_within_a_section():
    counts = torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    counts[0, 0, :, 2] = torch.tensor([1, 5, 0, 3])
    order = work_order(counts, Heads(1, 4, 1, 2)).tolist()
    assert order == [1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14]


def test_a_key_head_weighs_all_its_query_heads():
    counts = torch.zeros(1, 4, 2, 4, dtype=torch.int32)
    counts[0, :, :, 2] = torch.tensor([[1, 0], [1, 0], [0, 5], [0, 1]])
    assert work_order(counts, Heads(1, 2, 2, 2)).tolist() == [3, 0, 1, 2]
