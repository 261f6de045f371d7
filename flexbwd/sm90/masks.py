"""Masks that a block mask holds beside its mask_mod, as ordinary mods: element bits, and blocks smaller than a tile.

Both become captured tables that the mask's graph reads, so that the kernels know one kind of mask only:

    state = table[b, h, q_idx // q_block, kv_idx // kv_block]       -2 empty · -1 full · else the slot of its bits, or 0
    keep  = (state == -1) | ((state >= 0) & inside)
    inside = mask_mod(b, h, q_idx, kv_idx), or bit kv_idx % kv_block of words[state, q_idx % q_block]
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexbwd.modgraph.ir import BOOL, I32, Builder, Node
from flexbwd.modgraph.modplan import CaptureSpec, ModPlan
from flexbwd.sparsity.lists import EMPTY, FULL, ceil_div, class_grid, once, scatter_rows
from flexbwd.sparsity.tensors import BlockLists

_EMPTY, _FULL = -2, -1


def mods_of(
    mods: ModPlan, blocks: BlockLists, block_size: tuple[int, int], kv_len: int
) -> tuple[ModPlan, tuple[Tensor, ...]]:
    """`mods` with the mask read from tables, and the tables, which follow the plan's captured tensors."""
    table = _table(blocks, ceil_div(kv_len, block_size[1]))
    tables = (table,) if blocks.bits is None else (table, blocks.bits.words)
    known = _known.setdefault(mods, {})
    key = (block_size, tuple(t.shape for t in tables))
    found = known.get(key)
    if found is None:
        found = known[key] = _with_tables(mods, tables, block_size)
    return found, tables


_known: weakref.WeakKeyDictionary[ModPlan, dict[tuple, ModPlan]] = weakref.WeakKeyDictionary()
_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _table(blocks: BlockLists, columns: int) -> Tensor:
    """The state of every block, int32 `[B|1, H|1, q blocks, kv blocks]`."""
    lists = blocks.q_to_kv
    version = tuple(None if t is None else t._version for t in lists)
    found = _tables.get(lists.mask_block_idx)
    if found is None or found[0] != version:
        found = _tables[lists.mask_block_idx] = (version, _make_table(blocks, columns))
    return found[1]  # type: ignore[no-any-return]


def _make_table(blocks: BlockLists, columns: int) -> Tensor:
    one, _ = once(blocks.q_to_kv)
    classes = class_grid(one, columns)
    slots: Tensor | int = 0
    if blocks.bits is not None:
        count, index = one.mask_block_cnt, one.mask_block_idx
        slot = blocks.bits.q_to_kv_slot[: index.shape[0], : index.shape[1]]
        slots = scatter_rows(count, index, slot.to(torch.int32), columns, 0)
    states = torch.where(classes == FULL, _FULL, slots)
    return torch.where(classes == EMPTY, _EMPTY, states).to(torch.int32).contiguous()


def _with_tables(mods: ModPlan, tables: Sequence[Tensor], block_size: tuple[int, int]) -> ModPlan:
    build, first = mods.builder, len(mods.captures)
    q, kv = build.input("q_idx"), build.input("kv_idx")
    q_block, kv_block = (build.const(n, I32) for n in block_size)
    lead = [build.input(n) if size > 1 else build.const(0, I32) for n, size in zip("bh", tables[0].shape, strict=False)]
    where = (*lead, build.arith("fdiv", q, q_block), build.arith("fdiv", kv, kv_block))
    state = build.load(first, I32, where)
    if len(tables) > 1:
        inside = _bit(build, first + 1, state, build.arith("mod", q, q_block), build.arith("mod", kv, kv_block))
    else:
        inside = build.const(True) if mods.mask is None else mods.mask
    partial = build.arith("and", build.compare("ge", state, build.const(0, I32)), inside)
    keep = build.arith("or", build.compare("eq", state, build.const(_FULL, I32)), partial)
    specs = [CaptureSpec(n, t.dtype, tuple(t.shape), False) for n, t in zip(("blocks", "bits"), tables, strict=False)]
    return replace(mods, mask=keep, captures=(*mods.captures, *specs), hash=f"{mods.hash}/tables{block_size}")


def _bit(build: Builder, slot: int, block: Node, row: Node, column: Node) -> Node:
    """Bit `column` of a partial block's row."""
    word = build.load(slot, I32, (block, row, build.arith("shr", column, build.const(5, I32))))
    place = build.arith("and", column, build.const(31, I32))
    bit = build.arith("and", build.arith("shr", word, place), build.const(1, I32))
    return build.cast(build.compare("ne", bit, build.const(0, I32)), BOOL)
