"""MmaWarpgroups: the maths. For every query tile, with q rows i and key rows j:

    1  S  = K·Qᵀ                 4  dV += Pᵀ·dO
    2  dP = V·dOᵀ                5  dQ  = dS·K      to the dQ writer
    3  P  = exp2(c·S − lse)      6  dK += dSᵀ·Q
       dS = P ∘ (dP − delta)

S and dP are held with keys as rows ("swapped"), so that Pᵀ and dSᵀ are what the registers hold.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.epilogue import Epilogue
from flexbwd.sm90.backward.operands import Work
from flexbwd.sm90.backward.pipes import DQ_THREADS, Barrier, Pipes
from flexbwd.sm90.backward.storage import Smem, transposed
from flexbwd.sm90.backward.tile import MMA_THREADS, WG_THREADS, WGS, BwdTile
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.numerics import as_operand, column_of, exp2, first_column, first_row, gemm, rows_and_columns

K_MAJOR, MN_MAJOR = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN


@dataclass(frozen=True)
class Mmas:
    """Tiled wgmmas; the layout of warpgroups says who has which part of each result."""

    s: Any  # (tile_n, tile_m): S and dP
    dv: Any  # (tile_n, Dv)
    dk: Any  # (tile_n, D)
    dq: Any  # (tile_m, D)

    @classmethod
    def of(cls, tile: BwdTile, dtype: Any) -> "Mmas":
        def make(columns: int, by_rows: bool, a_major: Any, b_major: Any, a_source: Any) -> Any:
            n = columns if by_rows else columns // WGS
            op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, n, 16), a_source, a_major, b_major)
            return cute.make_tiled_mma(cute.make_mma_atom(op), (WGS, 1, 1) if by_rows else (1, WGS, 1))

        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        keys = tile.by_keys
        weights = (K_MAJOR, MN_MAJOR, rmem) if keys else (MN_MAJOR, MN_MAJOR, smem)
        return cls(
            s=make(tile.tile_m, keys, K_MAJOR, K_MAJOR, smem),
            dv=make(tile.value_dim, keys, *weights),
            dk=make(tile.dim, keys, *weights),
            dq=make(tile.dim, tile.tile_m == 128, K_MAJOR, MN_MAJOR, smem),
        )


@dataclass(frozen=True)
class Operand:
    """One product: tiled mma and smem operands as descriptors (.., K step[, stage]); a is None: from registers."""

    mma: Any
    a: Any
    b: Any

    @classmethod
    def of(cls, mma: Any, thread: Int32, a: Any, b: cute.Tensor) -> "Operand":
        thr = mma.get_slice(thread)
        frag_a = None if a is None else thr.make_fragment_A(thr.partition_A(a))
        return cls(mma, frag_a, thr.make_fragment_B(thr.partition_B(b)))

    def accumulator(self, rows: int, columns: int) -> cute.Tensor:
        return cute.make_rmem_tensor(self.mma.partition_shape_C((rows, columns)), Float32)


@dataclass(frozen=True)
class Products:
    s: Operand
    dp: Operand
    dv: Operand
    dk: Operand
    dq: Operand


@dataclass(frozen=True)
class Weights:
    """How a thread puts its part of P or dS (keys x queries) into shared memory."""

    copy: Any
    p: Any  # destinations (.., stage)
    ds: Any


@dataclass(frozen=True)
class MmaWarpgroups:
    config: BwdConfig
    smem: Smem
    pipes: Pipes
    walk: BwdWalk
    epilogue: Epilogue
    scale_log2: Float32

    @cute.jit
    def run(self, work: Work, wg: Int32, thread: Int32):
        """`thread` counts within both warpgroups."""
        config, tile, smem = self.config, self.config.tile, self.smem
        mmas = Mmas.of(tile, smem.k.element_type)
        first = wg * WG_THREADS  # descriptors are per warpgroup: keep them uniform
        products = Products(
            s=Operand.of(mmas.s, first, smem.k, smem.q),
            dp=Operand.of(mmas.s, first, smem.v, smem.do),
            dv=Operand.of(mmas.dv, first, None if tile.by_keys else transposed(smem.p), transposed(smem.do)),
            dk=Operand.of(mmas.dk, first, None if tile.by_keys else transposed(smem.ds), transposed(smem.q)),
            dq=Operand.of(mmas.dq, first, smem.ds, transposed(smem.k)),
        )
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), smem.k.element_type)
        copy = cute.make_tiled_copy_C(atom, mmas.s).get_slice(thread)
        weights = Weights(copy, copy.partition_D(transposed(smem.p)), copy.partition_D(transposed(smem.ds)))
        acc_dK = products.dk.accumulator(tile.tile_n, tile.dim)
        acc_dV = products.dv.accumulator(tile.tile_n, tile.value_dim)
        acc_dK.fill(0.0)
        acc_dV.fill(0.0)

        m_begin, m_full, m_end = self.walk.runs(work.n_block)
        cute.arch.mbarrier_wait(self.pipes.kv, 0)
        tick = Int32(0)
        if cutlass.const_expr(config.grouped):
            for _ in cutlass.range(work.group, unroll=1):
                for m in cutlass.range(m_begin, m_full, unroll=1):
                    self.step(products, weights, acc_dK, acc_dV, work, m, tick, wg, thread, True)
                    tick += 1
                for m in cutlass.range(m_full, m_end, unroll=1):
                    self.step(products, weights, acc_dK, acc_dV, work, m, tick, wg, thread, False)
                    tick += 1
        else:
            for m in cutlass.range(m_begin, m_full, unroll=1):
                self.step(products, weights, acc_dK, acc_dV, work, m, tick, wg, thread, True)
                tick += 1
            for m in cutlass.range(m_full, m_end, unroll=1):
                self.step(products, weights, acc_dK, acc_dV, work, m, tick, wg, thread, False)
                tick += 1
        self.epilogue.run(work, mmas.dk, mmas.dv, acc_dK, acc_dV, thread)

    @cute.jit
    def step(
        self,
        products: Products,
        weights: Weights,
        acc_dK: cute.Tensor,
        acc_dV: cute.Tensor,
        work: Work,
        m_block: Int32,
        tick: Int32,
        wg: Int32,
        thread: Int32,
        edge: cutlass.Constexpr[bool],
    ):
        """One query tile."""
        config, tile, smem, pipes = self.config, self.config.tile, self.smem, self.pipes
        by_keys = tile.by_keys
        dtype = smem.k.element_type
        q_stage, do_stage = pipes.q.buffer(tick), pipes.do.buffer(tick)
        ds_stage = tick % tile.ds_stages

        # 1, 2: S and dP
        acc_S = products.s.accumulator(tile.tile_n, tile.tile_m)
        acc_dP = products.dp.accumulator(tile.tile_n, tile.tile_m)
        pipes.q.wait_full(tick)
        warpgroup.fence()
        gemm(products.s.mma, acc_S, products.s.a, products.s.b[None, None, None, q_stage], False)
        warpgroup.commit_group()
        pipes.do.wait_full(tick)
        if cutlass.const_expr(config.want_ds):
            gemm(products.dp.mma, acc_dP, products.dp.a, products.dp.b[None, None, None, do_stage], False)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)

        # 3: P, then dS
        self.exponentiate(acc_S, work, m_block, q_stage, wg, thread, edge)
        rP = cute.make_rmem_tensor_like(acc_S, dtype)
        rP.store(acc_S.load().to(dtype))
        rdS = cute.make_rmem_tensor_like(acc_S, dtype)
        if cutlass.const_expr(config.want_ds):
            warpgroup.wait_group(0)
            self.through_softmax(acc_S, acc_dP, do_stage, wg, thread)
            rdS.store(acc_dP.load().to(dtype))

        # 4: dV from registers may start before dS is shared
        if cutlass.const_expr(by_keys and config.want_dv):
            warpgroup.fence()
            gemm(products.dv.mma, acc_dV, as_operand(rP), products.dv.b[None, None, None, do_stage], True)
            warpgroup.commit_group()
        if cutlass.const_expr(tile.ds_stages == 1):
            cute.arch.barrier(barrier_id=Barrier.DS, number_of_threads=MMA_THREADS)
        if cutlass.const_expr(not by_keys):
            cute.copy(weights.copy, weights.copy.retile(rP), weights.p[None, None, None, ds_stage])
        if cutlass.const_expr(config.want_dq or (config.want_dk and not by_keys)):
            cute.copy(weights.copy, weights.copy.retile(rdS), weights.ds[None, None, None, ds_stage])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Barrier.DS, number_of_threads=MMA_THREADS)
        warpgroup.fence()
        if cutlass.const_expr(not by_keys and config.want_dv):
            a = products.dv.a[None, None, None, ds_stage]
            gemm(products.dv.mma, acc_dV, a, products.dv.b[None, None, None, do_stage], True)
            warpgroup.commit_group()

        # 5, 6: dQ and dK
        acc_dQ = products.dq.accumulator(tile.tile_m, tile.dim)
        if cutlass.const_expr(config.want_dq):
            gemm(products.dq.mma, acc_dQ, products.dq.a[None, None, None, ds_stage], products.dq.b, False)
            warpgroup.commit_group()
        if cutlass.const_expr(config.want_dk):
            a = as_operand(rdS) if by_keys else products.dk.a[None, None, None, ds_stage]
            gemm(products.dk.mma, acc_dK, a, products.dk.b[None, None, None, q_stage], True)
            warpgroup.commit_group()
        if cutlass.const_expr(config.want_dq):
            warpgroup.wait_group(1 if config.want_dk else 0)
            pipes.do.release(tick)  # dV and dP have retired too
            self.hand_over(acc_dQ, wg, thread)
            if cutlass.const_expr(config.want_dk):
                warpgroup.wait_group(0)
        else:
            warpgroup.wait_group(0)
            pipes.do.release(tick)
        pipes.q.release(tick)

    def _columns(self, stats: cute.Tensor, stage: Int32, wg: Int32, thread: Int32) -> cute.Tensor:
        """(2, groups) statistics of the queries this thread holds."""
        tile = self.config.tile
        share = tile.tile_m if tile.by_keys else tile.tile_m // WGS
        view = cute.make_tensor(
            stats.iterator,
            cute.make_layout(
                (2, 4, share // 8, tile.tile_m // share, cute.size(stats, mode=[1])),
                stride=(1, 2, 8, share, tile.tile_m),
            ),
        )
        part = 0 if tile.by_keys else wg
        held = cute.make_rmem_tensor((2, share // 8), Float32)
        cute.autovec_copy(view[None, thread % 4, None, part, stage], held)
        return held

    @cute.jit
    def exponentiate(
        self,
        acc_S: cute.Tensor,
        work: Work,
        m_block: Int32,
        stage: Int32,
        wg: Int32,
        thread: Int32,
        edge: cutlass.Constexpr[bool],
    ):
        """S becomes P, in place."""
        tile = self.config.tile
        lse = self._columns(self.smem.lse, stage, wg, thread)
        score = rows_and_columns(acc_S)
        row_part, column_part = (wg * 64, 0) if tile.by_keys else (0, wg * (tile.tile_m // WGS))
        kv = work.n_block * tile.tile_n + row_part + first_row(thread % WG_THREADS)
        q = m_block * tile.tile_m + column_part + first_column(thread)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(cute.size(score, mode=[1])):
                x = score[r, j] * self.scale_log2 - lse[j]
                if cutlass.const_expr(edge):
                    keep = kv + 8 * r < self.walk.kv_len
                    if cutlass.const_expr(self.config.causal):
                        keep = keep & (q - kv >= 8 * r - column_of(j))
                    x = cutlass.select_(keep, x, -Float32.inf)
                score[r, j] = exp2(x)

    @cute.jit
    def through_softmax(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, stage: Int32, wg: Int32, thread: Int32):
        """dP becomes dS, in place."""
        delta = self._columns(self.smem.delta, stage, wg, thread)
        weight, grad = rows_and_columns(acc_P), rows_and_columns(acc_dP)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(cute.size(grad, mode=[1])):
                grad[r, j] = weight[r, j] * (grad[r, j] - delta[j])

    @cute.jit
    def hand_over(self, acc_dQ: cute.Tensor, wg: Int32, thread: Int32):
        """This warpgroup's dQ, in fragment order, to its writer warp."""
        groups = self.config.tile.dq_wg_floats // (4 * WG_THREADS)
        share = cute.make_tensor(
            self.smem.dq[None, wg].iterator, cute.make_layout((4, WG_THREADS, groups), stride=(1, 4, 4 * WG_THREADS))
        )
        source = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, groups), stride=(1, 4)))
        cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=DQ_THREADS)
        cute.autovec_copy(source, share[None, thread % WG_THREADS, None])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=DQ_THREADS)
