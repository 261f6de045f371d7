"""Epilogue: dK · scale and dV, rounded to 16 bits, through the places of K and V to global memory by TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.operands import Matrix, Outputs, Work
from flexbwd.sm90.backward.pipes import Barrier
from flexbwd.sm90.backward.products import Accumulators, Products
from flexbwd.sm90.backward.storage import Smem
from flexbwd.sm90.backward.tile import MMA_THREADS


@dataclass(frozen=True)
class Epilogue:
    config: BwdConfig
    outputs: Outputs
    smem: Smem
    scale: Float32

    @cute.jit
    def run(self, work: Work, products: Products, acc: Accumulators, thread: Int32):
        config = self.config
        cute.arch.barrier(barrier_id=Barrier.EPILOGUE, number_of_threads=MMA_THREADS)
        if cutlass.const_expr(config.want_dv):
            self.stage(products.dv.mma, acc.dV, self.smem.v, thread, Float32(1.0))
        if cutlass.const_expr(config.want_dk):
            self.stage(products.dk.mma, acc.dK, self.smem.k, thread, self.scale)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Barrier.EPILOGUE, number_of_threads=MMA_THREADS)
        if thread < 32:
            if cutlass.const_expr(config.want_dv):
                self.send(self.outputs.dv, self.smem.v, work, config.tile.value_dim)
            if cutlass.const_expr(config.want_dk):
                self.send(self.outputs.dk, self.smem.k, work, config.tile.dim)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the copy

    @cute.jit
    def stage(self, mma: Any, acc: cute.Tensor, place: cute.Tensor, thread: Int32, factor: Float32):
        """Round and store this thread's part."""
        dtype = place.element_type
        rounded = cute.make_rmem_tensor_like(acc, dtype)
        rounded.store((acc.load() * factor).to(dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(copy, copy.retile(rounded), copy.partition_D(place))

    @cute.jit
    def send(self, target: Matrix, place: cute.Tensor, work: Work, columns: cutlass.Constexpr[int]):
        """By one warp; rows and columns beyond the tensor are dropped."""
        tile = self.config.tile
        g = cute.local_tile(target.m[None, None, work.kv_head, work.batch], (tile.tile_n, columns), (work.n_block, 0))
        t_s, t_g = cpasync.tma_partition(
            target.atom, 0, cute.make_layout(1), cute.group_modes(place, 0, 2), cute.group_modes(g, 0, 2)
        )
        cute.copy(target.atom, t_s, t_g)
