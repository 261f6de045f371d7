"""Block lists from a mask's graph, in time and memory of the order of the blocks.

Interval analysis decides which blocks are empty or full. An undecided block is partial as soon as one kept and one
dropped element are seen, so a few probes settle nearly all of them; the rest is evaluated in full, a bounded number of
elements at a time. The result equals brute force.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import MaskError
from flexbwd.modgraph.intervals import IntervalProgram
from flexbwd.modgraph.ir import BOOL, Node, topological
from flexbwd.modgraph.to_torch import TorchProgram

from .assemble import hand_out, lists_from_classes
from .grid import Axis, BlockGrid, check_block_size, check_sizes
from .tensors import BlockLists, IndexBase

Array = np.ndarray

_PROBES = (2, 8, 32)  # elements looked at per dimension, step by step, before a whole block is
_ELEMENTS = 2**19  # evaluated at a time


def build_lists(
    mask_root: Node,
    captures: Sequence[Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    block_size: int | tuple[int, int] = 128,
    index_base: IndexBase | None = None,
    device: torch.device | str | None = None,
) -> BlockLists:
    """Lists of the blocks a mask keeps: full where it keeps every real element, partial where it keeps some.

    Args:
        mask_root: BOOL graph over `b, h, q_idx, kv_idx`.  captures: its captured tensors, by load slot, any device.
        B, H: number of batch entries and query heads; None broadcasts (leading dim 1).
        block_size: (q, kv) granule, multiples of 16; the last block of a length may be ragged.
        index_base: where the local problem lies in a global one.
        device: of the lists; None is the CPU.
    Returns:
        Ascending lists in both directions. Where B or H is given but the mask does not read it, that dimension is
        expanded (stride 0).
    Raises:
        MaskError: the mask reads `b` or `h` while B or H is None; sizes or index_base break a rule.
    """
    check_sizes(B, H, Q_LEN, KV_LEN)
    reads = _inputs(mask_root)
    _check_reads(reads, B, H)
    grid = BlockGrid.make(
        (B, "b" in reads), (H, "h" in reads), (Q_LEN, KV_LEN), check_block_size(block_size), index_base
    )
    classifier = _Classifier(mask_root, captures, grid)
    strips = list(grid.strips())
    q_to_kv = lists_from_classes(grid, strips, (classifier.classify(*strip) for strip in strips))
    return hand_out(grid, q_to_kv, None, device)


def _inputs(root: Node) -> set[str]:
    if root.dtype is not BOOL:
        raise MaskError(f"mask_mod yields {root.dtype.value}: it must yield a bool; compare, or test != 0")
    names = {str(n.attr) for n in topological([root]) if n.op == "in"}
    if names & {"score", "grad"}:
        raise MaskError("mask_mod reads the score: a mask may read b, h, q_idx, kv_idx and captured tensors only")
    return names


def _check_reads(reads: set[str], B: int | None, H: int | None) -> None:
    for name, argument, value in (("b", "B", B), ("h", "H", H)):
        if value is None and name in reads:
            what = "batch entries" if name == "b" else "query heads"
            raise MaskError(
                f"{argument}=None broadcasts one mask over all {what}, but mask_mod reads `{name}`: "
                f"pass {argument}=the number of {what}"
            )


class _Classifier:
    """Decides the blocks of one strip after another."""

    def __init__(self, root: Node, captures: Sequence[Tensor], grid: BlockGrid):
        self.grid = grid
        self.intervals = IntervalProgram(root, captures)
        self.elements = TorchProgram([root])
        self.captures = [c.detach().cpu() for c in captures]

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
        shape = (*full.shape[:2], columns.size)
        found_full = np.broadcast_to(yes & ~no, shape).copy()
        found_partial = np.zeros(shape, dtype=bool)
        at = np.nonzero(np.broadcast_to(yes & no, shape))
        if at[0].size:
            kept, dropped = self._look(at[0] + lead.start, at[1] + rows.start, columns[at[2]])
            found_full[at] = ~dropped
            found_partial[at] = kept & dropped
        full[:, :, where], partial[:, :, where] = found_full, found_partial

    def _bounds(self, lead: slice, q: tuple[Array, Array], kv: tuple[Array, Array]) -> tuple[Array, Array]:
        b, h = self.grid.b[lead, None, None], self.grid.h[lead, None, None]
        no, yes = self.intervals(
            {
                "b": (b, b),
                "h": (h, h),
                "q_idx": (q[0][:, None], q[1][:, None]),
                "kv_idx": (kv[0], kv[1]),
            }
        )[:2]
        shape = (len(b), len(q[0]), len(kv[0]))
        return np.broadcast_to(no, shape), np.broadcast_to(yes, shape)

    # -- elements -----------------------------------------------------------------------------------------------------
    def _look(self, lead: Array, row: Array, column: Array) -> tuple[Array, Array]:
        """Whether each block keeps any, and drops any, of its real elements."""
        kept, dropped = np.zeros(len(lead), dtype=bool), np.zeros(len(lead), dtype=bool)
        pending = np.arange(len(lead))
        q, kv = self.grid.q, self.grid.kv
        for probes in (*_PROBES, max(q.block, kv.block)):
            counts = min(probes, q.block), min(probes, kv.block)
            step = max(1, _ELEMENTS // (counts[0] * counts[1]))
            for start in range(0, len(pending), step):
                at = pending[start : start + step]
                q_idx = _positions(q, row[at], counts[0])
                kv_idx = _positions(kv, column[at], counts[1])
                kept[at], dropped[at] = self._any(lead[at], q_idx, kv_idx)
            pending = pending[~(kept[pending] & dropped[pending])]
            if not pending.size or counts == (q.block, kv.block):
                break
        return kept, dropped

    def _any(self, lead: Array, q_idx: Array, kv_idx: Array) -> tuple[Array, Array]:
        """The mask on the blocks `[n]` at elements `q_idx [n, i] x kv_idx [n, j]`: any true, any false."""
        kept, dropped = np.zeros(len(lead), dtype=bool), np.zeros(len(lead), dtype=bool)
        b, h = (_tensor(x[lead])[:, None, None] for x in (self.grid.b, self.grid.h))
        kv = _tensor(kv_idx)[:, None, :]
        rows = max(1, _ELEMENTS // max(1, kv_idx.size))
        for start in range(0, q_idx.shape[1], rows):
            q = _tensor(q_idx[:, start : start + rows])[:, :, None]
            inputs = {"b": b, "h": h, "q_idx": q, "kv_idx": kv}
            (value,) = self.elements(inputs, self.captures, torch.float32)
            value = value.expand(len(lead), q.shape[1], kv.shape[2])
            kept |= value.flatten(1).any(1).numpy()
            dropped |= ~value.flatten(1).all(1).numpy()
            if kept.all() and dropped.all():
                break
        return kept, dropped


def _positions(axis: Axis, block: Array, count: int) -> Array:
    """`count` element coordinates spread over each block, `[n, count]`; repeats in a ragged block change nothing."""
    first, size = axis.first[block][:, None], (axis.last[block] - axis.first[block])[:, None]
    if count == axis.block:
        return first + np.minimum(np.arange(count), size)
    return first + np.arange(count) * size // (count - 1)


def _tensor(x: Array) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))
