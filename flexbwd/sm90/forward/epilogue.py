"""Epilogue: normalise O, write O by TMA and the LSE by plain stores."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.sm90.forward.roles import Operand4, Pipes
from flexbwd.sm90.forward.softmax import OnlineSoftmax
from flexbwd.sm90.forward.storage import warpgroup_tile
from flexbwd.sm90.numerics import first_row, rows_and_columns, scale_rows
from flexbwd.sm90.tile import WG_ROWS, WG_THREADS, FwdTile

STORE = 5  # named barriers 5 ... 5 + wgs - 1


@dataclass(frozen=True)
class Epilogue:
    tile: FwdTile
    pv_mma: cute.TiledMma
    operands: Operand4
    pipes: Pipes
    memory: Any
    o_layout: Any
    dtype: Any
    q_len: Int32

    @cute.jit
    def run(
        self,
        acc_O: cute.Tensor,
        softmax: OnlineSoftmax,
        m_block: Int32,
        head: Int32,
        batch: Int32,
        wg: Int32,
        thread: Int32,
    ):
        tile, q_len, mLse = self.tile, self.q_len, self.operands.lse
        lse = cute.make_rmem_tensor((2,), Float32)
        inverse = cute.make_rmem_tensor((2,), Float32)
        softmax.finish(lse, inverse)
        row = m_block * tile.tile_m + wg * WG_ROWS + first_row(thread)
        if thread % 4 == 0:  # one of the quad that shares a row
            for r in cutlass.range_constexpr(2):
                if row + 8 * r < q_len:
                    mLse[batch, head, row + 8 * r] = lse[r]
        rO = rows_and_columns(acc_O, tile.value_dim)
        scale_rows(rO, inverse, tile.value_dim // 4)
        out = cute.make_rmem_tensor(acc_O.layout, self.dtype)
        out.store(acc_O.load().to(self.dtype))

        sO = warpgroup_tile(tile, self.memory.q, self.o_layout, self.dtype, wg)[None, None, 0]
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(store, self.pv_mma).get_slice(thread)
        # Every warp of this warpgroup is past its last wgmma on the Q tile whose place O takes: a warp reads
        # its own 16 rows only, but the swizzled layouts of Q and O differ when D != Dv.
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=WG_THREADS)
        cute.copy(store, copy.retile(out), copy.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")  # stmatrix before the TMA store that reads it
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=WG_THREADS)
        if thread // 32 == 0:
            tma = self.operands.o
            gO = cute.local_tile(tma.tensor[None, None, head, batch], (WG_ROWS, tile.value_dim), (None, 0))
            tOs, tOg = cpasync.tma_partition(
                tma.atom, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
            )
            cute.copy(tma.atom, tOs, tOg[None, m_block * tile.wgs + wg])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(
                0, read=True
            )  # shared memory has been read: the next Q may come, or the CTA may end
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.pipes.q_empty(wg))
