"""Loader: one warp that keeps the Q/LSE and dO/delta rings full. K and V are loaded once.

It alone knows the walk: beside every query tile it puts a record that says which one it is.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.operands import Inputs, Matrix, Work
from flexbwd.sm90.backward.pipes import Pipes
from flexbwd.sm90.backward.storage import Smem
from flexbwd.sm90.backward.walk import BwdWalk


def _tiles(matrix: Matrix, head: Int32, batch: Int32, smem: cute.Tensor, rows: int, columns: int) -> tuple:
    """(gmem tiles [.., block], smem tiles [..(, stage)]) of one head for the copy engine."""
    g = cute.local_tile(matrix.m[None, None, head, batch], (rows, columns), (None, 0))
    t_s, t_g = cpasync.tma_partition(
        matrix.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
    )
    return t_g, t_s


@dataclass(frozen=True)
class Loader:
    config: BwdConfig
    inputs: Inputs
    smem: Smem
    pipes: Pipes
    walk: BwdWalk

    @cute.jit
    def run(self, work: Work):
        tile = self.config.tile
        inputs, smem, pipes = self.inputs, self.smem, self.pipes
        kv_bytes = 2 * tile.tile_n * (tile.dim + tile.value_dim)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pipes.kv, kv_bytes)
        gK, sK = _tiles(inputs.k, work.kv_head, work.batch, smem.k, tile.tile_n, tile.dim)
        gV, sV = _tiles(inputs.v, work.kv_head, work.batch, smem.v, tile.tile_n, tile.value_dim)
        cute.copy(inputs.k.atom, gK[None, work.n_block], sK, tma_bar_ptr=pipes.kv)
        cute.copy(inputs.v.atom, gV[None, work.n_block], sV, tma_bar_ptr=pipes.kv)

        tick = Int32(0)
        if cutlass.const_expr(self.config.grouped):
            for g in cutlass.range(work.group, unroll=1):
                tick = self.head(work, work.q_head + g, tick)
        else:
            tick = self.head(work, work.q_head, tick)
        row = Int32(0)
        if cutlass.const_expr(self.config.mods.graph is not None):
            row = work.batch * work.q_heads + work.q_head  # mods read at a head even where its walk is empty
        self.announce(tick, 0, Int32(-1), row, Int32(0), Int32(0))

    @cute.jit
    def head(self, work: Work, head: Int32, tick: Int32):
        """All query tiles of one query head; returns the tick after them."""
        tile = self.config.tile
        inputs, smem, pipes = self.inputs, self.smem, self.pipes
        gQ, sQ = _tiles(inputs.q, head, work.batch, smem.q, tile.tile_m, tile.dim)
        gdO, sdO = _tiles(inputs.do, head, work.batch, smem.do, tile.tile_m, tile.value_dim)
        row = work.batch * work.q_heads + head
        gLse = cute.local_tile(inputs.lse[row, None], (tile.tile_m,), (None,))
        gDelta = cute.local_tile(inputs.delta[row, None], (tile.tile_m,), (None,))
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * tile.tile_m)
        runs = self.walk.runs(work, head)
        for i in cutlass.range(runs.total, unroll=1):
            m = self.walk.tile(runs, work, head, i)
            self.announce(tick, tile.tile_m * (2 * tile.dim + 4), m, row, runs.partial, runs.edge + runs.full)
            s = pipes.q.buffer(tick)
            cute.copy(inputs.q.atom, gQ[None, m], sQ[None, s], tma_bar_ptr=pipes.q.full(tick))
            with cute.arch.elect_one():
                cute.copy(bulk, gLse[None, m], smem.lse[None, s], mbar_ptr=pipes.q.full(tick))
            pipes.do.acquire(tick, tile.tile_m * (2 * tile.value_dim + 4))
            s = pipes.do.buffer(tick)
            cute.copy(inputs.do.atom, gdO[None, m], sdO[None, s], tma_bar_ptr=pipes.do.full(tick))
            with cute.arch.elect_one():
                cute.copy(bulk, gDelta[None, m], smem.delta[None, s], mbar_ptr=pipes.do.full(tick))
            tick += 1
        return tick

    @cute.jit
    def announce(
        self,
        tick: Int32,
        tx_bytes: cutlass.Constexpr[int],
        m: Int32,
        row: Int32,
        partial: Int32,
        kept: Int32,
    ):
        """Wait for the tick-th buffer of the q ring, write its record and announce `tx_bytes`.

        One thread does the last two, so that the barrier's release covers the record.
        """
        ring = self.pipes.q
        place = cute.make_tensor(self.smem.record[None, ring.buffer(tick)].iterator, cute.make_layout((4,)))
        record = cute.make_rmem_tensor((4,), Int32)
        record[0], record[1], record[2], record[3] = m, row, partial, kept
        cute.arch.mbarrier_wait(ring.empty(tick), ring.phase(tick) ^ 1)
        with cute.arch.elect_one():
            cute.autovec_copy(record, place)
            if cutlass.const_expr(tx_bytes > 0):
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full(tick), tx_bytes)
            else:
                cute.arch.mbarrier_arrive(ring.full(tick))
