"""Loaders: one warp that loads K and keeps the Q/LSE ring full, one that loads V and keeps the dO/delta ring full.

The CTAs of a cluster hold neighbouring keys and walk the same queries: each loads its part of every Q and dO tile for
all of them. LSE, delta and the record that says which tile it is are each CTA's own; only loaders know the walk. They
are two as one warp's share of registers, 24 a thread, would not hold the state of both rings.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.sm90.backward.operands import Inputs, Matrix, Work
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.dkv.pipes import ClusterRing, Pipes
from flexbwd.sm90.dkv.storage import Smem
from flexbwd.sm90.tile import WG_ROWS


@dataclass(frozen=True)
class Loader:
    """`first` picks Q, LSE and K, else dO, delta and V."""

    config: DkvConfig
    inputs: Inputs
    smem: Smem
    pipes: Pipes
    walk: BwdWalk
    rank: Int32  # of this CTA in its cluster
    first: cutlass.Constexpr[bool]

    @cute.jit
    def run(self, work: Work):
        smem, inputs = self.smem, self.inputs
        if cutlass.const_expr(self.first):
            self.load_own(inputs.k, work, smem.k)
        else:
            self.load_own(inputs.v, work, smem.v)
        tick = Int32(0)
        row = work.batch * work.q_heads + work.q_head
        if cutlass.const_expr(self.config.grouped):
            for r in cutlass.range(row, row + work.group, unroll=1):
                tick = self.head(work, r, tick)
        else:
            tick = self.head(work, row, tick)
        if cutlass.const_expr(self.first):
            # mods are evaluated for the head in the record, even where the walk is empty: it has to exist
            last = Int32(0) if self.config.mods.graph is None else row
            self.announce(tick, 0, (Int32(-1), last, Int32(0), Int32(0)))

    @cute.jit
    def head(self, work: Work, row: Int32, tick: Int32):
        """All query tiles of one query head, `row` of those of all batches; returns the tick after them."""
        smem, inputs, pipes = self.smem, self.inputs, self.pipes
        head = row - work.batch * work.q_heads
        runs = self.walk.runs(work, head)
        if cutlass.const_expr(self.first):
            ring, matrix, tile, stats, held = pipes.q, inputs.q, smem.q, inputs.lse, smem.lse
        else:
            ring, matrix, tile, stats, held = pipes.do, inputs.do, smem.do, inputs.delta, smem.delta
        rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
        tx_bytes = rows * (2 * columns + 4)
        g, s = self.shared(matrix, head, work.batch, tile)
        g_stats = cute.local_tile(stats[row, None], (rows,), (None,))
        for i in cutlass.range(runs.total, unroll=1):
            m = self.walk.tile(runs, work, head, i)
            if cutlass.const_expr(self.first):
                self.announce(tick, tx_bytes, (m, row, runs.partial, runs.edge + runs.full))
            else:
                ring.acquire(tick, tx_bytes)
            self.load(matrix.atom, g[None, m], s, ring, tick)
            self.load_rows(g_stats[None, m], held, ring, tick)
            tick += 1
        return tick

    def load_own(self, matrix: Matrix, work: Work, smem: cute.Tensor) -> None:
        """K or V of this CTA."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.pipes.kv, 2 * WG_ROWS * cute.size(smem, mode=[1]))
        g = cute.local_tile(
            matrix.m[None, None, work.kv_head, work.batch],
            (WG_ROWS, cute.size(smem, mode=[1])),
            (work.n_block * self.config.tile.cluster + self.rank, 0),
        )
        t_s, t_g = cpasync.tma_partition(
            matrix.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
        )
        cute.copy(matrix.atom, t_g, t_s, tma_bar_ptr=self.pipes.kv)

    def shared(self, matrix: Matrix, head: Int32, batch: Int32, smem: cute.Tensor) -> Any:
        """(gmem [.., block], smem [.., stage]): this CTA's part of the tiles of one head."""
        rows, columns = cute.size(smem, mode=[0]), cute.size(smem, mode=[1])
        g = cute.local_tile(matrix.m[None, None, head, batch], (rows, columns), (None, 0))
        ctas = cute.make_layout(self.config.tile.cluster)
        t_s, t_g = cpasync.tma_partition(
            matrix.atom, self.rank, ctas, cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
        )
        return t_g, t_s

    def load(self, atom: cute.CopyAtom, g: cute.Tensor, s: cute.Tensor, ring: ClusterRing, tick: Int32) -> None:
        """This CTA's part, to every CTA."""
        target = s[None, ring.buffer(tick)]
        if self.config.tile.cluster == 1:
            cute.copy(atom, g, target, tma_bar_ptr=ring.full(tick))
        else:
            everyone = Int16((1 << self.config.tile.cluster) - 1)
            cute.copy(atom, g, target, tma_bar_ptr=ring.full(tick), mcast_mask=everyone)

    @cute.jit
    def load_rows(self, g: cute.Tensor, s: cute.Tensor, ring: ClusterRing, tick: Int32):
        """tile_m floats."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * self.config.tile.tile_m)
        with cute.arch.elect_one():
            cute.copy(bulk, g, s[None, ring.buffer(tick)], mbar_ptr=ring.full(tick))

    @cute.jit
    def announce(self, tick: Int32, tx_bytes: cutlass.Constexpr[int], values: tuple):
        """Wait for the tick-th buffer of the q ring, write its record and announce `tx_bytes`.

        One thread does the last two, so that the barrier's release covers the record.
        """
        ring = self.pipes.q
        record = self.smem.record[None, ring.buffer(tick)]
        cute.arch.mbarrier_wait(ring.empty(tick), ring.phase(tick) ^ 1)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(4):  # one by one: this warp has few registers
                record[i] = values[i]
            if cutlass.const_expr(tx_bytes > 0):
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full(tick), tx_bytes)
            else:
                cute.arch.mbarrier_arrive(ring.full(tick))
