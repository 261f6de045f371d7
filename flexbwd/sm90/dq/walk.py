"""DqWalk: which key tiles a query tile visits, as one sequence in three runs that are static about their kind.

    partial: band compare or mask_mod, and the length of the keys
    edge:    the length of the keys
    full:    no compare

A band (keep lo <= q − kv <= hi) cuts a query tile's keys into

    n:   n_begin ... | n_full ... | n_after ... n_end-1          partial · full (the last one edge if ragged) · partial

visited as: partial tiles right of the kept stretch, partial tiles left of it, the stretch from right to left.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flexbwd.sm90.walks import WalkKind


@dataclass(frozen=True)
class Item:
    """A query tile of a query head."""

    m_block: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class Runs:
    """Lengths of the runs, and where tile i of a band lies."""

    partial: Int32
    edge: Int32
    full: Int32
    right: Int32  # partial tiles right of the kept stretch
    starts: tuple[Int32, Int32, Int32]  # tile − i of those, tile − i of the others, tile + i of the kept stretch

    @property
    def total(self) -> Int32:
        return self.partial + self.edge + self.full


@dataclass(frozen=True)
class DqWalk:
    """The kept tiles of the score matrix, by query tile."""

    kind: cutlass.Constexpr[WalkKind]
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    q_len: Int32
    kv_len: Int32
    heads: Int32  # query heads
    batch: Int32
    detail: tuple  # dense: (section,); band: (section, lo, hi); lists: (order, counts, tiles)

    @property
    def m_blocks(self) -> Int32:
        return (self.q_len + (self.tile_m - 1)) // self.tile_m

    @property
    def items(self) -> Int32:
        return self.m_blocks * self.heads * self.batch

    def item(self, index: Int32) -> Item:
        """Lists bring their order. Else `section` heads, which share L2, in turn; inside one, query tiles in order,
        heads side by side; with a causal limit the longest walk first."""
        m_blocks = self.m_blocks
        if self.kind.lists:
            item = self.detail[0][index]
            row = item // m_blocks
            m_block = item - row * m_blocks
        else:
            section = self.detail[0]
            number = index // (section * m_blocks)
            rest = index - number * (section * m_blocks)
            here = cutlass.min(section, self.heads * self.batch - number * section)
            m_block = rest // here
            row = number * section + (rest - m_block * here)
            if self.kind.has_lo:
                m_block = m_blocks - 1 - m_block
        batch = row // self.heads
        return Item(m_block, row - batch * self.heads, batch)

    def runs(self, item: Item) -> Runs:
        if self.kind.lists:
            return self._listed(item)
        first = item.m_block * self.tile_m
        last = cutlass.min(first + self.tile_m, self.q_len) - 1
        n_all = (self.kv_len + (self.tile_n - 1)) // self.tile_n
        n_begin, n_full, n_after, n_end = Int32(0), Int32(0), n_all, n_all
        if self.kind.has_lo:
            lo = self.detail[1]
            n_end = cutlass.min(cutlass.max(last - lo + self.tile_n, 0) // self.tile_n, n_all)
            whole = cutlass.max(first - lo + 1, 0) // self.tile_n
            n_after = cutlass.select_(first - lo + 1 >= self.kv_len, n_all, cutlass.min(whole, n_all))
        if self.kind.has_hi:
            hi = self.detail[2]
            n_begin = cutlass.min(cutlass.max(first - hi, 0) // self.tile_n, n_end)
            n_full = cutlass.min((cutlass.max(last - hi, 0) + (self.tile_n - 1)) // self.tile_n, n_end)
        n_after = cutlass.max(cutlass.min(n_after, n_end), n_full)
        right, kept = n_end - n_after, n_after - n_full
        partial = right + (n_full - n_begin)
        ragged = (n_after * self.tile_n > self.kv_len) & (kept > 0)
        edge = cutlass.select_(ragged, Int32(1), Int32(0))
        return Runs(partial, edge, kept - edge, right, (n_after, n_begin - right, n_after - 1 + partial))

    def tile(self, runs: Runs, item: Item, i: Int32) -> Int32:
        """The i-th key tile; for the loader, which hands it to the other roles."""
        if self.kind.lists:
            return _of(self.detail[2], item)[i]
        if not self.kind.band:
            return runs.starts[2] - i
        partial = i + cutlass.select_(i < runs.right, runs.starts[0], runs.starts[1])
        return cutlass.select_(i < runs.partial, partial, runs.starts[2] - i)

    def _listed(self, item: Item) -> Runs:
        held = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(cute.local_tile(_of(self.detail[1], item), (4,), (0,)), held)  # one load
        partial, edge, full = (cute.arch.make_warp_uniform(held[i]) for i in range(3))
        return Runs(partial, edge, full, Int32(0), (Int32(0), Int32(0), Int32(0)))


def _of(lists: cute.Tensor, item: Item) -> cute.Tensor:
    """The row of [B|1, H|1, rows, n] that belongs to a query tile."""
    batch = cutlass.select_(lists.shape[0] > 1, item.batch, 0)
    head = cutlass.select_(lists.shape[1] > 1, item.head, 0)
    return lists[batch, head, item.m_block, None]
