"""Empty, partial or full: the class of every block of a grid, from a mask's graph.

Interval analysis decides which blocks are empty or full. The undecided ones are searched for a kept and a dropped
element: both found, the block is partial; a search that visits every element finds what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexbwd.modgraph.intervals import IntervalProgram
from flexbwd.modgraph.ir import Node, topological
from flexbwd.modgraph.to_torch import TorchProgram

from .grid import BlockGrid

Array = np.ndarray

_PROBES = (2, 8, 32)  # elements looked at per dimension, step by step, before a block is searched in full
_CELL = 16  # smallest side of the cells that a full search divides a block into
_MOST_CELLS = 256  # of them per side, however large the block
_ELEMENTS = 2**15 - 1  # evaluated at a time: stays in the cache, and torch runs it on the calling thread
_CELLS = 2**16  # bounded at a time


class Blocks(NamedTuple):
    """Blocks of elements, all arrays `[n]`: index of the (batch, head) pair, inclusive global coordinates."""

    lead: Array
    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array

    def take(self, which: Array) -> Blocks:
        return Blocks(*(x[which] for x in self))


class Classifier:
    """Decides the blocks of one strip after another."""

    def __init__(self, root: Node, captures: Sequence[Tensor], grid: BlockGrid):
        self.grid = grid
        used = {n.attr for n in topological([root]) if n.op == "load"}
        host = [c.detach().cpu() if slot in used else c for slot, c in enumerate(captures)]
        self.intervals = IntervalProgram(root, host)
        self.search = _Search(root, self.intervals, host, grid)

    def classify(self, lead: slice, rows: slice) -> tuple[Array, Array]:
        """`(partial, full)`, both bool `[lead, rows, kv blocks]`."""
        q, kv = self.grid.q, self.grid.kv
        shape = (lead.stop - lead.start, rows.stop - rows.start, kv.blocks)
        partial, full = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        if not full.size:
            return partial, full
        # the strip's rows as one tall block: most columns are empty or full in all of them
        tall = q.first[rows].min().reshape(1), q.last[rows].max().reshape(1)
        no, yes = self._bounds(lead, tall, (kv.first, kv.last))
        full |= yes & ~no
        columns = np.flatnonzero((no & yes).any(axis=(0, 1)))
        if columns.size:
            self._refine(lead, rows, columns, partial, full)
        return partial, full

    def _refine(self, lead: slice, rows: slice, columns: Array, partial: Array, full: Array) -> None:
        """Decides each block of the given columns; writes to `partial` and `full`."""
        q, kv = self.grid.q, self.grid.kv
        dense = columns.size == columns[-1] - columns[0] + 1
        where = slice(columns[0], columns[-1] + 1) if dense else columns
        no, yes = self._bounds(lead, (q.first[rows], q.last[rows]), (kv.first[where], kv.last[where]))
        found_full = yes & ~no
        found_partial = np.zeros(found_full.shape, dtype=bool)
        at = np.nonzero(yes & no)
        if at[0].size:
            row, column = at[1] + rows.start, columns[at[2]]
            blocks = Blocks(at[0] + lead.start, q.first[row], q.last[row], kv.first[column], kv.last[column])
            kept, dropped = self.search(blocks)
            found_full[at] = ~dropped
            found_partial[at] = kept & dropped
        full[:, :, where], partial[:, :, where] = found_full, found_partial

    def _bounds(self, lead: slice, q: tuple[Array, Array], kv: tuple[Array, Array]) -> tuple[Array, Array]:
        """(can be false, can be true), `[lead, rows, columns]`."""
        b, h = self.grid.b[lead, None, None], self.grid.h[lead, None, None]
        ranges = {"b": (b, b), "h": (h, h), "q_idx": (q[0][:, None], q[1][:, None]), "kv_idx": kv}
        return _truth(self.intervals, ranges, (len(b), len(q[0]), len(kv[0])))


class _Search:
    """Looks for kept and dropped elements."""

    def __init__(self, root: Node, intervals: IntervalProgram, captures: Sequence[Tensor], grid: BlockGrid):
        self.intervals = intervals
        self.elements = TorchProgram([root])
        self.captures = captures
        self.grid = grid
        self.sizes = grid.q.block, grid.kv.block
        self.cell = max(_CELL, -(-self.sizes[0] // _MOST_CELLS)), max(_CELL, -(-self.sizes[1] // _MOST_CELLS))

    def __call__(self, blocks: Blocks) -> tuple[Array, Array]:
        """Whether each block keeps any, and drops any, of its elements: bool `[n]` each."""
        kept, dropped = np.zeros(len(blocks.lead), dtype=bool), np.zeros(len(blocks.lead), dtype=bool)
        pending = np.arange(len(blocks.lead))
        for probes in _PROBES:
            if not pending.size or probes >= min(self.sizes):
                break
            kept[pending], dropped[pending] = self._evaluate(blocks.take(pending), (probes, probes))
            pending = pending[~(kept[pending] & dropped[pending])]
        cells = -(-self.sizes[0] // self.cell[0]), -(-self.sizes[1] // self.cell[1])
        step = max(1, _CELLS // (cells[0] * cells[1]))
        for start in range(0, len(pending), step):
            at = pending[start : start + step]
            kept[at], dropped[at] = self._exhaust(blocks.take(at), cells)
        return kept, dropped

    def _exhaust(self, blocks: Blocks, cells: tuple[int, int]) -> tuple[Array, Array]:
        """The answer for every element: cells by intervals first, then the undecided cells' elements."""
        q = _divide(blocks.q_first, blocks.q_last, self.cell[0], cells[0])
        kv = _divide(blocks.kv_first, blocks.kv_last, self.cell[1], cells[1])
        b, h = self.grid.b[blocks.lead, None, None], self.grid.h[blocks.lead, None, None]
        ranges = {
            "b": (b, b),
            "h": (h, h),
            "q_idx": (q[0][:, :, None], q[1][:, :, None]),
            "kv_idx": (kv[0][:, None], kv[1][:, None]),
        }
        no, yes = _truth(self.intervals, ranges, (len(b), *cells))
        kept, dropped = np.asarray((~no).any((1, 2))), np.asarray((~yes).any((1, 2)))
        block, i, j = np.nonzero(no & yes & ~(kept & dropped)[:, None, None])
        inner = Blocks(blocks.lead[block], q[0][block, i], q[1][block, i], kv[0][block, j], kv[1][block, j])
        any_kept, any_dropped = self._evaluate(inner, self.cell)
        kept[block[any_kept]] = True
        dropped[block[any_dropped]] = True
        return kept, dropped

    def _evaluate(self, blocks: Blocks, counts: tuple[int, int]) -> tuple[Array, Array]:
        """The mask on `counts` elements spread over each block: any kept, any dropped."""
        kept, dropped = np.zeros(len(blocks.lead), dtype=bool), np.zeros(len(blocks.lead), dtype=bool)
        step = max(1, _ELEMENTS // (counts[0] * counts[1]))
        for start in range(0, len(blocks.lead), step):
            at = slice(start, start + step)
            lead, q_first, q_last, kv_first, kv_last = (x[at] for x in blocks)
            inputs = {
                "b": _int32(self.grid.b[lead, None, None]),
                "h": _int32(self.grid.h[lead, None, None]),
                "q_idx": _int32(_spread(q_first, q_last, counts[0])[:, :, None]),
                "kv_idx": _int32(_spread(kv_first, kv_last, counts[1])[:, None]),
            }
            (value,) = self.elements(inputs, self.captures, torch.float32)
            found = np.count_nonzero(value.expand(len(lead), *counts).numpy(), axis=(1, 2))
            kept[at], dropped[at] = found > 0, found < counts[0] * counts[1]
        return kept, dropped


def _truth(
    intervals: IntervalProgram, ranges: Mapping[str, tuple[Array, Array]], shape: tuple[int, ...]
) -> tuple[Array, Array]:
    no, yes = intervals(ranges)[:2]
    return np.broadcast_to(no, shape), np.broadcast_to(yes, shape)


def _divide(first: Array, last: Array, size: int, cells: int) -> tuple[Array, Array]:
    """First and last element of each cell, `[n, cells]`; past the end of a ragged block, its last element again."""
    start = np.minimum(first[:, None] + size * np.arange(cells), last[:, None])
    return start, np.minimum(start + size - 1, last[:, None])


def _spread(first: Array, last: Array, count: int) -> Array:
    """`count` coordinates from first to last, `[n, count]`: all of them where there are no more; repeats do no harm."""
    return first[:, None] + np.arange(count) * (last - first)[:, None] // (count - 1)


def _int32(x: Array) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))
