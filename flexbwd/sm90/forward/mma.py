"""MmaWarpgroup: 64 query rows through the whole walk.

Per tile j, with QK^T of tile j and PV of tile j-1 in flight together:

    1  wait K_j                       4  wait QK^T, free K_j          7  wait PV, free V_{j-1}
    2  issue S = Q K_j^T              5  score tile: mods, masks      8  O *= exp2(m − m')
    3  issue O += P_{j-1} V_{j-1}     6  online softmax of S          9  P_j = 16-bit(S)

Turns: named barrier TURN + wg lets a warpgroup issue 2 and 3; when it has, it lets the next one. So one warpgroup's
softmax runs under another's matrix products. The barriers order nothing but that.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from flexbwd.sm90.forward.epilogue import Epilogue
from flexbwd.sm90.forward.roles import Operand4, Pipes, Plan, Scales
from flexbwd.sm90.forward.score import Place, ScoreTile
from flexbwd.sm90.forward.softmax import OnlineSoftmax
from flexbwd.sm90.forward.storage import warpgroup_tile
from flexbwd.sm90.numerics import as_operand, first_column, first_row, gemm, rows_and_columns, scale_rows
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS, FwdTile

TURN = 1  # named barriers 1 ... wgs; the epilogue's follow


@dataclass(frozen=True)
class Fragments:
    """What the products read and write."""

    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    acc_O: cute.Tensor
    rP: cute.Tensor  # 16-bit, in the accumulator's order


@dataclass(frozen=True)
class MmaWarpgroup:
    tile: FwdTile
    qk_mma: cute.TiledMma
    pv_mma: cute.TiledMma
    operands: Operand4
    pipes: Pipes
    plan: Plan
    scales: Scales
    score: ScoreTile
    epilogue: Epilogue
    memory: Any
    sK: cute.Tensor
    sV: cute.Tensor
    q_layout: Any
    dtype: Any

    @cute.jit
    def run(self, wg: Int32, thread: Int32):
        """`thread` is the index within the warpgroup `wg`."""
        tile, pipes, schedule, walk = self.tile, self.pipes, self.plan.schedule, self.plan.walk
        sQ = warpgroup_tile(tile, self.memory.q, self.q_layout, self.dtype, wg)
        qk, pv = self.qk_mma.get_slice(0), self.pv_mma.get_slice(0)
        tSrQ = qk.make_fragment_A(qk.partition_A(sQ))[None, None, None, 0]
        tSrK = qk.make_fragment_B(qk.partition_B(self.sK))
        tOrV = pv.make_fragment_B(pv.partition_B(self.sV))
        acc_O = pv.make_fragment_C(pv.partition_shape_C((WG_ROWS, tile.value_dim)))
        acc_S = qk.make_fragment_C(qk.partition_shape_C((WG_ROWS, tile.tile_n)))
        rP = cute.make_rmem_tensor(acc_S.layout, self.dtype)
        frags = Fragments(tSrQ, tSrK, tOrV, acc_O, rP)
        row_max = cute.make_rmem_tensor((2,), Float32)
        row_sum = cute.make_rmem_tensor((2,), Float32)
        factor = Float32(1.0) if cutlass.const_expr(self.score.prescale) else self.scales.log2
        softmax = OnlineSoftmax(row_max, row_sum, factor)

        self.first_turn(wg)
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        items = schedule.items()
        tick = Int32(0)
        turn = Int32(0)
        while index < items:
            m_block, head, batch = schedule.item(index)
            n_full, n_end = walk.ends(m_block)
            row = m_block * tile.tile_m + wg * WG_ROWS + first_row(thread)
            col = first_column(thread)
            acc_O.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            cute.arch.mbarrier_wait(pipes.q_full(wg), turn & 1)
            if n_end > 0:
                self.first(frags, softmax, Place(row, col + (n_end - 1) * tile.tile_n, head, batch), tick, wg)
                edges = cutlass.max(n_end - n_full, 1)
                for i in cutlass.range(1, edges, unroll=1):
                    place = Place(row, col + (n_end - 1 - i) * tile.tile_n, head, batch)
                    self.step(frags, softmax, place, tick + i, wg, True)
                for i in cutlass.range(edges, n_end, unroll=1):
                    place = Place(row, col + (n_end - 1 - i) * tile.tile_n, head, batch)
                    self.step(frags, softmax, place, tick + i, wg, False)
                self.last(frags, tick + n_end - 1)
            self.epilogue.run(acc_O, softmax, m_block, head, batch, wg, thread)
            tick = tick + cutlass.max(n_end, 0)
            turn = turn + 1
            index = index + step

    @cute.jit
    def first(self, frags: Fragments, softmax: OnlineSoftmax, place: Place, tick: Int32, wg: Int32):
        """The first tile of a walk: nothing to multiply with V yet."""
        acc_S = self.score_fragment()
        self.pipes.k.wait_full(tick)
        self.await_turn(wg)
        warpgroup.fence()
        gemm(self.qk_mma, acc_S, frags.tSrQ, frags.tSrK[None, None, None, self.pipes.k.buffer(tick)], False)
        warpgroup.commit_group()
        self.pass_turn(wg)
        warpgroup.wait_group(0)
        self.pipes.k.release(tick)
        rS = rows_and_columns(acc_S, self.tile.tile_n)
        self.score.apply(rS, place, True)
        softmax.step(rS, softmax.row_sum, True, True)
        frags.rP.store(acc_S.load().to(self.dtype))

    @cute.jit
    def step(
        self,
        frags: Fragments,
        softmax: OnlineSoftmax,
        place: Place,
        tick: Int32,
        wg: Int32,
        edge: cutlass.Constexpr[bool],
    ):
        """Steps 1-9 of the figure."""
        k, v = self.pipes.k, self.pipes.v
        acc_S = self.score_fragment()
        rescale = cute.make_rmem_tensor((2,), Float32)
        k.wait_full(tick)
        self.await_turn(wg)
        warpgroup.fence()  # orders this thread's writes of P and O before the wgmma that read them
        gemm(self.qk_mma, acc_S, frags.tSrQ, frags.tSrK[None, None, None, k.buffer(tick)], False)
        warpgroup.commit_group()
        v.wait_full(tick - 1)
        gemm(self.pv_mma, frags.acc_O, as_operand(frags.rP), frags.tOrV[None, None, None, v.buffer(tick - 1)], True)
        warpgroup.commit_group()
        self.pass_turn(wg)
        warpgroup.wait_group(1)
        k.release(tick)
        rS = rows_and_columns(acc_S, self.tile.tile_n)
        self.score.apply(rS, place, edge)
        softmax.step(rS, rescale, edge, False)
        warpgroup.wait_group(0)
        v.release(tick - 1)
        rO = rows_and_columns(frags.acc_O, self.tile.value_dim)
        scale_rows(rO, rescale, self.tile.value_dim // 4)
        frags.rP.store(acc_S.load().to(self.dtype))

    @cute.jit
    def last(self, frags: Fragments, tick: Int32):
        """The last tile's PV."""
        v = self.pipes.v
        v.wait_full(tick)
        warpgroup.fence()
        gemm(self.pv_mma, frags.acc_O, as_operand(frags.rP), frags.tOrV[None, None, None, v.buffer(tick)], True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        v.release(tick)

    def score_fragment(self) -> cute.Tensor:
        qk = self.qk_mma.get_slice(0)
        return qk.make_fragment_C(qk.partition_shape_C((WG_ROWS, self.tile.tile_n)))

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
