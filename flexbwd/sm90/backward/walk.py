"""BwdWalk: which query tiles a key tile visits, as one sequence in three runs that are static about their kind.

    partial: band compare or mask_mod, and the length of the keys
    edge:    the length of the keys
    full:    no compare

Ragged queries need no compare: their LSE is +inf, so that P = 0.

A band (keep lo <= q − kv <= hi) cuts a key tile's queries into

    m:   m_begin ... | m_full ... | m_after ... m_end-1          partial · full (edge where keys are ragged) · partial

Lists name the tiles; there is one list per query head.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flexbwd.sm90.backward.operands import Work
from flexbwd.sm90.walks import WalkKind


@dataclass(frozen=True)
class Runs:
    """Lengths of the runs; tile i is, for a band, i plus the offset of the stretch it lies in."""

    partial: Int32
    edge: Int32
    full: Int32
    before: Int32  # partial tiles before the kept stretch
    starts: tuple[Int32, Int32, Int32]  # tile − i: of these, of the partial tiles after it, of the kept stretch

    @property
    def total(self) -> Int32:
        return self.partial + self.edge + self.full


@dataclass(frozen=True)
class BwdWalk:
    """The kept tiles of the score matrix, by key tile."""

    kind: cutlass.Constexpr[WalkKind]
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    q_len: Int32
    kv_len: Int32
    detail: tuple  # dense: (section,); band: (section, lo, hi); lists: (order, counts, tiles)

    @property
    def m_blocks(self) -> Int32:
        return (self.q_len + (self.tile_m - 1)) // self.tile_m

    def item(self, index: Int32, n_blocks: Int32, heads: Int32) -> tuple[Int32, Int32]:
        """(n_block, head of all batches) of a CTA.

        Lists bring their order. Else sections of heads in turn; inside one, key tiles in order, heads side by side.
        """
        if self.kind.lists:
            item = self.detail[0][index]
            head = item // n_blocks
            return item - head * n_blocks, head
        section = self.detail[0]
        number = index // (section * n_blocks)
        rest = index - number * (section * n_blocks)
        first = number * section
        here = cutlass.min(section, heads - first)
        n_block = rest // here
        return n_block, first + rest - n_block * here

    def runs(self, work: Work, head: Int32) -> Runs:
        """Of a key tile and a query head."""
        if self.kind.lists:
            return self._listed(work, head)
        first = work.n_block * self.tile_n
        last = cutlass.min(first + self.tile_n, self.kv_len) - 1
        m_end = self.m_blocks
        m_begin, m_full, m_after = Int32(0), Int32(0), m_end
        if self.kind.has_lo:
            lo = self.detail[1]
            m_begin = cutlass.min(cutlass.max(first + lo, 0) // self.tile_m, m_end)
            m_full = cutlass.min((cutlass.max(last + lo, 0) + (self.tile_m - 1)) // self.tile_m, m_end)
        if self.kind.has_hi:
            hi = self.detail[2]
            m_after = cutlass.min(cutlass.max(first + hi + 1, 0) // self.tile_m, m_end)
            m_end = cutlass.min(cutlass.max(last + hi + self.tile_m, 0) // self.tile_m, m_end)
            m_end = cutlass.max(m_end, m_begin)
            m_full = cutlass.min(m_full, m_end)
        m_after = cutlass.max(m_after, m_full)
        before, kept = m_full - m_begin, m_after - m_full
        partial = before + (m_end - m_after)
        ragged = first + self.tile_n > self.kv_len
        edge = cutlass.select_(ragged, kept, 0)
        return Runs(partial, edge, kept - edge, before, (m_begin, m_after - before, m_full - partial))

    def tile(self, runs: Runs, work: Work, head: Int32, i: Int32) -> Int32:
        """The i-th query tile; for the loader, which hands it to the other roles."""
        if self.kind.lists:
            return _of(self.detail[2], work, head)[i]
        start = cutlass.select_(i < runs.partial, runs.starts[1], runs.starts[2])
        return i + cutlass.select_(i < runs.before, runs.starts[0], start)

    def _listed(self, work: Work, head: Int32) -> Runs:
        held = cute.make_rmem_tensor((4,), Int32)
        counts = cute.local_tile(_of(self.detail[1], work, head), (4,), (0,))
        cute.autovec_copy(counts, held)  # one load
        partial, edge, full = (cute.arch.make_warp_uniform(held[i]) for i in range(3))
        return Runs(partial, edge, full, Int32(0), (Int32(0), Int32(0), Int32(0)))

    def keep(self, q: Int32, kv: Int32, offset: int) -> Any:
        """Is (q, kv) inside the band? `offset` is the static part of q − kv, beside the run-time parts given."""
        keep = True
        if self.kind.has_lo:
            keep = q - kv - self.detail[1] >= -offset
        if self.kind.has_hi:
            below = q - kv - self.detail[2] <= -offset
            keep = (keep & below) if self.kind.has_lo else below
        return keep


def _of(lists: cute.Tensor, work: Work, head: Int32) -> cute.Tensor:
    """The row of [B|1, H|1, rows, n] that belongs to a key tile and a query head."""
    batch = cutlass.select_(lists.shape[0] > 1, work.batch, 0)
    head = cutlass.select_(lists.shape[1] > 1, head, 0)
    return lists[batch, head, work.n_block, None]
