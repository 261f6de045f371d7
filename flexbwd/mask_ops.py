"""The operator `flexbwd::block_lists`: block lists from a plan's mask_mod, for graphs that cannot look at values.

In eager mode `flexbwd.planning` finds or builds lists directly. A traced graph (torch.compile, export, fake tensors)
calls this operator instead, so that lists follow the captured tensors' values at run time; its index lists are padded
to the full number of blocks, which no value can change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.built_lists import broadcast, built
from flexbwd.plan import BlockLists, Plan, lookup
from flexbwd.problem import Problem
from flexbwd.sparsity.tensors import BlockSparseTensors, IndexBase

_lib = torch.library.Library("flexbwd", "FRAGMENT")
_lib.define(
    "block_lists(Tensor[] captures, Tensor?[] base, int[] offsets, int plan, SymInt batch, SymInt heads, SymInt q_len,"
    " SymInt kv_len, Device device) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def traced_lists(plan: int, captures: Sequence[Tensor], problem: Problem, base: IndexBase | None) -> BlockLists:
    """The lists as a call of the operator."""
    offsets = [0, 0] if base is None else [base.b_off, base.h_off]
    bases = [] if base is None else [base.q_base, base.kv_base]
    p = problem
    flat = torch.ops.flexbwd.block_lists(
        list(captures), bases, offsets, plan, p.batch, p.q_heads, p.q_len, p.kv_len, p.device
    )
    return BlockLists(BlockSparseTensors(*flat[:4]), BlockSparseTensors(*flat[4:]))


def _grid(plan: Plan, q_len: int, kv_len: int) -> tuple[int, int]:
    q_block, kv_block = plan.block_size
    return (q_len + q_block - 1) // q_block, (kv_len + kv_block - 1) // kv_block


def _block_lists(
    captures: Sequence[Tensor],
    base: Sequence[Tensor | None],
    offsets: Sequence[int],
    plan: int,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> list[Tensor]:
    found = lookup(plan)
    index_base = IndexBase(offsets[0], offsets[1], base[0], base[1], block_size=found.block_size) if base else None
    sizes = (batch, heads, heads, q_len, kv_len, 0, 0)
    problem = Problem(*sizes, dtype=torch.float32, device=device, scale=1.0)  # lists depend on the lengths alone
    lists = built.find_or_build(found, plan, captures, problem, index_base)
    rows, cols = _grid(found, q_len, kv_len)
    # copies: what an operator returns is the graph's to overwrite
    return [t.clone() for t in (*_padded(lists.q_to_kv, cols), *_padded(lists.kv_to_q, rows))]


def _padded(lists: BlockSparseTensors, width: int) -> list[Tensor]:
    """All four tensors, present and with index lists of max(width, 1) entries."""
    full_cnt, full_idx = lists.full_block_cnt, lists.full_block_idx
    if full_cnt is None or full_idx is None:
        full_cnt, full_idx = torch.zeros_like(lists.mask_block_cnt), lists.mask_block_idx[..., :0]
    width = max(width, 1)
    widened = [torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in (lists.mask_block_idx, full_idx)]
    return [lists.mask_block_cnt, widened[0], full_cnt, widened[1]]


def _block_lists_fake(
    captures: Sequence[Tensor],
    base: Sequence[Tensor | None],
    offsets: Sequence[int],
    plan: int,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> list[Tensor]:
    found = lookup(plan)
    b, h = (1 if n is None else n for n in broadcast(found, batch, heads))
    rows, cols = _grid(found, q_len, kv_len)
    shapes = [(b, h, rows), (b, h, rows, max(cols, 1))] * 2 + [(b, h, cols), (b, h, cols, max(rows, 1))] * 2
    return [torch.empty(s, dtype=torch.int32, device=device) for s in shapes]


_lib.impl("block_lists", _block_lists, "CompositeExplicitAutograd")
torch.library.register_fake("flexbwd::block_lists", _block_lists_fake, lib=_lib)
