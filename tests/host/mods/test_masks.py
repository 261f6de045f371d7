"""Every mask of the zoo: its elements by brute force, its block mask, its attention in fp64."""

from __future__ import annotations

import pytest
import torch

from flexbwd import create_block_mask, mods
from flexbwd.reference import kept_elements
from flexbwd.testing import (
    assert_matches_reference,
    assert_within_budget,
    attention_grads,
    make_case,
    reference_grads,
    torch_operator_grads,
)

MASKS = [entry.name for entry in mods.zoo("mask")]
SEQLENS = [(65, 65), (40, 130), (130, 40), (1, 7)]
every_mask = pytest.mark.parametrize("name", MASKS)
every_length = pytest.mark.parametrize("seqlens", SEQLENS, ids="q{0[0]}-kv{0[1]}".format)


def problem(name, seqlens, dtype=torch.float64):
    case = make_case(seqlens, heads=(4, 2), head_dim=(8, 6), dtype=dtype, batch=2)
    return case, mods.get(name).example(*case.shape)


def agree(got, want):
    assert got.keys() == want.keys()
    for key in want:
        assert_within_budget(got[key], want[key], None, key)


@every_mask
@every_length
def test_reference_equals_torchs_operator(name, seqlens):
    case, mask = problem(name, seqlens)
    agree(reference_grads(case, None, mask), torch_operator_grads(case, None, mask))


@every_mask
@every_length
def test_flex_attention_equals_torchs_operator(name, seqlens):
    case, mask = problem(name, seqlens)
    agree(attention_grads(case, None, mask), torch_operator_grads(case, None, mask))


@every_mask
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_is_within_the_budget_of_its_dtype(name, dtype):
    case, mask = problem(name, (130, 100), dtype)
    assert_matches_reference(case, attention_grads(case, None, mask), None, mask)


@every_mask
@pytest.mark.parametrize("block", [16, (32, 48), 128], ids=str)
@pytest.mark.parametrize("seqlens", [(256, 256), (200, 333), (333, 70)], ids="q{0[0]}-kv{0[1]}".format)
def test_block_mask_equals_brute_force(name, block, seqlens):
    mask = mods.get(name).example(2, 3, *seqlens)
    kept = kept_elements((2, 3, *seqlens), mask)
    built = create_block_mask(mask, 2, 3, *seqlens, BLOCK_SIZE=block)
    size = (block, block) if isinstance(block, int) else block
    any_kept, all_kept = blocks_of(kept, size)
    lists = built.q_to_kv
    full = dense(lists.full_block_cnt, lists.full_block_idx, any_kept.shape)
    partial = dense(lists.mask_block_cnt, lists.mask_block_idx, any_kept.shape)
    assert torch.equal(full, all_kept)
    assert torch.equal(partial, any_kept & ~all_kept)
    back = built.kv_to_q
    columns = any_kept.mT.shape
    assert torch.equal(dense(back.full_block_cnt, back.full_block_idx, columns), all_kept.mT)
    assert torch.equal(dense(back.mask_block_cnt, back.mask_block_idx, columns), (any_kept & ~all_kept).mT)


def blocks_of(kept, size):
    """Per block: is any element kept, and are all that lie inside the lengths?"""
    b, h, rows, cols = kept.shape
    pad = (0, -cols % size[1], 0, -rows % size[0])
    shape = (b, h, (rows + pad[3]) // size[0], size[0], (cols + pad[1]) // size[1], size[1])
    some = torch.nn.functional.pad(kept, pad, value=False).view(shape)
    every = torch.nn.functional.pad(kept, pad, value=True).view(shape)
    return some.any(5).any(3), every.all(5).all(3)


def dense(count, index, shape):
    """One direction's list as bool [B, H, rows, columns]."""
    if count is None:
        return torch.zeros(shape, dtype=torch.bool)
    found = torch.zeros(*count.shape, shape[3] + 1, dtype=torch.bool)
    listed = torch.arange(index.shape[-1]) < count[..., None]
    found.scatter_(3, torch.where(listed, index, shape[3]).long(), True)
    return found[..., : shape[3]].expand(shape)
