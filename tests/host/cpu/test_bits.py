"""Element bits of tabulated masks stand in for mask_mod."""

from __future__ import annotations

import pytest
import torch

from flexbwd.plan import BlockLists
from flexbwd.sparsity.tensors import BlockBits


def with_bits(lists: BlockLists, keep: torch.Tensor, block_size: tuple[int, int]) -> BlockLists:
    """Lists whose partial blocks carry their part of `keep` `[B|1, H|1, Sq, Skv]`, in a scattered order of slots."""
    q_block, kv_block = block_size
    count, index = lists.q_to_kv.mask_block_cnt, lists.q_to_kv.mask_block_idx
    width = -(-kv_block // 32)
    total = int(count.sum())
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    words = torch.zeros(total, q_block, width, dtype=torch.int32)
    slots = torch.full_like(index, -7)
    rows, columns = (-(-n // m) for n, m in zip(keep.shape[2:], block_size, strict=True))
    padded = torch.zeros(*keep.shape[:2], rows * q_block, columns * kv_block, dtype=torch.bool)
    padded[:, :, : keep.shape[2], : keep.shape[3]] = keep
    for b, h, row in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
        for place in range(int(count[b, h, row])):
            slot, column = order.pop(), int(index[b, h, row, place])
            block = padded[b, h, row * q_block :, column * kv_block :][:q_block, :kv_block]
            bits = torch.nn.functional.pad(block, (0, width * 32 - kv_block)).view(q_block, width, 32).long()
            packed = (bits << torch.arange(32)).sum(-1)
            words[slot] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
            slots[b, h, row, place] = slot
    return lists._replace(bits=BlockBits(words, slots, slots))


@pytest.mark.parametrize("leading", [(1, 1), (2, 1), (1, 4), (2, 4)], ids="b{0[0]}-h{0[1]}".format)
@pytest.mark.parametrize("block_size", [(32, 16), (32, 48), (64, 64)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("tile", [None, 700], ids=["one-tile", "small-tiles"])
def test_bits_decide_partial_blocks(attention, tools, leading, block_size, tile):
    generator = torch.Generator().manual_seed(2)
    rows, columns = (-(-n // m) for n, m in zip((100, 130), block_size, strict=True))
    table = torch.randint(0, 3, (*leading, rows, columns), generator=generator)
    keep = torch.rand(*leading, 100, 130, generator=generator) < 0.4
    bits = keep.expand(2, 4, -1, -1)
    # the mask serves the oracle only; the backend gets lists with bits and no mask_mod
    case = attention(blocks=table, block_size=block_size, tile=tile)
    lists = with_bits(tools.lists_of(table, shuffle=True), keep, block_size)
    got = case.run(lists)
    case.mask = lambda b, h, q, kv: bits[b.long(), h.long(), q.long(), kv.long()]
    for name, want in case.oracle().items():
        tools.assert_close(got[name], want, 1e-10, name)
