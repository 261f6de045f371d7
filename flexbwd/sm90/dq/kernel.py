"""The dQ kernel: one CTA owns query tiles and walks their key tiles, as the forward does. No atomics, no scratch.

               gmem                        smem                        registers                             gmem
    warp 0    Q   ──TMA──▶  q[wg]   ──────────────┐
    LOADER    dO  ──TMA──▶  do[wg]  ──────────────┤   MMA warpgroups 1 ... wgs, 64 query rows each
              K   ──TMA──▶  k ring[k_stages] ─────┤   S = QKᵀ, dP = dO·Vᵀ → P, dS → dQ += dS·K
              V   ──TMA──▶  v ring[v_stages] ─────┘   dQ·scale ──stmatrix──▶ q[wg] (as dQ) ──TMA──▶ dq

    role      threads                registers   loop
    LOADER    warp 0 of warpgroup 0  24 or 32    K, Q, dO, V, K, V, ... of each work item's walk
    (idle)    warps 1-3              24 or 32    end at once
    MMA       warpgroup 1 + wg       240 or 160  the steps of mma.py, then the epilogue

Every role derives the same items from `DqWalk`; only the loader knows the tiles. The sums of a row are added in the
order of its walk: equal bits in every run.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.jit.launch import dsl_dtype
from flexbwd.sm90.dq.config import DqConfig
from flexbwd.sm90.dq.epilogue import Epilogue
from flexbwd.sm90.dq.loader import Loader
from flexbwd.sm90.dq.mma import MmaWarpgroup
from flexbwd.sm90.dq.roles import Matrix, Operands, Pipes, Scales
from flexbwd.sm90.dq.storage import Layouts, Smem, storage_struct
from flexbwd.sm90.dq.walk import DqWalk
from flexbwd.sm90.dq.weights import Weights
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS

LOG2_E = 1.4426950408889634


def _matrix(op: Any, tensor: cute.Tensor, layout: Any, rows: int, columns: int) -> Matrix:
    """[B, H, S, D] as (S, D, H, B), moved in tiles of rows x columns."""
    by_rows = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))
    one_buffer = cute.slice_(layout, (None, None, 0))
    return Matrix(*cpasync.make_tiled_tma_atom(op, by_rows, one_buffer, (rows, columns)))


@dataclass(frozen=True)
class DqKernel:
    """Host launcher and kernel of one configuration."""

    config: DqConfig

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        grad_out: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        grad_query: cute.Tensor,
        scale: Float32,
        walk: tuple,
        ctas: Int32,
        mods: tuple,
        stream: Any,
    ):
        """Matrices [B, H, S, D]; lse_log2, delta [B*Hq, padded Sq]; `walk`: see `DqWalk.detail`; `ctas` CTAs at most;
        `mods`: see `ModConfig.of`."""
        tile = self.config.tile
        layouts = Layouts.of(tile, query.element_type)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        operands = Operands(
            q=_matrix(load, query, layouts.q, WG_ROWS, tile.dim),
            do=_matrix(load, grad_out, layouts.do, WG_ROWS, tile.value_dim),
            k=_matrix(load, key, layouts.k, tile.tile_n, tile.dim),
            v=_matrix(load, value, layouts.v, tile.tile_n, tile.value_dim),
            dq=_matrix(store, grad_query, layouts.q, WG_ROWS, tile.dim),
            lse=lse_log2,
            delta=delta,
            group=query.shape[1] // key.shape[1],
        )
        walk = self.walk(operands, walk)
        grid = cutlass.min(ctas, walk.items)
        self.kernel(operands, walk.detail, Scales(scale * LOG2_E, scale), mods).launch(
            grid=(grid, 1, 1), block=(tile.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    def walk(self, operands: Operands, detail: tuple) -> DqWalk:
        """Of the kernel's arguments."""
        tile, q = self.config.tile, operands.q.m
        return DqWalk(
            self.config.walk,
            tile.tile_m,
            tile.tile_n,
            q.shape[0],
            operands.k.m.shape[0],
            q.shape[2],
            q.shape[3],
            detail,
        )

    @cute.kernel
    def kernel(self, operands: Operands, detail: tuple, scales: Scales, mods: tuple):
        tile, dtype = self.config.tile, dsl_dtype(self.config.dtype)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(storage_struct(tile, dtype))
        smem = Smem.of(storage, tile, dtype)
        pipes = Pipes.of(storage.bars.data_ptr(), tile)
        walk = self.walk(operands, detail)
        if warp == 0:
            for matrix in (operands.q, operands.do, operands.k, operands.v, operands.dq):
                cpasync.prefetch_descriptor(matrix.atom)
            with cute.arch.elect_one():
                pipes.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()  # barriers are initialised before any role uses them

        if warp < 4:
            cute.arch.setmaxregister_decrease(tile.producer_registers)
            if warp == 0:
                Loader(tile, operands, smem, pipes, walk).run()
        else:
            cute.arch.setmaxregister_increase(tile.mma_registers)
            epilogue = Epilogue(tile, operands, smem, pipes, scales)
            weights = Weights(walk, scales, self.config.mods)
            thread = cute.arch.thread_idx()[0] % WG_THREADS
            MmaWarpgroup(tile, operands, smem, pipes, walk, weights, epilogue, mods).run(warp // 4 - 1, thread)
