"""MmaWarpgroup: 64 query rows through the whole walk.

Per key tile j, with dQ of tile j-1 still in flight at the start:

    1  wait K_j                       4  wait V_j, issue dP = dO V_jᵀ     7  wait dP, free V_j; dS = P ∘ (dP − delta)
    2  issue S = Q K_jᵀ               5  wait S                           8  issue dQ += 16-bit(dS) K_j
    3  wait dQ of j-1, free K_{j-1}   6  P = exp2(c·S − lse), masks

dS never leaves the registers: it is the A operand of 8, K_j the same buffer as in 2, read the other way round.

Turns: named barrier TURN + wg lets a warpgroup issue 2-4; when it has, it lets the next one. So one warpgroup's
6 and 7 run under another's matrix products. The barriers order nothing but that.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flexbwd.sm90.dq.epilogue import Epilogue
from flexbwd.sm90.dq.roles import Operands, Pipes
from flexbwd.sm90.dq.storage import Smem, transposed
from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.dq.walk import DqWalk
from flexbwd.sm90.dq.weights import EDGE, FULL, PARTIAL, Place, RowStats, Weights
from flexbwd.sm90.numerics import as_operand, first_column, first_row, gemm
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS

TURN = 1  # named barriers 1 ... wgs; the epilogue's follow


@dataclass(frozen=True)
class Mmas:
    """Tiled wgmmas of one warpgroup."""

    score: Any  # (64, tile_n): S and dP, both operands from shared memory
    dq: Any  # (64, D): dS from registers, K with its rows as the summed dimension

    @classmethod
    def of(cls, tile: DqTile, dtype: Any) -> "Mmas":
        def make(columns: int, a_source: Any, b_major: Any) -> Any:
            op = warpgroup.MmaF16BF16Op(dtype, Float32, (WG_ROWS, columns, 16), a_source, OperandMajorMode.K, b_major)
            return cute.make_tiled_mma(cute.make_mma_atom(op))

        source = warpgroup.OperandSource
        return cls(
            score=make(tile.tile_n, source.SMEM, OperandMajorMode.K),
            dq=make(tile.dim, source.RMEM, OperandMajorMode.MN),
        )


@dataclass(frozen=True)
class Fragments:
    """What the products read and write."""

    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor  # (.., stage), as in S
    v: cute.Tensor
    kt: cute.Tensor  # (.., stage), as in dQ
    acc_dQ: cute.Tensor
    rdS: cute.Tensor  # 16-bit, in the accumulator's order

    @classmethod
    def of(cls, tile: DqTile, mmas: Mmas, smem: Smem, wg: Int32) -> "Fragments":
        score, dq = mmas.score.get_slice(0), mmas.dq.get_slice(0)
        rdS = cute.make_rmem_tensor(mmas.score.partition_shape_C((WG_ROWS, tile.tile_n)), smem.k.element_type)
        return cls(
            q=score.make_fragment_A(score.partition_A(smem.q))[None, None, None, wg],
            do=score.make_fragment_A(score.partition_A(smem.do))[None, None, None, wg],
            k=score.make_fragment_B(score.partition_B(smem.k)),
            v=score.make_fragment_B(score.partition_B(smem.v)),
            kt=dq.make_fragment_B(dq.partition_B(transposed(smem.k))),
            acc_dQ=cute.make_rmem_tensor(mmas.dq.partition_shape_C((WG_ROWS, tile.dim)), Float32),
            rdS=rdS,
        )


@dataclass(frozen=True)
class Lane:
    """Who this thread is: the first row it holds, and its first column within a tile."""

    wg: Int32
    row: Int32
    col: Int32


@dataclass(frozen=True)
class MmaWarpgroup:
    tile: DqTile
    operands: Operands
    smem: Smem
    pipes: Pipes
    walk: DqWalk
    weights: Weights
    epilogue: Epilogue
    mods: tuple  # their run-time arguments

    @cute.jit
    def run(self, wg: Int32, thread: Int32):
        """`thread` is the index within the warpgroup `wg`."""
        tile, pipes, walk = self.tile, self.pipes, self.walk
        mmas = Mmas.of(tile, self.smem.k.element_type)
        frags = Fragments.of(tile, mmas, self.smem, wg)
        stats = RowStats(cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32))

        self.first_turn(wg)
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        items = walk.items
        tick = Int32(0)
        turn = Int32(0)
        while index < items:
            item = walk.item(index)
            runs = walk.runs(item)
            row = item.m_block * tile.tile_m + wg * WG_ROWS + first_row(thread)
            stats.load(self.operands, item.batch * walk.heads + item.head, row, walk.q_len)
            rows = self.weights.rows(self.mods, item.batch, item.head, row)
            lane = Lane(wg, row, first_column(thread))
            frags.acc_dQ.fill(0.0)
            cute.arch.mbarrier_wait(pipes.q_full(wg), turn & 1)
            cute.arch.mbarrier_wait(pipes.do_full(wg), turn & 1)
            if cutlass.const_expr(walk.kind.band or walk.kind.lists):
                for i in cutlass.range(0, runs.partial, unroll=1):
                    self.step(mmas, frags, stats, rows, lane, tick + i, i > 0, PARTIAL)
            done = runs.partial
            for i in cutlass.range(done, done + runs.edge, unroll=1):
                self.step(mmas, frags, stats, rows, lane, tick + i, i > 0, EDGE)
            done = done + runs.edge
            for i in cutlass.range(done, done + runs.full, unroll=1):
                self.step(mmas, frags, stats, rows, lane, tick + i, i > 0, FULL)
            done = done + runs.full
            warpgroup.wait_group(0)
            if done > 0:
                pipes.k.release(tick + done - 1)
            self.epilogue.run(mmas.dq, frags.acc_dQ, item, wg, thread)
            tick = tick + done
            turn = turn + 1
            index = index + step

    @cute.jit
    def step(
        self,
        mmas: Mmas,
        frags: Fragments,
        stats: RowStats,
        rows: Any,
        lane: Lane,
        tick: Int32,
        pending: cutlass.Boolean,
        kind: cutlass.Constexpr[str],
    ):
        """Steps 1-8 of the figure; `pending`: a dQ of this walk is in flight."""
        k, v, tile, weights = self.pipes.k, self.pipes.v, self.tile, self.weights
        acc_S = cute.make_rmem_tensor(mmas.score.partition_shape_C((WG_ROWS, tile.tile_n)), Float32)
        acc_dP = cute.make_rmem_tensor(mmas.score.partition_shape_C((WG_ROWS, tile.tile_n)), Float32)
        k.wait_full(tick)
        self.await_turn(lane.wg)
        warpgroup.fence()
        gemm(mmas.score, acc_S, frags.q, frags.k[None, None, None, k.buffer(tick)], False)
        warpgroup.commit_group()
        n = cute.arch.make_warp_uniform(self.smem.n[k.buffer(tick)])
        warpgroup.wait_group(1)
        if pending:
            k.release(tick - 1)
        v.wait_full(tick)
        warpgroup.fence()
        gemm(mmas.score, acc_dP, frags.do, frags.v[None, None, None, v.buffer(tick)], False)
        warpgroup.commit_group()
        self.pass_turn(lane.wg)
        warpgroup.wait_group(1)
        place = Place(lane.row, lane.col + n * tile.tile_n, rows)
        weights.exponentiate(acc_S, stats, place, kind)
        warpgroup.wait_group(0)
        v.release(tick)
        weights.through_softmax(acc_S, acc_dP, stats, place)
        frags.rdS.store(acc_dP.load().to(frags.rdS.element_type))
        warpgroup.fence()  # orders this thread's writes of dS and dQ before the wgmma that reads them
        gemm(mmas.dq, frags.acc_dQ, as_operand(frags.rdS), frags.kt[None, None, None, k.buffer(tick)], True)
        warpgroup.commit_group()

    # -- turns ---------------------------------------------------------------------------------------------------------
    @cute.jit
    def first_turn(self, wg: Int32):
        """Before any work: the last warpgroup lets warpgroup 0 begin."""
        if cutlass.const_expr(self.tile.ordered):  # noqa: SIM102  (static outside, dynamic inside)
            if wg == self.tile.wgs - 1:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WG_THREADS)

    @cute.jit
    def await_turn(self, wg: Int32):
        if cutlass.const_expr(self.tile.ordered):
            cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=2 * WG_THREADS)

    @cute.jit
    def pass_turn(self, wg: Int32):
        if cutlass.const_expr(self.tile.ordered):
            after = wg + 1 if wg < self.tile.wgs - 1 else Int32(0)
            cute.arch.barrier_arrive(barrier_id=TURN + after, number_of_threads=2 * WG_THREADS)
