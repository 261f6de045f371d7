"""Loader: one warp that feeds Q, dO, K and V to shared memory by TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.sm90.dq.roles import Matrix, Operands, Pipes
from flexbwd.sm90.dq.storage import Smem
from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.dq.walk import DqWalk, Item
from flexbwd.sm90.tile import WG_ROWS


def tiles(matrix: Matrix, head: Int32, batch: Int32, smem: cute.Tensor, rows: int, columns: int) -> Any:
    """(gmem tiles [.., block], smem tiles [.., buffer]) of one head for the copy engine."""
    g = cute.local_tile(matrix.m[None, None, head, batch], (rows, columns), (None, 0))
    t_s, t_g = cpasync.tma_partition(
        matrix.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
    )
    return t_g, t_s


@dataclass(frozen=True)
class Loader:
    """For each work item, in the order of the walk: K, then Q and dO of each warpgroup, then V, K, V, K, ... V.

    It alone reads lists of tiles: beside every K it puts the number of the tile.
    """

    tile: DqTile
    operands: Operands
    smem: Smem
    pipes: Pipes
    walk: DqWalk

    @cute.jit
    def run(self):
        tile, op, smem, walk = self.tile, self.operands, self.smem, self.walk
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        items = walk.items
        tick = Int32(0)  # K tiles (and V tiles) issued so far
        turn = Int32(0)  # work items so far
        while index < items:
            item = walk.item(index)
            kv_head = item.head // op.group
            gK, sK = tiles(op.k, kv_head, item.batch, smem.k, tile.tile_n, tile.dim)
            gV, sV = tiles(op.v, kv_head, item.batch, smem.v, tile.tile_n, tile.value_dim)
            runs = walk.runs(item)
            total = runs.total
            if total > 0:
                self.load_k(gK, sK, walk.tile(runs, item, Int32(0)), tick)
            self.load_rows(item, turn)
            if total > 0:
                self.load_v(gV, sV, walk.tile(runs, item, Int32(0)), tick)
            for i in cutlass.range(1, total, unroll=1):
                n = walk.tile(runs, item, i)
                self.load_k(gK, sK, n, tick + i)
                self.load_v(gV, sV, n, tick + i)
            tick = tick + total
            turn = turn + 1
            index = index + step

    @cute.jit
    def load_k(self, gK: cute.Tensor, sK: cute.Tensor, n: Int32, tick: Int32):
        """One thread writes the record and announces the bytes, so that the barrier's release covers the record."""
        ring, record = self.pipes.k, self.smem.n
        cute.arch.mbarrier_wait(ring.bars + ring.stages + ring.buffer(tick), ring.phase(tick) ^ 1)
        with cute.arch.elect_one():
            record[ring.buffer(tick)] = n
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full(tick), 2 * self.tile.tile_n * self.tile.dim)
        cute.copy(self.operands.k.atom, gK[None, n], sK[None, ring.buffer(tick)], tma_bar_ptr=ring.full(tick))

    @cute.jit
    def load_v(self, gV: cute.Tensor, sV: cute.Tensor, n: Int32, tick: Int32):
        ring = self.pipes.v
        ring.acquire(tick, 2 * self.tile.tile_n * self.tile.value_dim)
        cute.copy(self.operands.v.atom, gV[None, n], sV[None, ring.buffer(tick)], tma_bar_ptr=ring.full(tick))

    @cute.jit
    def load_rows(self, item: Item, turn: Int32):
        """Q and dO of every warpgroup."""
        tile, op, pipes = self.tile, self.operands, self.pipes
        gQ, sQ = tiles(op.q, item.head, item.batch, self.smem.q, WG_ROWS, tile.dim)
        gdO, sdO = tiles(op.do, item.head, item.batch, self.smem.do, WG_ROWS, tile.value_dim)
        for wg in cutlass.range_constexpr(tile.wgs):
            cute.arch.mbarrier_wait(pipes.q_empty(wg), (turn & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(pipes.q_full(wg), 2 * WG_ROWS * tile.dim)
                cute.arch.mbarrier_arrive_and_expect_tx(pipes.do_full(wg), 2 * WG_ROWS * tile.value_dim)
            block = item.m_block * tile.wgs + wg
            cute.copy(op.q.atom, gQ[None, block], sQ[None, wg], tma_bar_ptr=pipes.q_full(wg))
            cute.copy(op.do.atom, gdO[None, block], sdO[None, wg], tma_bar_ptr=pipes.do_full(wg))
