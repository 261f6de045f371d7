"""MmaWarpgroup: 64 query rows through the whole walk, one work item after the other.

Per tile j, with QK^T of tile j and PV of tile j-1 in flight together:

    1  wait K_j                       4  wait QK^T, free K_j          7  wait PV, free V_{j-1}
    2  issue S = Q K_j^T              5  score tile: mods, masks      8  O *= exp2(c(m − m')) if m grew
    3  issue O += P_{j-1} V_{j-1}     6  online softmax of S          9  P_j = 16-bit(S)

Work items follow each other without a gap: the first tile of an item takes the place of tile j, the last one of the
item before that of tile j-1, whose epilogue then stands where O is rescaled otherwise (`turnover`).

Turns: named barrier TURN + wg lets a warpgroup issue 2 and 3; when it has, it lets the next one. So one warpgroup's
softmax runs under another's matrix products. The barriers order nothing but that.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from flexbwd.sm90.forward.epilogue import Epilogue
from flexbwd.sm90.forward.roles import WORK, Pipes
from flexbwd.sm90.forward.score import Place, ScoreTile
from flexbwd.sm90.forward.softmax import OnlineSoftmax
from flexbwd.sm90.forward.storage import warpgroup_tile
from flexbwd.sm90.numerics import as_operand, first_column, first_row, gemm, round_into, rows_and_columns, scale_rows
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS, FwdTile

TURN = 1  # named barriers 1 ... wgs


@dataclass(frozen=True)
class Fragments:
    """What the products read and write."""

    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    acc_O: cute.Tensor
    rP: cute.Tensor  # 16-bit, in the accumulator's order


@dataclass(frozen=True)
class Item:
    """A work item: tile of rows `block` (-1: no item), this thread's first row, and the mods' values of its rows."""

    block: Int32
    row: Int32
    head: Int32
    batch: Int32
    rows: Any


@dataclass(frozen=True)
class MmaWarpgroup:
    tile: FwdTile
    qk_mma: cute.TiledMma
    pv_mma: cute.TiledMma
    pipes: Pipes
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
        tile, pipes = self.tile, self.pipes
        frags = self.fragments(wg)
        row_max = cute.make_rmem_tensor((2,), Float32)
        row_sum = cute.make_rmem_tensor((2,), Float32)
        factor = Float32(1.0) if cutlass.const_expr(self.score.config.scaled) else self.score.scales.log2
        softmax = OnlineSoftmax(row_max, row_sum, factor, self.score.config.exact)

        self.first_turn(wg)
        tick = Int32(0)  # tiles of all items before
        turn = Int32(0)  # items before
        first = wg * WG_ROWS + first_row(thread)
        old_block, old_head, old_batch = Int32(-1), Int32(0), Int32(0)  # whose last PV and epilogue are still to do
        block = self.await_item(wg, turn)
        while block >= 0:
            row = block * tile.tile_m + first
            head, batch, partial, edge, full = [self.work(wg, field) for field in range(1, 6)]
            if partial + edge + full > 0:
                old = Item(old_block, old_block * tile.tile_m + first, old_head, old_batch, None)
                item = Item(block, row, head, batch, self.score.rows(row, head, batch))
                self.walk(frags, softmax, old, item, (partial, edge, full), tick, wg)
                old_block, old_head, old_batch = block, head, batch
            else:
                pipes.release_q(wg)
                self.epilogue.nothing(row, head, batch)
            tick = tick + partial + edge + full
            turn = turn + 1
            block = self.await_item(wg, turn)
        if old_block >= 0:
            self.last(frags, tick - 1)
            self.epilogue.run(frags.acc_O, softmax, old_block * tile.tile_m + first, old_head, old_batch)

    def fragments(self, wg: Int32) -> Fragments:
        tile, qk, pv = self.tile, self.qk_mma.get_slice(0), self.pv_mma.get_slice(0)
        sQ = warpgroup_tile(tile, self.memory.q, self.q_layout, self.dtype, wg)
        return Fragments(
            tSrQ=qk.make_fragment_A(qk.partition_A(sQ))[None, None, None, 0],
            tSrK=qk.make_fragment_B(qk.partition_B(self.sK)),
            tOrV=pv.make_fragment_B(pv.partition_B(self.sV)),
            acc_O=pv.make_fragment_C(pv.partition_shape_C((WG_ROWS, tile.value_dim))),
            rP=cute.make_rmem_tensor(self.score_fragment().layout, self.dtype),
        )

    @cute.jit
    def await_item(self, wg: Int32, turn: Int32) -> Int32:
        """Wait for the next work item and its Q; returns its block of rows, -1 when there are no more."""
        cute.arch.mbarrier_wait(self.pipes.q_full(wg), turn & 1)
        return self.work(wg, 0)

    def work(self, wg: Int32, field: int) -> Int32:
        """A field of the work item. Uniform by a shuffle: where a branch could part the threads of a warp, ptxas lets
        only one wgmma run at a time in the whole kernel."""
        return cute.arch.make_warp_uniform(self.pipes.work[wg * WORK + field])

    @cute.jit
    def walk(
        self, frags: Fragments, softmax: OnlineSoftmax, old: Item, item: Item, counts: tuple, tick: Int32, wg: Int32
    ):
        """The tiles of `item` up to the last one's P; and what is left of `old`."""
        partial, edge, full = counts
        masked = partial + edge
        total = masked + full
        self.turnover(frags, softmax, old, item, (tick, total == 1), wg, partial > 0)
        for i in cutlass.range(1, masked, unroll=1):
            self.step(frags, softmax, item, (tick + i, i == total - 1), wg, True, i < partial)
        for i in cutlass.range(cutlass.max(masked, 1), total, unroll=1):
            self.step(frags, softmax, item, (tick + i, i == total - 1), wg, False, Boolean(False))

    @cute.jit
    def turnover(
        self, frags: Fragments, softmax: OnlineSoftmax, old: Item, item: Item, at: tuple, wg: Int32, partial: Boolean
    ):
        """The first tile of `item`, over the last PV and the epilogue of `old` if there is one."""
        k, v = self.pipes.k, self.pipes.v
        tick, is_last = at
        acc_S = self.score_fragment()
        k.wait_full(tick)
        place = self.place(item, tick, True)
        self.await_turn(wg)
        warpgroup.fence()
        gemm(self.qk_mma, acc_S, frags.tSrQ, frags.tSrK[None, None, None, k.buffer(tick)], False)
        warpgroup.commit_group()
        if old.block >= 0:
            v.wait_full(tick - 1)
            gemm(self.pv_mma, frags.acc_O, as_operand(frags.rP), frags.tOrV[None, None, None, v.buffer(tick - 1)], True)
            warpgroup.commit_group()
        self.pass_turn(wg)
        warpgroup.wait_group(0)
        self.done_with_k(tick, is_last, wg)
        if old.block >= 0:
            v.release(tick - 1)
            self.epilogue.run(frags.acc_O, softmax, old.row, old.head, old.batch)
        rS = rows_and_columns(acc_S, self.tile.tile_n)
        self.score.apply(rS, place, True, partial)
        softmax.first(rS)
        self.await_next_k(tick, is_last)
        frags.acc_O.fill(0.0)
        round_into(frags.rP, acc_S)

    @cute.jit
    def step(
        self,
        frags: Fragments,
        softmax: OnlineSoftmax,
        item: Item,
        at: tuple,
        wg: Int32,
        masked: cutlass.Constexpr[bool],
        partial: Boolean,
    ):
        """Steps 1-9 of the figure."""
        k, v = self.pipes.k, self.pipes.v
        tick, is_last = at
        acc_S = self.score_fragment()
        rescale = cute.make_rmem_tensor((2,), Float32)
        place = self.place(item, tick, masked)
        self.await_turn(wg)
        warpgroup.fence()  # orders this thread's writes of P and O before the wgmma that read them
        gemm(self.qk_mma, acc_S, frags.tSrQ, frags.tSrK[None, None, None, k.buffer(tick)], False)
        warpgroup.commit_group()
        v.wait_full(tick - 1)
        gemm(self.pv_mma, frags.acc_O, as_operand(frags.rP), frags.tOrV[None, None, None, v.buffer(tick - 1)], True)
        warpgroup.commit_group()
        self.pass_turn(wg)
        warpgroup.wait_group(1)
        self.done_with_k(tick, is_last, wg)
        rS = rows_and_columns(acc_S, self.tile.tile_n)
        self.score.apply(rS, place, masked, partial)
        grown = softmax.step(rS, rescale, cutlass.const_expr(masked or self.score.config.may_kill))
        self.await_next_k(tick, is_last)
        warpgroup.wait_group(0)
        v.release(tick - 1)
        if grown:
            scale_rows(rows_and_columns(frags.acc_O, self.tile.value_dim), rescale, self.tile.value_dim // 4)
        round_into(frags.rP, acc_S)

    def place(self, item: Item, tick: Int32, masked: bool) -> Place:
        """Where tile `tick` lies; a full tile without mods lies nowhere, as nobody asks. Reads what `done_with_k`
        gives back."""
        mods = self.score.config.mods
        if not (masked or mods.has_score or mods.has_keep):
            return Place(item.rows, Int32(0))
        n = self.pipes.tiles[self.pipes.k.buffer(tick)]
        return Place(item.rows, n * self.tile.tile_n + first_column(cute.arch.lane_idx()))

    @cute.jit
    def await_next_k(self, tick: Int32, is_last: Boolean):
        """The K of the next step, between the softmax and the wait for PV: the branches keep ptxas from moving that
        wait up before the exponentials, which would no longer run under PV."""
        if not is_last:
            self.pipes.k.wait_full(tick + 1)

    @cute.jit
    def done_with_k(self, tick: Int32, is_last: Boolean, wg: Int32):
        """QK^T of a tile is done: K may be overwritten, after the last one of an item also Q."""
        self.pipes.k.release(tick)
        if is_last:
            self.pipes.release_q(wg)

    @cute.jit
    def last(self, frags: Fragments, tick: Int32):
        """The last PV of all."""
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
