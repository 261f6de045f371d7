"""What one kernel gets beside the matrices: the walk over its tiles, and the mods compiled for them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._subclasses.fake_tensor import FakeTensor

from flexbwd.modgraph.extents import Extents
from flexbwd.plan import Operands
from flexbwd.sm90.lists import Grid, Heads, TileLists, tile_lists
from flexbwd.sm90.masks import mods_of
from flexbwd.sm90.mods import NO_MODS, ModConfig, ModUse
from flexbwd.sm90.tile import heads_in_l2
from flexbwd.sm90.walks import Band, Dense, Lists, Walk, WalkKind

Mods = tuple[ModConfig, tuple[Any, ...]]
NOTHING: Mods = (NO_MODS, (0,))


class Parts(NamedTuple):
    walk: Walk
    mods: Mods


class Use(NamedTuple):
    """How a kernel cuts the scores into tiles."""

    tile: tuple[int, int]  # (query rows, key rows)
    keys_are_rows: bool = False  # work items are tiles of keys, walking queries
    backward: bool = False
    section: int = 0  # heads whose work items start together, longest first; 0: as many as L2 holds


def walk_kind(op: Operands) -> WalkKind:
    """The kind of walk that a problem's kernels take."""
    band = op.plan.band
    if band is not None:
        return WalkKind(False, band.lo is not None, band.hi is not None)
    return WalkKind(lists=op.blocks is not None)


def parts_of(op: Operands, use: Use) -> Parts:
    """The walk and the mods for the tiles of one kernel."""
    plan, blocks = op.plan, op.blocks
    if blocks is None:
        walk: Walk = Dense() if plan.band is None else Band(*plan.band)
        return Parts(walk, NOTHING if plan.mods.is_identity else _mods(op, use))
    lengths = (op.query.shape[2], op.key.shape[2])
    turn = -1 if use.keys_are_rows else 1
    grid = Grid(plan.block_size[::turn], use.tile[::turn], lengths[::turn], use.keys_are_rows)
    batch, q_heads, kv_heads = op.query.shape[0], op.query.shape[1], op.key.shape[1]
    group = q_heads // kv_heads
    if use.keys_are_rows:
        heads = Heads(batch, kv_heads, group, use.section or 1)
    else:
        walked = lengths[1], op.query.shape[3], op.value.shape[3]
        heads = Heads(batch, q_heads, 1, use.section or heads_in_l2(*walked) * group)
    lists = blocks.kv_to_q if use.keys_are_rows else blocks.q_to_kv
    if isinstance(lists.mask_block_idx, FakeTensor):  # a warm-up: that there are lists is all that kernels depend on
        return Parts(Lists(TileLists(*[lists.mask_block_idx] * 3)), _mods(op, use))
    return Parts(Lists(tile_lists(lists, grid, heads)), _mods(op, use))


def _mods(op: Operands, use: Use) -> Mods:
    plan, captures = op.plan, op.captures
    mods = plan.mods
    if op.blocks is not None and (op.blocks.bits is not None or _cuts(plan.block_size, use.tile)):
        mods, tables = mods_of(mods, op.blocks, plan.block_size, op.key.shape[2])
        captures = (*captures, *tables)
    batch, q_heads, q_len, _ = op.query.shape
    extents = Extents(batch, q_heads, q_len, op.key.shape[2])
    how = ModUse(extents, use.tile, use.backward, op.blocks is not None, plan.precision)
    return ModConfig.of(mods, captures, how, op.base)


def _cuts(block: tuple[int, int], tile: tuple[int, int]) -> bool:
    """May a tile cover several blocks, of which not all are kept?"""
    return any(b % t for b, t in zip(block, tile, strict=True))
