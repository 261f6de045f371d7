"""The backward kernel: one CTA owns a key tile and walks the query tiles of every query head of its group.

           gmem                       smem                          registers                     gmem
warp 0   Q, LSE    ──TMA──▶ q ring ──────┐
LOADER   dO, delta ──TMA──▶ dO ring ─────┤   warps 4-11: MMA warpgroups
         K, V      ──TMA, once───────────┤   S, dP → P, dS → (registers or smem)
                                         └─▶ dV += Pᵀ·dO   dK += dSᵀ·Q   dQ = dS·K
warps 1, 2  ◀── full/empty ── sdQ (fp32) ◀──────────────────────────────────┘
DQ WRITERS  ──bulk reduce-add──▶ dq_acc                  after the last tile: EPILOGUE ──TMA──▶ dK, dV
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.jit.launch import dsl_dtype
from flexbwd.sm90.backward.config import BwdConfig, trained_slots
from flexbwd.sm90.backward.dq_writer import DqWriter
from flexbwd.sm90.backward.epilogue import Epilogue
from flexbwd.sm90.backward.loader import Loader
from flexbwd.sm90.backward.mma import MmaWarpgroups
from flexbwd.sm90.backward.operands import Inputs, Matrix, Outputs, Work
from flexbwd.sm90.backward.pipes import Pipes
from flexbwd.sm90.backward.storage import Smem, smem_layouts, storage_struct
from flexbwd.sm90.backward.tile import WG_THREADS, WGS
from flexbwd.sm90.backward.walk import BwdWalk

THREADS = (1 + WGS) * WG_THREADS
PRODUCER_REGISTERS, MMA_REGISTERS = 24, 240
LOG2_E = 1.4426950408889634


class Warp(IntEnum):
    LOADER = 0
    DQ_WRITER = 1  # and 2: one per MMA warpgroup
    MMA = 4


def _rows_first(tensor: cute.Tensor) -> cute.Tensor:
    """[B, H, S, D] as (S, D, H, B)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))


def _matrix(op: Any, tensor: cute.Tensor, layout: Any, rows: int, columns: int) -> Matrix:
    one_stage = cute.select(layout, mode=[0, 1])
    atom, m = cpasync.make_tiled_tma_atom(op, _rows_first(tensor), one_stage, (rows, columns))
    return Matrix(atom, m)


def _by_warpgroups(dq_acc: cute.Tensor, share: int) -> cute.Tensor:
    """[tiles, floats] as [tiles, warpgroups, floats of one]; the tile stride stays 64 bits wide."""
    layout = cute.make_layout((dq_acc.shape[0], WGS, share), stride=(dq_acc.stride[0], share, 1))
    return cute.make_tensor(dq_acc.iterator, layout)


class BackwardKernel:
    """Host launcher and kernel of one configuration."""

    def __init__(self, config: BwdConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        grad_out: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_acc: cute.Tensor,
        grad_key: cute.Tensor,
        grad_value: cute.Tensor,
        scale: Float32,
        walk: tuple,
        mods: tuple,
        stream: Any,
    ):
        """`walk`: see `BwdWalk.detail`; `mods`: what `ModConfig.of` made, then `CaptureGrads.targets`."""
        tile, dtype = self.config.tile, query.element_type
        layouts = smem_layouts(tile, dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        inputs = Inputs(
            q=_matrix(load, query, layouts.q, tile.tile_m, tile.dim),
            do=_matrix(load, grad_out, layouts.do, tile.tile_m, tile.value_dim),
            k=_matrix(load, key, layouts.k, tile.tile_n, tile.dim),
            v=_matrix(load, value, layouts.v, tile.tile_n, tile.value_dim),
            lse=lse_log2,
            delta=delta,
        )
        outputs = Outputs(
            dk=_matrix(store, grad_key, layouts.k, tile.tile_n, tile.dim),
            dv=_matrix(store, grad_value, layouts.v, tile.tile_n, tile.value_dim),
            dq_acc=_by_warpgroups(dq_acc, tile.dq_wg_floats),
        )
        n_blocks = (key.shape[2] + (tile.tile_n - 1)) // tile.tile_n
        items = n_blocks * key.shape[1] * key.shape[0]
        self.kernel(inputs, outputs, n_blocks, walk, mods, scale).launch(
            grid=(items, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, inputs: Inputs, outputs: Outputs, n_blocks: Int32, walk_arguments: tuple, mods: tuple, scale: Float32
    ):
        config, tile = self.config, self.config.tile
        dtype = dsl_dtype(config.dtype)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(storage_struct(tile, dtype))
        smem = Smem.of(storage, tile, dtype)
        pipes = Pipes.of(storage.bars.data_ptr(), tile)
        if warp == Warp.LOADER:
            with cute.arch.elect_one():
                pipes.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        walk = BwdWalk(
            config.walk,
            tile.tile_m,
            tile.tile_n,
            inputs.q.m.shape[0],
            inputs.k.m.shape[0],
            walk_arguments,
        )
        q_heads, kv_heads = inputs.q.m.shape[2], inputs.k.m.shape[2]
        n_block, head = walk.item(cute.arch.block_idx()[0], n_blocks, kv_heads * inputs.k.m.shape[3])
        batch = head // kv_heads
        kv_head = head - batch * kv_heads
        group = q_heads // kv_heads if config.grouped else 1
        work = Work(n_block, kv_head, kv_head * group, batch, group, q_heads)

        if warp < Warp.MMA:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == Warp.LOADER:
                Loader(config, inputs, smem, pipes, walk).run(work)
            if cutlass.const_expr(config.want_dq):  # noqa: SIM102 - the outer condition is static
                if warp >= Warp.DQ_WRITER and warp < Warp.DQ_WRITER + WGS:
                    DqWriter(config, outputs.dq_acc, smem).run(warp - Warp.DQ_WRITER)
        else:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            epilogue = Epilogue(config, outputs, smem, scale)
            thread = cute.arch.thread_idx()[0] - WG_THREADS
            wg = warp // 4 - 1
            own = len(mods) - (len(trained_slots(config.mods)) if config.want_captures else 0)
            roles = (config, smem, pipes, walk, epilogue, scale * LOG2_E, mods[:own], mods[own:])
            MmaWarpgroups(*roles).run(work, wg, thread)
