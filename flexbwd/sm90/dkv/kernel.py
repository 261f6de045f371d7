"""The dK/dV kernel of wide head dims: a CTA owns 64 keys and walks the query tiles of every query head of its group.

           gmem                       smem                     registers                             gmem
warp 0   Q, LSE   ──TMA──▶ q ring ───────┐  warps 4-7: S → P;  dV += P·dO
warp 1   dO, delta──TMA──▶ dO ring ──────┤         └── P ──▶ smem ──┐
LOADERS  K, V     ──TMA, once────────────┘  warps 8-11: dP → dS;  dK += dS·Q        EPILOGUE ──TMA──▶ dV, dK

At D = 256 the accumulators of 64 keys fill half of two warpgroups' registers whichever way they are cut. Cut by
result (mma.py) no product needs P or dS from shared memory, and all that warpgroups exchange is P, once.

64 keys a CTA mean that Q and dO are read from L2 twice as often as by 128; CTAs of a cluster load for each other.
"""

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.jit.launch import dsl_dtype
from flexbwd.sm90.backward.operands import Inputs, Matrix, Work
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.dkv.epilogue import Epilogue, Lane
from flexbwd.sm90.dkv.exchange import Exchange
from flexbwd.sm90.dkv.loader import Loader
from flexbwd.sm90.dkv.mma import MmaWarpgroup
from flexbwd.sm90.dkv.pipes import Pipes
from flexbwd.sm90.dkv.storage import Layouts, Smem, storage_struct
from flexbwd.sm90.dkv.tile import THREADS
from flexbwd.sm90.dkv.weights import Weights
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS

LOADER_REGISTERS, MMA_REGISTERS = 24, 240
LOG2_E = 1.4426950408889634


class Warp(IntEnum):
    LOAD_Q = 0
    LOAD_DO = 1
    VALUE = 4
    KEY = 8


def _matrix(op: Any, tensor: cute.Tensor, layout: Any, rows: int, columns: int, ctas: int = 1) -> Matrix:
    """[B, H, S, D] as (S, D, H, B), moved in tiles of rows x columns; by `ctas` CTAs together."""
    by_rows = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))
    return Matrix(*cpasync.make_tiled_tma_atom(op, by_rows, cute.select(layout, mode=[0, 1]), (rows, columns), ctas))


class DkvKernel:
    """Host launcher and kernel of one configuration."""

    def __init__(self, config: DkvConfig) -> None:
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
        grad_key: cute.Tensor,
        grad_value: cute.Tensor,
        scale: Float32,
        walk: tuple,
        mods: tuple,
        stream: Any,
    ):
        """Matrices [B, H, S, D]; lse_log2, delta [B*Hq, Sq padded to tile_m]; `walk`: see `BwdWalk.detail`; `mods`: see
        `ModConfig.of`."""
        tile = self.config.tile
        layouts = Layouts.of(tile, query.element_type)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        share = load if tile.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        inputs = Inputs(
            q=_matrix(share, query, layouts.q, tile.tile_m, tile.dim, tile.cluster),
            do=_matrix(share, grad_out, layouts.do, tile.tile_m, tile.value_dim, tile.cluster),
            k=_matrix(load, key, layouts.k, WG_ROWS, tile.dim),
            v=_matrix(load, value, layouts.v, WG_ROWS, tile.value_dim),
            lse=lse_log2,
            delta=delta,
        )
        epilogue = Epilogue(
            dk=_matrix(store, grad_key, layouts.k, WG_ROWS, tile.dim),
            dv=_matrix(store, grad_value, layouts.v, WG_ROWS, tile.value_dim),
            scale=scale,
            cluster=tile.cluster,
        )
        n_blocks = (key.shape[2] + (tile.tile_n - 1)) // tile.tile_n
        ctas = n_blocks * key.shape[1] * key.shape[0] * tile.cluster
        self.kernel(inputs, epilogue, n_blocks, walk, mods).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(tile.cluster, 1, 1) if tile.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, epilogue: Epilogue, n_blocks: Int32, detail: tuple, mods: tuple):
        config, tile = self.config, self.config.tile
        dtype = dsl_dtype(config.dtype)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(storage_struct(tile, dtype, config.mods))
        smem = Smem.of(storage, tile, dtype)
        pipes = Pipes.of(storage.bars.data_ptr(), config)
        if warp == Warp.LOAD_Q:
            with cute.arch.elect_one():
                pipes.init(config)
            cute.arch.mbarrier_init_fence()
        self.meet()  # barriers are initialised before any role uses them

        q_heads, kv_heads = inputs.q.m.shape[2], inputs.k.m.shape[2]
        walk = BwdWalk(config.walk, tile.tile_m, tile.tile_n, inputs.q.m.shape[0], inputs.k.m.shape[0], detail)
        cta = cute.arch.block_idx()[0]
        n_block, head = walk.item(cta // tile.cluster, n_blocks, kv_heads * inputs.k.m.shape[3])
        batch = head // kv_heads
        kv_head = head - batch * kv_heads
        rank = cta % tile.cluster
        group = q_heads // kv_heads if config.grouped else 1
        work = Work(n_block, kv_head, kv_head * group, batch, group, q_heads)

        if warp < Warp.VALUE:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == Warp.LOAD_Q:
                Loader(config, inputs, smem, pipes, walk, rank, True).run(work)
            elif warp == Warp.LOAD_DO:
                Loader(config, inputs, smem, pipes, walk, rank, False).run(work)
        else:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            weights = Weights(walk, epilogue.scale * LOG2_E, config.mods)
            exchange = Exchange(smem.p, tile.p_stages)
            mma = MmaWarpgroup(config, smem, pipes, walk, weights, exchange, epilogue, mods)
            lane = Lane(cute.arch.thread_idx()[0] % WG_THREADS, rank)
            if warp < Warp.KEY:
                mma.run_value(work, lane)
            else:
                mma.run_key(work, lane)
        if cutlass.const_expr(tile.cluster > 1):
            self.meet()  # another CTA may still arrive at this one's barriers, or load for it

    def meet(self) -> None:
        """All threads of the cluster."""
        if self.config.tile.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
