"""The two MMA warpgroups, split by what they compute: each has two of the four products of a step and one result.

    value warpgroup (0)                                  key warpgroup (1)
    1  wait Q_i, issue S = K·Q_iᵀ                        1  wait dO_i, issue dP = V·dO_iᵀ
    2  wait dV of i-1, free dO_{i-1}                     2  wait dK of i-1, free Q_{i-1}
    3  wait S, free Q_i; P = exp2(c·S − lse), masks      3  wait dP, read delta, free dO_i
    4  P ──exchange──────────────────────────────────▶   4  dS = P ∘ (dP − delta)
    5  wait dO_i, issue dV += P·dO_i                     5  wait Q_i, issue dK += dS·Q_i

S and dP have keys as rows, so that P and dS are A operands of 5 as the registers hold them, and one wgmma of 5 is
256 columns wide: B is read once per 64 x 256 of the result. Products 5 and the next step's 1 are queued together;
the one warpgroup's 2-4 run under the other's products.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flexbwd.sm90.backward.operands import Work
from flexbwd.sm90.backward.storage import transposed
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.dkv.epilogue import Epilogue, Lane
from flexbwd.sm90.dkv.exchange import P_BITS, Exchange, exchanged
from flexbwd.sm90.dkv.pipes import Pipes
from flexbwd.sm90.dkv.storage import Smem
from flexbwd.sm90.dkv.weights import EDGE, FULL, PARTIAL, Place, Weights, statistics
from flexbwd.sm90.mods import Axis
from flexbwd.sm90.numerics import as_operand, first_column, first_row, gemm
from flexbwd.sm90.tile import WG_ROWS


def score_mma(columns: int, dtype: Any) -> Any:
    """(64, columns), both operands from shared memory."""
    k = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (WG_ROWS, columns, 16), warpgroup.OperandSource.SMEM, k, k)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def gradient_mma(columns: int, dtype: Any) -> Any:
    """(64, columns), A from registers, B with its rows as the summed dimension."""
    source, major = warpgroup.OperandSource.RMEM, OperandMajorMode
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (WG_ROWS, columns, 16), source, major.K, major.MN)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


@dataclass(frozen=True)
class Products:
    """One warpgroup's two products: score (S or dP) = a·bᵀ, gradient (dV or dK) += weights·c."""

    score: Any
    gradient: Any
    a: cute.Tensor
    b: cute.Tensor  # (.., stage)
    c: cute.Tensor  # (.., stage)
    acc: cute.Tensor
    weights: cute.Tensor  # 16-bit, in the accumulator's order

    @classmethod
    def of(cls, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> "Products":
        """`a` (64, .) stationary, `b` (tile_m, ., stage), `c` (tile_m, columns, stage)."""
        dtype, rows, columns = a.element_type, cute.size(b, mode=[0]), cute.size(c, mode=[1])
        score, gradient = score_mma(rows, dtype), gradient_mma(columns, dtype)
        s, g = score.get_slice(0), gradient.get_slice(0)
        acc = cute.make_rmem_tensor(gradient.partition_shape_C((WG_ROWS, columns)), Float32)
        acc.fill(0.0)
        return cls(
            score,
            gradient,
            s.make_fragment_A(s.partition_A(a)),
            s.make_fragment_B(s.partition_B(b)),
            g.make_fragment_B(g.partition_B(transposed(c))),
            acc,
            cute.make_rmem_tensor(score.partition_shape_C((WG_ROWS, rows)), dtype),
        )

    def accumulator(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.weights.layout, Float32)


@dataclass(frozen=True)
class MmaWarpgroup:
    """Both roles."""

    config: DkvConfig
    smem: Smem
    pipes: Pipes
    walk: BwdWalk
    weights: Weights
    exchange: Exchange
    epilogue: Epilogue
    mods: tuple  # their run-time arguments

    @cute.jit
    def run_value(self, work: Work, lane: Lane):
        """S, P and dV."""
        products = Products.of(self.smem.k, self.smem.q, self.smem.do)
        self.walk_all(products, work, lane, True)
        self.epilogue.sync()
        if cutlass.const_expr(self.config.want_dv):
            factor = Float32(2.0**-P_BITS)
            self.epilogue.run(products.gradient, products.acc, self.smem.v, factor, work, lane, True)

    @cute.jit
    def run_key(self, work: Work, lane: Lane):
        """dP, dS and dK."""
        if cutlass.const_expr(self.config.want_dk):
            products = Products.of(self.smem.v, self.smem.do, self.smem.q)
            self.exchange.open()
            self.walk_all(products, work, lane, False)
            self.epilogue.sync()
            scale = self.epilogue.scale
            self.epilogue.run(products.gradient, products.acc, self.smem.k, scale, work, lane, False)
        else:
            self.epilogue.sync()

    @cute.jit
    def walk_all(self, products: Products, work: Work, lane: Lane, value: cutlass.Constexpr[bool]):
        """Every query tile of every query head of the group."""
        cute.arch.mbarrier_wait(self.pipes.kv, 0)
        tick = Int32(0)
        m_block = self.await_query(tick)
        if cutlass.const_expr(self.config.grouped):
            while m_block >= 0:
                tick, m_block = self.head(products, work, lane, tick, m_block, value)
        else:
            self.head(products, work, lane, tick, m_block, value)

    @cute.jit
    def await_query(self, tick: Int32) -> Int32:
        """The tick-th query tile has landed; its number, negative when the walk is over."""
        self.pipes.q.wait_full(tick)
        return cute.arch.make_warp_uniform(self.smem.record[0, self.pipes.q.buffer(tick)])

    @cute.jit
    def head(
        self,
        products: Products,
        work: Work,
        lane: Lane,
        tick: Int32,
        m_block: Int32,
        value: cutlass.Constexpr[bool],
    ):
        """All tiles of one query head, one loop per kind; the tick and tile after them."""
        tile, walk = self.config.tile, self.walk
        record = self.smem.record[None, self.pipes.q.buffer(tick)]
        row, partial, kept = (cute.arch.make_warp_uniform(record[i]) for i in (1, 2, 3))
        thread = lane.thread
        kv = work.n_block * tile.tile_n + lane.rank * WG_ROWS + first_row(thread)
        q_head = row - work.batch * work.q_heads
        mods = self.config.mods.head(self.mods, work.batch, q_head, self.weights.scale_log2)
        place = Place(kv, first_column(thread), mods.rows(Axis(kv, (0, 8)), "kv"))
        if cutlass.const_expr(not value):
            for _ in cutlass.range(partial + kept, unroll=1):
                self.key_step(products, place, m_block, tick, thread)
                tick += 1
                m_block = self.await_query(tick)
        else:
            if cutlass.const_expr(walk.kind.lists or walk.kind.band):
                for _ in cutlass.range(partial, unroll=1):
                    self.value_step(products, place, m_block, tick, thread, PARTIAL)
                    tick += 1
                    m_block = self.await_query(tick)
            if (work.n_block + 1) * tile.tile_n > walk.kv_len:
                for _ in cutlass.range(kept, unroll=1):
                    self.value_step(products, place, m_block, tick, thread, EDGE)
                    tick += 1
                    m_block = self.await_query(tick)
            else:
                for _ in cutlass.range(kept, unroll=1):
                    self.value_step(products, place, m_block, tick, thread, FULL)
                    tick += 1
                    m_block = self.await_query(tick)
        warpgroup.wait_group(0)  # in flight into another head's loops, ptxas would wait for each wgmma in turn
        return tick, m_block

    @cute.jit
    def value_step(
        self,
        products: Products,
        place: Place,
        m_block: Int32,
        tick: Int32,
        thread: Int32,
        kind: cutlass.Constexpr[str],
    ):
        """The left column of the figure; Q has landed."""
        config, q, do = self.config, self.pipes.q, self.pipes.do
        acc_S = products.accumulator()
        warpgroup.fence()
        gemm(products.score, acc_S, products.a, products.b[None, None, None, q.buffer(tick)], False)
        warpgroup.commit_group()
        if cutlass.const_expr(config.want_dv):
            warpgroup.wait_group(1)
            if tick > 0:
                do.release(tick - 1)
        warpgroup.wait_group(0)
        sent = cute.make_rmem_tensor(acc_S.layout, exchanged(config.mods))
        targets = (products.weights if config.want_dv else None, sent if config.want_dk else None)
        place = Place(place.kv, place.q + m_block * config.tile.tile_m, place.mods)
        self.weights.exponentiate(acc_S, targets, statistics(self.smem.lse, q.buffer(tick), thread), place, kind)
        q.release(tick)
        if cutlass.const_expr(config.want_dk):
            self.exchange.put(sent, tick, thread)
        if cutlass.const_expr(config.want_dv):
            do.wait_full(tick)
            warpgroup.fence()
            c = products.c[None, None, None, do.buffer(tick)]
            gemm(products.gradient, products.acc, as_operand(products.weights), c, True)
            warpgroup.commit_group()

    @cute.jit
    def key_step(self, products: Products, place: Place, m_block: Int32, tick: Int32, thread: Int32):
        """The right column of the figure; Q has landed."""
        config, q, do = self.config, self.pipes.q, self.pipes.do
        acc_dP = products.accumulator()
        do.wait_full(tick)
        warpgroup.fence()
        gemm(products.score, acc_dP, products.a, products.b[None, None, None, do.buffer(tick)], False)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if tick > 0:
            q.release(tick - 1)
        sent = cute.make_rmem_tensor(acc_dP.layout, exchanged(config.mods))
        self.exchange.get(sent, tick, thread)
        warpgroup.wait_group(0)
        place = Place(place.kv, place.q + m_block * config.tile.tile_m, place.mods)
        self.weights.through_softmax(sent, acc_dP, statistics(self.smem.delta, do.buffer(tick), thread), place)
        do.release(tick)
        products.weights.store(acc_dP.load().to(products.weights.element_type))
        warpgroup.fence()
        c = products.c[None, None, None, q.buffer(tick)]
        gemm(products.gradient, products.acc, as_operand(products.weights), c, True)
        warpgroup.commit_group()
