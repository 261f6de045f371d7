"""Epilogue: dQ · scale, rounded to 16 bits, through the place of Q to global memory by TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from flexbwd.sm90.dq.loader import tiles
from flexbwd.sm90.dq.roles import Operands, Pipes, Scales
from flexbwd.sm90.dq.storage import Smem
from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.dq.walk import Item
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS

STORE = 5  # named barriers 5 ... 5 + wgs - 1


@dataclass(frozen=True)
class Epilogue:
    tile: DqTile
    operands: Operands
    smem: Smem
    pipes: Pipes
    scales: Scales

    @cute.jit
    def run(self, dq_mma: Any, acc_dQ: cute.Tensor, item: Item, wg: Int32, thread: Int32):
        tile, target = self.tile, self.operands.dq
        dtype = self.smem.q.element_type
        rounded = cute.make_rmem_tensor_like(acc_dQ, dtype)
        rounded.store((acc_dQ.load() * self.scales.dq).to(dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        copy = cute.make_tiled_copy_C(atom, dq_mma).get_slice(thread)
        # Every warp is past the warpgroup's last S: a warp reads its own 16 rows of Q and writes the same rows of dQ
        # in the same layout, so it needs nobody else's word to begin.
        cute.copy(copy, copy.retile(rounded), copy.partition_D(self.smem.q)[None, None, None, wg])
        cute.arch.fence_view_async_shared()  # stmatrix before the TMA store that reads it
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=WG_THREADS)
        if thread // 32 == 0:
            g, s = tiles(target, item.head, item.batch, self.smem.q, WG_ROWS, tile.dim)
            cute.copy(target.atom, s[None, wg], g[None, item.m_block * tile.wgs + wg])
            cute.arch.cp_async_bulk_commit_group()
            # shared memory has been read: the next Q may come, or the CTA may end
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.pipes.q_empty(wg))
