"""Epilogue: a warpgroup's dK or dV, scaled and rounded to 16 bits, through the place of K or V to global memory by
TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from flexbwd.sm90.backward.operands import Matrix, Work
from flexbwd.sm90.dkv.pipes import Barrier
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS


@dataclass(frozen=True)
class Lane:
    """Who a thread is: in its warpgroup, and its CTA in the cluster."""

    thread: Int32
    rank: Int32


@dataclass(frozen=True)
class Epilogue:
    dk: Matrix
    dv: Matrix
    scale: Float32
    cluster: cutlass.Constexpr[int]

    @cute.jit
    def sync(self):
        """Both warpgroups are past their last read of K and V."""
        cute.arch.barrier(barrier_id=Barrier.EPILOGUE, number_of_threads=2 * WG_THREADS)

    @cute.jit
    def run(
        self,
        mma: Any,
        acc: cute.Tensor,
        place: cute.Tensor,
        factor: Float32,
        work: Work,
        lane: Lane,
        value: cutlass.Constexpr[bool],
    ):
        """acc·factor by way of `place` (64, columns)."""
        target = self.dv if value else self.dk
        store = Barrier.STORE + (0 if value else 1)
        dtype, columns = place.element_type, cute.size(place, mode=[1])
        rounded = cute.make_rmem_tensor_like(acc, dtype)
        rounded.store((acc.load() * factor).to(dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(lane.thread)
        cute.copy(copy, copy.retile(rounded), copy.partition_D(place))
        cute.arch.fence_view_async_shared()  # stmatrix before the TMA store that reads it
        cute.arch.barrier(barrier_id=store, number_of_threads=WG_THREADS)
        if lane.thread < 32:
            own = work.n_block * self.cluster + lane.rank
            g = cute.local_tile(target.m[None, None, work.kv_head, work.batch], (WG_ROWS, columns), (own, 0))
            t_s, t_g = cpasync.tma_partition(
                target.atom, 0, cute.make_layout(1), cute.group_modes(place, 0, 2), cute.group_modes(g, 0, 2)
            )
            cute.copy(target.atom, t_s, t_g)  # rows and columns beyond the tensor are dropped
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the copy
