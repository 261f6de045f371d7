"""TileLists: block lists at the granularity of one kernel's tiles.

Made on the device from a BlockMask's lists, without synchronising, once per mask and kernel tile. A block of the mask
may be a multiple of the tile, or anything else: a tile is full where all blocks under it are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexbwd.sparsity.lists import FULL, PARTIAL, ceil_div, class_grid, once
from flexbwd.sparsity.tensors import BlockSparseTensors

_MANY = 1 << 22  # entries of a padded list above which it is worth a synchronisation to cut it to the longest row


class TileLists(NamedTuple):
    """The tiles that every row of tiles visits, int32; a broadcast batch or head has size 1.

    Forward and dQ: a row is a query tile, its entries key tiles. Backward: a row is a key tile, its entries query
    tiles.
    """

    counts: Tensor  # [B|1, H|1, rows, 4] = (n_partial, n_edge, n_full, 0); 16-byte aligned
    tiles: Tensor  # [B|1, H|1, rows, max]: partial, then edge, then full; entries past the counts mean nothing
    order: Tensor  # [B * H * rows] work items (batch * H + head) * rows + row, longest first; H: heads of the rows


class Grid(NamedTuple):
    """How the rows and columns of lists turn into tiles."""

    blocks: tuple[int, int]  # (rows, columns) of a block of the mask
    tiles: tuple[int, int]  # of a kernel tile
    lengths: tuple[int, int]
    keys_are_rows: bool  # kv_to_q lists: the ragged end of the keys cuts a whole row of tiles

    @property
    def rows(self) -> int:
        return ceil_div(self.lengths[0], self.tiles[0])

    @property
    def columns(self) -> int:
        return ceil_div(self.lengths[1], self.tiles[1])


class Heads(NamedTuple):
    """Whose rows the work items are."""

    batch: int
    heads: int  # heads that own rows: query heads, or key heads for kv_to_q lists
    group: int  # lists' heads per owning head: 1, or query heads per key head
    section: int  # owning heads whose rows start together, longest first


def tile_lists(lists: BlockSparseTensors, grid: Grid, heads: Heads) -> TileLists:
    """The lists of kernel tiles; found again while `lists` lives unchanged."""
    known = _known.setdefault(lists.mask_block_idx, {})
    key = (grid, heads, tuple(None if t is None else (id(t), t._version) for t in lists))
    found = known.get(key)
    if found is None:
        if len(known) > 16:  # an old version of the lists, or many lengths
            known.clear()
        found = known[key] = _build(lists, grid, heads)
    return found  # type: ignore[no-any-return]


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _build(lists: BlockSparseTensors, grid: Grid, heads: Heads) -> TileLists:
    one, _ = once(lists)
    classes = tile_classes(class_grid(one, ceil_div(grid.lengths[1], grid.blocks[1])), grid)
    kinds = torch.full_like(classes, 3)  # dead tiles go last
    kinds[classes == PARTIAL] = 0
    kinds[classes == FULL] = 2
    _mark_edges(kinds, grid)
    counts = torch.stack([(kinds == k).sum(-1, dtype=torch.int32) for k in (0, 1, 2)], -1)
    counts = torch.nn.functional.pad(counts, (0, 1))
    tiles = kinds.sort(stable=True, dim=-1).indices.to(torch.int32)
    if tiles.numel() > _MANY and not torch.cuda.is_current_stream_capturing():
        tiles = tiles[..., : int(counts.sum(-1).max())]
    if not tiles.shape[-1]:
        tiles = tiles.new_zeros(*tiles.shape[:-1], 1)
    return TileLists(counts.contiguous(), tiles.contiguous(), work_order(counts, heads))


def tile_classes(blocks: Tensor, grid: Grid) -> Tensor:
    """Class of every tile, uint8 `[B, H, rows, columns]`, from those of the blocks."""
    rows = _regrid(blocks.to(torch.uint8), 2, grid.blocks[0], grid.tiles[0], grid.lengths[0])
    return _regrid(rows, 3, grid.blocks[1], grid.tiles[1], grid.lengths[1])


def _regrid(classes: Tensor, dim: int, block: int, tile: int, length: int) -> Tensor:
    """Classes along one dimension: full where everything under a tile is, empty where nothing is, else partial."""
    count = ceil_div(length, tile)
    if block % tile == 0:
        return classes.repeat_interleave(block // tile, dim).narrow(dim, 0, count)
    granule = 16  # every block and tile is a multiple
    fine = classes.repeat_interleave(block // granule, dim).narrow(dim, 0, ceil_div(length, granule))
    missing = count * (tile // granule) - fine.shape[dim]
    if missing:  # beyond the length anything goes: repeat the last
        last = fine.narrow(dim, fine.shape[dim] - 1, 1)
        fine = torch.cat([fine, last.expand([*fine.shape[:dim], missing, *fine.shape[dim + 1 :]])], dim)
    apart = fine.unflatten(dim, (count, tile // granule))
    low, high = apart.amin(dim + 1), apart.amax(dim + 1)
    return torch.where(low == high, low, PARTIAL)


def _mark_edges(kinds: Tensor, grid: Grid) -> None:
    """Full tiles that the ragged end of the keys cuts need a length compare."""
    along = 0 if grid.keys_are_rows else 1
    if grid.lengths[along] % grid.tiles[along] == 0:
        return
    last = kinds.select(2 + along, -1)
    last[last == 2] = 1


def work_order(counts: Tensor, heads: Heads) -> Tensor:
    """Work items, sections of heads in turn, longest first inside one: int32 `[B * H * rows]`."""
    rows = counts.shape[2]
    length = counts[..., 0] * 5 + (counts[..., 1] + counts[..., 2]) * 4  # a masked tile takes about a quarter longer
    length = length.expand(heads.batch, heads.heads * heads.group, rows)
    length = length.reshape(heads.batch * heads.heads, heads.group, rows).sum(1)
    section = torch.arange(heads.batch * heads.heads, device=counts.device) // heads.section
    key = section[:, None] * (1 << 32) - length
    return key.flatten().argsort(stable=True).to(torch.int32)
