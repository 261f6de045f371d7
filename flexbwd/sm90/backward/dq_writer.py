"""DqWriter: one warp per MMA warpgroup that adds the warpgroup's dQ to the fp32 accumulator by bulk reduction.

The accumulator has no rows and columns: a warpgroup's share lies in fragment order [column group of 8][thread][4],
where a thread's four are (row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1). Stores to
shared memory are 16 bytes a thread without bank conflicts, and one bulk copy moves the share. convert.py undoes the
order.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.pipes import DQ_END, DQ_THREADS, Barrier
from flexbwd.sm90.backward.storage import Smem


def bulk_reduce_add_f32(smem: cute.Pointer, gmem: cute.Pointer, size_bytes: int) -> None:
    """gmem[:] += smem[:], asynchronous, in the caller's bulk group; one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[gmem.toint(), smem.toint(), Int32(size_bytes)],
    )


@dataclass(frozen=True)
class DqWriter:
    config: BwdConfig
    dq_acc: cute.Tensor  # [B*Hq*m_blocks, warpgroups, floats]
    smem: Smem

    @cute.jit
    def run(self, wg: Int32):
        """Serve warpgroup `wg` until it says that there is no more."""
        size_bytes = 4 * self.config.tile.dq_wg_floats
        dq_acc, sdQ = self.dq_acc, self.smem.dq[None, wg]
        target = Int32(0)
        while target != DQ_END:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the share sent last has been read out
            cute.arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=DQ_THREADS)
            cute.arch.barrier(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=DQ_THREADS)
            target = cute.arch.make_warp_uniform(self.smem.dq_target[wg])
            if target >= 0:
                with cute.arch.elect_one():
                    bulk_reduce_add_f32(sdQ.iterator, dq_acc[target, wg, None].iterator, size_bytes)
                cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=False)
