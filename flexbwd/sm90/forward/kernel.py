"""The forward kernel: warp-specialised attention for SM90.

               gmem                      smem                          registers                      gmem
    warp 0    Q  ──TMA──▶  q[wg]  ───────────────┐
    LOADER    K  ──TMA──▶  k ring[stages] ───────┤   MMA warpgroups 1 ... wgs, 64 query rows each
              V  ──TMA──▶  v ring[stages] ───────┴─▶ S = QKᵀ → score tile → online softmax → P → O += P V
                                                     O ──stmatrix──▶ q[wg] (as O) ──TMA──▶ out;   LSE ──▶ lse

    role      threads                registers   loop
    LOADER    warp 0 of warpgroup 0  24 or 32    K, Q, V, K, V, ... of each work item's walk
    (idle)    warps 1-3              24 or 32    ends at once; a later step's block-list walker
    MMA       warpgroup 1 + wg       240 or 160  the steps of mma.py, then the epilogue

Every role derives the same items and tiles from `Schedule` and `Walk`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from flexbwd.sm90.forward.config import FwdConfig
from flexbwd.sm90.forward.epilogue import Epilogue
from flexbwd.sm90.forward.loader import Loader
from flexbwd.sm90.forward.mma import MmaWarpgroup
from flexbwd.sm90.forward.roles import Operand4, Pipes, Plan, Scales, Tma
from flexbwd.sm90.forward.score import ScoreTile
from flexbwd.sm90.forward.storage import smem_layouts, storage_struct, swizzled
from flexbwd.sm90.pipes import Ring
from flexbwd.sm90.schedule import Schedule
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS
from flexbwd.sm90.walk import Walk


def by_rows(t: cute.Tensor) -> cute.Tensor:
    """[B, H, S, D] seen as (S, D, H, B)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def by_columns(t: cute.Tensor) -> cute.Tensor:
    """[B, H, S, D] seen as (D, S, H, B)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 2, 1, 0]))


@dataclass(frozen=True)
class ForwardKernel:
    config: FwdConfig
    dtype: Any  # the DSL's 16-bit type

    def tiled_mmas(self) -> tuple[Any, Any]:
        """QK^T from shared memory, PV with P from registers and V transposed on the fly."""
        tile, major, one = self.config.tile, OperandMajorMode, (1, 1, 1)
        qk = hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, one, (WG_ROWS, tile.tile_n)
        )
        pv = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major.K,
            major.MN,
            Float32,
            one,
            (WG_ROWS, tile.value_dim),
            warpgroup.OperandSource.RMEM,
        )
        return qk, pv

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale_log2: Float32,
        section: Int32,
        ctas: Int32,
        stream,
    ):
        """q, k, v, out [B, H, S, D], lse [B, Hq, Sq]; `section` heads share L2; `ctas` CTAs at most."""
        config, tile = self.config, self.config.tile
        layouts = smem_layouts(tile, self.dtype)
        qk_mma, pv_mma = self.tiled_mmas()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = ((WG_ROWS, tile.dim), (tile.tile_n, tile.dim), (tile.value_dim, tile.tile_n), (WG_ROWS, tile.value_dim))
        tensors = (by_rows(q), by_rows(k), by_columns(v), by_rows(out))
        staged = (layouts.q, layouts.k, layouts.v, layouts.o)
        tma = [
            Tma(*cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), box))
            for op, t, layout, box in zip((load, load, load, store), tensors, staged, boxes, strict=True)
        ]
        operands = Operand4(*tma, lse, q.shape[1] // k.shape[1])
        m_blocks = (q.shape[2] + (tile.tile_m - 1)) // tile.tile_m
        grid = cutlass.min(ctas, m_blocks * q.shape[1] * q.shape[0])
        schedule = Schedule(config.causal, m_blocks, q.shape[1], q.shape[0], section, grid)
        walk = Walk(tile.tile_m, tile.tile_n, config.causal, q.shape[2], k.shape[2])
        self.kernel(
            operands,
            Plan(schedule, walk),
            Scales(scale_log2),
            qk_mma,
            pv_mma,
            layouts.q,
            layouts.k,
            layouts.v,
            layouts.o,
        ).launch(grid=(grid, 1, 1), block=(tile.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        operands: Operand4,
        plan: Plan,
        scales: Scales,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
    ):
        tile = self.config.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator().allocate(storage_struct(tile, self.dtype))
        sK, sV = swizzled(memory.k, k_layout), swizzled(memory.v, v_layout)
        bars = memory.bars.data_ptr()
        first = 2 * tile.wgs
        pipes = Pipes(
            bars, Ring(bars + first, tile.stages), Ring(bars + first + 2 * tile.stages, tile.stages), tile.wgs
        )
        if warp == 0:
            for tma in (operands.q, operands.k, operands.v, operands.o):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for wg in cutlass.range_constexpr(tile.wgs):
                    cute.arch.mbarrier_init(pipes.q_full(wg), 1)
                    cute.arch.mbarrier_init(pipes.q_empty(wg), 1)
                pipes.k.init(4 * tile.wgs)
                pipes.v.init(4 * tile.wgs)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()  # barriers are initialised before any role uses them

        if warp < 4:
            cute.arch.setmaxregister_decrease(tile.producer_registers)
            if warp == 0:
                Loader(tile, operands, pipes, plan, memory, sK, sV, q_layout, self.dtype).run()
        else:
            cute.arch.setmaxregister_increase(tile.mma_registers)
            epilogue = Epilogue(tile, pv_mma, operands, pipes, memory, o_layout, self.dtype, plan.walk.q_len)
            score = ScoreTile(plan.walk, scales, self.config.prescale)
            MmaWarpgroup(
                tile,
                qk_mma,
                pv_mma,
                operands,
                pipes,
                plan,
                scales,
                score,
                epilogue,
                memory,
                sK,
                sV,
                q_layout,
                self.dtype,
            ).run(warp // 4 - 1, thread % WG_THREADS)
