"""Walks in the kernel: which key tiles a query tile visits, in three runs that are static about their kind.

    i:   0 ..... n_partial-1 | ..... n_edge more ..... | ..... n_full more
            partial tiles            edge tiles              full tiles

A full tile is compared with nothing. An edge tile is compared with the ragged end of the keys. A partial tile is
compared with the band, or goes through mask_mod, and with the end of the keys. The roles of a kernel see one sequence:
the loader asks a walk, the others get tile numbers from it through shared memory.

    runs(row, head, batch)       (n_partial, n_edge, n_full) of a row of tiles
    tile(row, head, batch, i)    the i-th key tile that it visits
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class BandWalk:
    """Scores with lo <= q - kv <= hi, where a limit without has_lo (has_hi) is none; dense when it has neither.

    begin ...... full_begin ...... full_end ...... end       key tiles; visited: from end down to full_end, from
         left edge          full          right edge         full_begin down to begin, then the full ones
    """

    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    has_lo: cutlass.Constexpr[bool]
    has_hi: cutlass.Constexpr[bool]
    q_len: Int32
    kv_len: Int32
    lo: Int32
    hi: Int32

    def ends(self, row: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """(begin, full_begin, full_end, end) of a row; begin <= full_begin and full_end <= end, either half may be
        empty."""
        tile_n = self.tile_n
        first = row * self.tile_m
        last = cutlass.min(first + self.tile_m, self.q_len) - 1
        begin, full_begin = Int32(0), Int32(0)
        end, full_end = (self.kv_len + (tile_n - 1)) // tile_n, self.kv_len // tile_n
        if self.has_lo:  # kv <= q - lo
            end = cutlass.min(end, (last - self.lo) // tile_n + 1)
            full_end = cutlass.min(full_end, (first - self.lo + 1) // tile_n)
        if self.has_hi:  # kv >= q - hi
            begin = cutlass.max(begin, (first - self.hi) // tile_n)
            full_begin = cutlass.max(begin, (last - self.hi + (tile_n - 1)) // tile_n)
        return begin, full_begin, full_end, end

    def runs(self, row: Int32, head: Int32, batch: Int32) -> tuple[Int32, Int32, Int32]:
        begin, full_begin, full_end, end = self.ends(row)
        full = cutlass.max(full_end - full_begin, 0)
        masked = cutlass.max(end - begin, 0) - full
        if self.has_lo or self.has_hi:
            return masked, Int32(0), full
        return Int32(0), masked, full

    def tile(self, row: Int32, head: Int32, batch: Int32, i: Int32) -> Int32:
        begin, full_begin, full_end, end = self.ends(row)
        if not self.has_hi:  # no left edge: straight down
            return end - 1 - i
        full = cutlass.max(full_end - full_begin, 0)
        masked = cutlass.max(end - begin, 0) - full
        right = cutlass.select_(full > 0, end - full_end, masked)
        left = full_begin - 1 - (i - right)
        outer = cutlass.select_(i < right, end - 1 - i, left)
        return cutlass.select_(i < masked, outer, full_end - 1 - (i - masked))


@dataclass(frozen=True)
class ListWalk:
    """Tiles listed by `flexbwd.sm90.lists.TileLists`; a list's batch or heads of size 1 serve all."""

    counts: cute.Tensor  # int32 [B|1, H|1, rows, 4]
    tiles: cute.Tensor  # int32 [B|1, H|1, rows, max]
    q_len: Int32
    kv_len: Int32

    def runs(self, row: Int32, head: Int32, batch: Int32) -> tuple[Int32, Int32, Int32]:
        counts = self.of(self.counts, row, head, batch)
        return counts[0], counts[1], counts[2]

    def tile(self, row: Int32, head: Int32, batch: Int32, i: Int32) -> Int32:
        return self.of(self.tiles, row, head, batch)[i]

    def of(self, lists: cute.Tensor, row: Int32, head: Int32, batch: Int32) -> cute.Tensor:
        batch, head = cutlass.min(batch, lists.shape[0] - 1), cutlass.min(head, lists.shape[1] - 1)
        return lists[batch, head, row, None]
