"""From the classes of all blocks, strip by strip, to the lists of a block mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .grid import BlockGrid
from .tensors import BlockBits, BlockLists, BlockSparseTensors
from .transpose import pad_lists, transpose, transpose_slots

Array = np.ndarray
Strip = tuple[slice, slice]  # (lead, rows)
Classes = tuple[Array, Array]  # (partial, full), bool [lead, rows, kv blocks]


def lists_from_classes(grid: BlockGrid, strips: Sequence[Strip], classes: Iterable[Classes]) -> BlockSparseTensors:
    """Ascending q-to-kv lists of the blocks of `grid`; dimensions that do not differ have size 1."""
    partial, full = _Collector(grid, strips), _Collector(grid, strips)
    for some, every in classes:
        partial.add(some)
        full.add(every)
    return BlockSparseTensors(*partial.lists(), *full.lists())


def hand_out(
    grid: BlockGrid, q_to_kv: BlockSparseTensors, words: Tensor | None, device: torch.device | str | None
) -> BlockLists:
    """Both directions, with the sizes asked for and on `device`; dimensions that do not differ are expanded.

    Args:
        words: bits of the partial blocks in the order of the lists, see `BlockBits`, or None.
    """
    kv_to_q = transpose(q_to_kv, grid.kv.blocks)
    bits = None
    if words is not None:
        counts = q_to_kv.mask_block_cnt.numpy()
        slots = torch.from_numpy(pad_lists(counts, np.arange(counts.sum(), dtype=np.int32)))
        bits = BlockBits(words, slots, transpose_slots(q_to_kv, slots, grid.kv.blocks))

    def give(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        return (t if device is None else t.to(device)).expand(*grid.full_shape, *t.shape[2:])

    if bits is not None:
        moved = words if device is None else words.to(device)  # type: ignore[union-attr]
        bits = BlockBits(moved, give(bits.q_to_kv_slot), give(bits.kv_to_q_slot))  # type: ignore[arg-type]
    rows, columns = (BlockSparseTensors(*map(give, lists)) for lists in (q_to_kv, kv_to_q))  # type: ignore[arg-type]
    return BlockLists(rows, columns, bits)


class _Collector:
    """Gathers the set cells of a grid, strip by strip, as padded lists."""

    def __init__(self, grid: BlockGrid, strips: Sequence[Strip]):
        self.grid = grid
        self.counts = np.zeros((grid.lead, grid.q.blocks), dtype=np.int32)
        self.strips = strips
        self.columns: list[Array] = []

    def add(self, cells: Array) -> None:
        """`cells`: bool `[lead, rows, kv blocks]` of the next strip."""
        self.counts[self.strips[len(self.columns)]] = cells.sum(-1, dtype=np.int32)
        self.columns.append((np.flatnonzero(cells) % max(1, self.grid.kv.blocks)).astype(np.int32))

    def lists(self) -> tuple[Tensor, Tensor]:
        """Counts `[B|1, H|1, rows]` and indices `[B|1, H|1, rows, max]`."""
        width = max(1, int(self.counts.max(initial=0)))
        index = np.zeros((*self.counts.shape, width), dtype=np.int32)
        for strip, columns in zip(self.strips, self.columns, strict=True):
            pad_lists(self.counts[strip], columns, out=index[strip])
        self.columns.clear()
        shape = (*self.grid.lead_shape, self.grid.q.blocks)
        return torch.from_numpy(self.counts).view(shape), torch.from_numpy(index).view(*shape, width)
