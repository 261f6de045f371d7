"""Bits and small blocks, read through tables, keep what the block mask keeps."""

import pytest
import torch

from flexbwd import BlockMask, create_block_mask
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.modgraph.to_torch import evaluate
from flexbwd.sm90.masks import mods_of


def causal(b, h, q, k):
    return q + h >= k


def few_blocks():
    """Half of causal's blocks, one of them called full, in odd blocks."""
    cnt = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    idx = torch.tensor([[[[0, 0], [2, 0], [1, 0]]]], dtype=torch.int32)
    full = (torch.tensor([[[0, 0, 1]]], dtype=torch.int32), torch.tensor([[[[0], [0], [3]]]], dtype=torch.int32))
    return BlockMask.from_kv_blocks(cnt, idx, *full, BLOCK_SIZE=(48, 32), mask_mod=causal, seq_lengths=(130, 120))


MASKS = {
    "odd blocks": few_blocks,
    "bits": lambda: create_block_mask(torch.rand(2, 3, 130, 120, generator=torch.manual_seed(0)) < 0.3, 2, 3, 130, 120),
    "bits shared by batch and heads": lambda: create_block_mask(
        torch.rand(130, 120, generator=torch.manual_seed(0)) < 0.9, None, None, 130, 120, BLOCK_SIZE=16
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_tables_keep_what_the_block_mask_keeps(name):
    mask = MASKS[name]()
    traced = None
    if mask.mask_mod is not None and mask.bits is None:
        traced = trace(mask.mask_mod, ModKind.MASK, device=torch.device("cpu"))[0]
    mods, tables = mods_of(build_mod_plan(None, None, traced), mask.lists, mask.block_size, 120)
    b, h, q, k = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in (2, 3, 130, 120)), indexing="ij")
    (got,) = evaluate([mods.mask], {"b": b, "h": h, "q_idx": q, "kv_idx": k}, tables, torch.float32)
    want = mask.element_mask()
    if mask.bits is None:  # of lists shared by all heads, entry 0 alone is shown: ask for each head
        grid = mask.to_dense().bool()
        blocks = grid.repeat_interleave(48, 2)[:, :, :130].repeat_interleave(32, 3)[..., :120]
        full = torch.zeros(130, 120, dtype=torch.bool)
        full[96:, 96:] = True
        want = blocks & (full | causal(b, h, q, k))
    torch.testing.assert_close(got, want.expand(2, 3, 130, 120))


def test_equal_masks_share_one_plan():
    plan = build_mod_plan(None, None, None)
    (first, _), (second, _) = (mods_of(plan, MASKS["bits"]().lists, (128, 128), 120) for _ in range(2))
    assert first is second
