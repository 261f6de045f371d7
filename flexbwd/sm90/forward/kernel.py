"""The forward kernel: warp-specialised attention for SM90.

               gmem                      smem                          registers                      gmem
    warp 0    Q  ──TMA──▶  q[wg], work ──────────┐
    LOADER    K  ──TMA──▶  k ring[stages], tiles ┤   MMA warpgroups 1 ... wgs, 64 query rows each
    (walk)    V  ──TMA──▶  v ring[stages] ───────┴─▶ S = QKᵀ → score tile → online softmax → P → O += P V
                                                     O / l ──16-byte stores──▶ out;   LSE, row maxima ──▶ lse, top

    role      threads                registers   loop
    LOADER    warp 0 of warpgroup 0  24 or 32    draws a work item; K, Q, K, V, K, V, ... of its walk; again
    (idle)    warps 1-3              24 or 32    ends at once
    MMA       warpgroup 1 + wg       240 or 160  the steps of mma.py, without a gap from one item to the next

A launch may begin while the kernel before it drains (programmatic dependent launch): up to `griddepcontrol_wait` no
role touches global memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from flexbwd.sm90.forward.config import FwdConfig
from flexbwd.sm90.forward.epilogue import Epilogue
from flexbwd.sm90.forward.loader import Loader
from flexbwd.sm90.forward.mma import MmaWarpgroup
from flexbwd.sm90.forward.roles import WORK, Inputs, Outputs, Pipes, Plan, Scales, Tma
from flexbwd.sm90.forward.score import Bounds, ScoreTile
from flexbwd.sm90.forward.storage import smem_layouts, storage_struct, swizzled
from flexbwd.sm90.pipes import Ring
from flexbwd.sm90.schedule import GridSchedule, ListSchedule, Tickets
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS
from flexbwd.sm90.walk import BandWalk, ListWalk


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
        inputs: tuple,
        outputs: tuple,
        lists: tuple | None,
        mods: tuple,
        counter: cute.Tensor,
        numbers: tuple,
        stream,
    ):
        """inputs (q, k, v) and outputs (out, lse, top or None) as in roles.py, but [B, H, S, D]; lists (counts, tiles,
        order) or None; counter: see `Tickets`; numbers (scale * log2(e), lo, hi, heads per section, CTAs at most)."""
        config, tile = self.config, self.config.tile
        (q, k, v), (out, lse, top) = inputs, outputs
        scale_log2, lo, hi, section, ctas = numbers
        layouts = smem_layouts(tile, self.dtype)
        qk_mma, pv_mma = self.tiled_mmas()
        load = cpasync.CopyBulkTensorTileG2SOp()
        boxes = ((WG_ROWS, tile.dim), (tile.tile_n, tile.dim), (tile.value_dim, tile.tile_n))
        staged = (layouts.q, layouts.k, layouts.v)
        tma = [
            Tma(*cpasync.make_tiled_tma_atom(load, t, cute.slice_(layout, (None, None, 0)), box))
            for t, layout, box in zip((by_rows(q), by_rows(k), by_columns(v)), staged, boxes, strict=True)
        ]
        rows = (q.shape[2] + (tile.tile_m - 1)) // tile.tile_m
        if cutlass.const_expr(config.walk.lists):
            schedule = ListSchedule(lists[2], rows, q.shape[1])
            walk = ListWalk(lists[0], lists[1], q.shape[2], k.shape[2])
        else:
            has_lo, has_hi = config.walk.has_lo, config.walk.has_hi
            last_first = has_lo or not has_hi
            schedule = GridSchedule(last_first, rows, q.shape[1], q.shape[0], section)
            walk = BandWalk(tile.tile_m, tile.tile_n, has_lo, has_hi, q.shape[2], k.shape[2], lo, hi)
        items = schedule.items()
        grid = cutlass.min(ctas, items)
        self.kernel(
            Inputs(*tma, q.shape[1] // k.shape[1]),
            Outputs(out, lse, top),
            Plan(schedule, walk, Tickets(counter, items, grid)),
            mods,
            Scales(scale_log2),
            Bounds(k.shape[2], lo, hi),
            (qk_mma, pv_mma),
            staged,
        ).launch(grid=(grid, 1, 1), block=(tile.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        outputs: Outputs,
        plan: Plan,
        mods: tuple,
        scales: Scales,
        bounds: Bounds,
        mmas: tuple,
        layouts: tuple,
    ):
        tile = self.config.tile
        q_layout, k_layout, v_layout = layouts
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator().allocate(storage_struct(tile, self.dtype))
        sK, sV = swizzled(memory.k, k_layout), swizzled(memory.v, v_layout)
        pipes = self.pipes(memory)
        if warp == 0:
            for tma in (inputs.q, inputs.k, inputs.v):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for wg in cutlass.range_constexpr(tile.wgs):
                    cute.arch.mbarrier_init(pipes.q_full(wg), 1)
                    cute.arch.mbarrier_init(pipes.q_empty(wg), 4)
                pipes.k.init(4 * tile.wgs)
                pipes.v.init(4 * tile.wgs)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()  # barriers are initialised before any role uses them
        cute.arch.griddepcontrol_wait()  # kernels before have written what is read here, and read what is overwritten
        cute.arch.griddepcontrol_launch_dependents()

        if warp < 4:
            cute.arch.setmaxregister_decrease(tile.producer_registers)
            if warp == 0:
                Loader(tile, inputs, pipes, plan, memory, sK, sV, q_layout, self.dtype).run()
        else:
            cute.arch.setmaxregister_increase(tile.mma_registers)
            epilogue = Epilogue(tile, outputs, self.dtype)
            score = ScoreTile(self.config, bounds, scales, mods)
            MmaWarpgroup(tile, *mmas, pipes, score, epilogue, memory, sK, sV, q_layout, self.dtype).run(
                warp // 4 - 1, thread % WG_THREADS
            )

    def pipes(self, memory: Any) -> Pipes:
        tile, bars = self.config.tile, memory.bars.data_ptr()
        k_bars = bars + 2 * tile.wgs
        v_bars = k_bars + 2 * tile.stages
        return Pipes(
            bars,
            Ring(k_bars, tile.stages),
            Ring(v_bars, tile.stages),
            tile.wgs,
            memory.tiles.get_tensor(cute.make_layout(tile.stages)),
            memory.work.get_tensor(cute.make_layout(tile.wgs * WORK)),
        )
