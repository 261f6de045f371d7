"""Step: the maths of one query tile, with q rows i and key rows j.

    1  S  = K·Qᵀ                 4  dV += Pᵀ·dO
    2  dP = V·dOᵀ                5  dQ  = dS·K      to the dQ writer
    3  P  = exp2(c·S − lse)      6  dK += dSᵀ·Q
       dS = P ∘ (dP − delta)

S and dP are held with keys as rows ("swapped"), so that Pᵀ and dSᵀ are what the registers hold. The order in which the
products are started was measured: the next S behind dQ, dQ a step late so that the warpgroups need not meet, or dQ
added to global memory from registers are each 5-10 % slower (H200, D128 S8192), as they leave fewer products queued
where a warpgroup waits.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from flexbwd.modgraph.modplan import JClass
from flexbwd.sm90.backward.capture_grads import CaptureGrads
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.pipes import DQ_END, DQ_THREADS, Barrier, Pipes
from flexbwd.sm90.backward.products import Accumulators, Products, Share
from flexbwd.sm90.backward.storage import Smem
from flexbwd.sm90.backward.tile import MMA_THREADS, WG_THREADS, WGS
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.mods import Axis
from flexbwd.sm90.numerics import as_operand, column_of, exp2, first_column, rows_and_columns

_GROUP = 8  # elements of a fragment that go through the mods together: 4 columns of 2 rows
FULL, EDGE, PARTIAL = "full", "edge", "partial"


@dataclass(frozen=True)
class Lane:
    """Who this thread is."""

    wg: Int32
    thread: Int32  # within both warpgroups
    kv: Int32  # the first of the key rows it holds, (kv, kv + 8)


def group_of(fragment: cute.Tensor, start: int) -> cute.Tensor:
    """_GROUP elements of a fragment: 2 rows of some neighbouring columns."""
    return cute.make_tensor(fragment.iterator + start, cute.make_layout((_GROUP,)))


def loaded(stats: cute.Tensor, columns: tuple[int, ...]) -> cute.Tensor:
    """The statistics of some columns, an even number of neighbours, in registers."""
    held = cute.make_rmem_tensor((2, len(columns) // 2), Float32)
    start = cute.make_tensor(stats[None, columns[0] // 2].iterator, cute.make_layout(held.shape, stride=(1, 8)))
    cute.autovec_copy(start, held)
    return cute.make_tensor(held.iterator, cute.make_layout((len(columns),)))


@dataclass(frozen=True)
class Step:
    config: BwdConfig
    smem: Smem
    pipes: Pipes
    walk: BwdWalk
    products: Products
    share: Share
    acc: Accumulators
    lane: Lane
    scale_log2: Float32
    captures: CaptureGrads | None
    mods: Any = None  # mod_tile.Rows of the head being walked: keys are rows

    @cute.jit
    def await_query(self, tick: Int32) -> Int32:
        """The tick-th query tile has landed; its number, negative when the walk is over."""
        self.pipes.q.wait_full(tick)
        return cute.arch.make_warp_uniform(self.smem.record[0, self.pipes.q.buffer(tick)])

    @cute.jit
    def run(self, m_block: Int32, row: Int32, tick: Int32, kind: cutlass.Constexpr[str]) -> Int32:
        """The tick-th tile, query tile `m_block` of the matrix (batch, head) numbered `row`; the next tile's number."""
        config, tile, pipes, products = self.config, self.config.tile, self.pipes, self.products
        dtype, q_stage, do_stage = self.smem.k.element_type, pipes.q.buffer(tick), pipes.do.buffer(tick)

        # 1, 2: S and dP
        acc_dP = products.dp.accumulator(tile.tile_n, tile.tile_m)
        warpgroup.fence()
        products.s.issue(self.acc.S, False, b_stage=q_stage)
        pipes.do.wait_full(tick)
        if cutlass.const_expr(config.want_ds):
            products.dp.issue(acc_dP, False, b_stage=do_stage)
        warpgroup.wait_group(1 if config.want_ds else 0)

        # 3: P, then dS
        q = m_block * tile.tile_m + self.first_query()
        rP, rdS = (cute.make_rmem_tensor_like(self.acc.S, dtype) for _ in range(2))
        self.exponentiate(rP, q, q_stage, kind)
        if cutlass.const_expr(config.want_ds):
            warpgroup.wait_group(0)
            self.through_softmax(acc_dP, q, do_stage)
            rdS.store(acc_dP.load().to(dtype))

        # 4, 5, 6: dV, dQ and dK
        self.multiply(rP, rdS, row * self.walk.m_blocks + m_block, tick)
        pipes.q.release(tick)
        return self.await_query(tick + 1)

    @cute.jit
    def multiply(self, rP: cute.Tensor, rdS: cute.Tensor, target: Int32, tick: Int32):
        """dV from registers starts before dS is shared; dQ is handed over while dK runs.

        ptxas waits for each wgmma in turn where one is under a condition or in flight at a loop's edge, and where the
        registers of all that is started between two full waits do not fit.
        """
        config, tile, pipes, products = self.config, self.config.tile, self.pipes, self.products
        q_stage, do_stage, ds_stage = pipes.q.buffer(tick), pipes.do.buffer(tick), tick % tile.ds_stages
        if cutlass.const_expr(tile.by_keys and config.want_dv):
            warpgroup.fence()
            products.dv.issue(self.acc.dV, True, a=as_operand(rP), b_stage=do_stage)
        self.share_weights(rP, rdS, ds_stage)
        warpgroup.fence()
        if cutlass.const_expr(not tile.by_keys and config.want_dv):
            products.dv.issue(self.acc.dV, True, a_stage=ds_stage, b_stage=do_stage)
        acc_dQ = products.dq.accumulator(tile.tile_m, tile.dim)
        if cutlass.const_expr(config.want_dq):
            products.dq.issue(acc_dQ, False, a_stage=ds_stage)
        if cutlass.const_expr(config.want_dk):
            a = as_operand(rdS) if tile.by_keys else None
            products.dk.issue(self.acc.dK, True, a=a, a_stage=ds_stage, b_stage=q_stage)
        warpgroup.wait_group(1 if config.want_dk and config.want_dq else 0)
        pipes.do.release(tick)  # dP and dV have retired, and dQ
        if cutlass.const_expr(config.want_dq):
            self.hand_over(acc_dQ, target)
        warpgroup.wait_group(0)

    def share_weights(self, rP: cute.Tensor, rdS: cute.Tensor, stage: Int32):
        """dS (and P, where warpgroups share a tile by dims) to shared memory, for both warpgroups."""
        config, tile = self.config, self.config.tile
        if tile.ds_stages == 1:
            cute.arch.barrier(barrier_id=Barrier.DS, number_of_threads=MMA_THREADS)
        if not tile.by_keys:
            self.share.store(rP, self.share.p, stage)
        if config.want_dq or (config.want_dk and not tile.by_keys):
            self.share.store(rdS, self.share.ds, stage)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Barrier.DS, number_of_threads=MMA_THREADS)

    def stats(self, stats: cute.Tensor, stage: Int32) -> cute.Tensor:
        """(2, groups) view of the statistics of the queries this thread holds."""
        tile = self.config.tile
        share = tile.tile_m if tile.by_keys else tile.tile_m // WGS
        view = cute.make_tensor(
            stats.iterator,
            cute.make_layout(
                (2, 4, share // 8, tile.tile_m // share, cute.size(stats, mode=[1])),
                stride=(1, 2, 8, share, tile.tile_m),
            ),
        )
        part = 0 if tile.by_keys else self.lane.wg
        return view[None, self.lane.thread % 4, None, part, stage]

    def first_query(self) -> Int32:
        """The first column of S that this thread holds, within the tile."""
        tile = self.config.tile
        part = 0 if tile.by_keys else self.lane.wg * (tile.tile_m // WGS)
        return part + first_column(self.lane.thread)

    def exponentiate(self, rP: cute.Tensor, q: Int32, stage: Int32, kind: str):
        """S becomes P·J in place, and P rounded goes to rP. J = ∂s'/∂s is 1 here if it is free of the score.

        Column by column group, so that what a mod computes on the way lives shortly.
        """
        mods, acc_S = self.config.mods, self.acc.S
        stats = self.stats(self.smem.lse, stage)
        for g in range(0, cute.size(acc_S), _GROUP):
            flat = group_of(acc_S, g)
            score = rows_and_columns(flat)
            columns = tuple(range(g // 2, (g + _GROUP) // 2))
            lse = loaded(stats, columns)
            tile = self.mod_tile(q, columns)
            factor = None
            if mods.has_score:
                if mods.j_class is JClass.NONLINEAR and self.config.want_ds:
                    factor = cute.make_rmem_tensor((2, _GROUP // 2), Float32)
                tile.score_and_factor(score, factor)
            for r in range(2):
                for j, column in enumerate(columns):
                    x = score[r, j] if mods.has_score else score[r, j] * self.scale_log2
                    score[r, j] = self.within(x - lse[j], q, r, column, kind)
            if mods.has_keep or (mods.has_mask and kind == PARTIAL):
                tile.mask(score, kind == PARTIAL)
            for r in range(2):
                for j in range(len(columns)):
                    score[r, j] = exp2(score[r, j])
            group_of(rP, g).store(flat.load().to(rP.element_type))
            if factor is not None:
                tile.times_factor(score, factor)

    def within(self, x: Float32, q: Int32, r: int, column: int, kind: str) -> Float32:
        """`x`, or -inf where the keys end or the band does not reach."""
        if kind == FULL:
            return x
        walk, kv = self.walk, self.lane.kv
        keep = kv + 8 * r < walk.kv_len
        if kind == PARTIAL and walk.kind.band:
            keep = keep & walk.keep(q, kv, column_of(column) - 8 * r)
        return cutlass.select_(keep, x, -Float32.inf)

    def through_softmax(self, acc_dP: cute.Tensor, q: Int32, stage: Int32):
        """dP becomes dS = P·J ∘ (dP − delta), in place; S holds P·J, or P where J is free of the score."""
        mods = self.config.mods
        stats = self.stats(self.smem.delta, stage)
        for g in range(0, cute.size(acc_dP), _GROUP):
            held, grad = rows_and_columns(group_of(self.acc.S, g)), rows_and_columns(group_of(acc_dP, g))
            columns = tuple(range(g // 2, (g + _GROUP) // 2))
            delta = loaded(stats, columns)
            for r in range(2):
                for j in range(len(columns)):
                    grad[r, j] = held[r, j] * (grad[r, j] - delta[j])
            if mods.j_class in (JClass.CONST, JClass.LINEAR) and self.captures is None:
                self.mod_tile(q, columns).times_factor(grad)
        if self.captures is not None:
            self.captures.add(self.mods, acc_dP, q)
            if mods.j_class in (JClass.CONST, JClass.LINEAR):
                columns = tuple(range(cute.size(acc_dP) // 2))
                self.mod_tile(q, columns).times_factor(rows_and_columns(acc_dP))

    def mod_tile(self, q: Int32, columns: tuple[int, ...]) -> Any:
        """The mods over some columns of the fragment; None without mods."""
        if self.mods is None:
            return None
        return self.mods.tile(Axis(q, tuple(column_of(j) for j in columns)))

    @cute.jit
    def hand_over(self, acc_dQ: cute.Tensor, target: Int32):
        """This warpgroup's dQ, in fragment order, to its writer warp, with the tile of the accumulator it is for."""
        wg, thread = self.lane.wg, self.lane.thread % WG_THREADS
        groups = self.config.tile.dq_wg_floats // (4 * WG_THREADS)
        share = cute.make_tensor(
            self.smem.dq[None, wg].iterator, cute.make_layout((4, WG_THREADS, groups), stride=(1, 4, 4 * WG_THREADS))
        )
        source = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, groups), stride=(1, 4)))
        self.address(target)
        cute.autovec_copy(source, share[None, thread, None])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=DQ_THREADS)

    @cute.jit
    def address(self, target: Int32):
        """Once the writer has read out the tile before: where the next one goes, or DQ_END."""
        wg, thread, place = (
            self.lane.wg,
            self.lane.thread,
            self.smem.dq_target,
        )  # an `if` carries all of what it writes to
        cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=DQ_THREADS)
        if thread % WG_THREADS == 0:
            place[wg] = target

    @cute.jit
    def finish(self):
        """Send the writer home."""
        if cutlass.const_expr(self.config.want_dq):
            self.address(Int32(DQ_END))
            wg = self.lane.wg
            cute.arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=DQ_THREADS)
