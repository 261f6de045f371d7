"""DqWriter: one warp per MMA warpgroup that adds the warpgroup's dQ to the fp32 accumulator by bulk reduction.

The accumulator has no rows and columns: a warpgroup's share lies in fragment order [column group of 8][thread][4],
where a thread's four are (row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1). Stores to
shared memory are 16 bytes a thread without bank conflicts, and one bulk copy moves the share. convert.py undoes the
order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.operands import Work
from flexbwd.sm90.backward.pipes import DQ_THREADS, Barrier
from flexbwd.sm90.backward.walk import BwdWalk


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
    sdQ: cute.Tensor  # (floats, warpgroups)
    walk: BwdWalk

    @cute.jit
    def run(self, work: Work, wg: Int32):
        """Serve warpgroup `wg` through the whole walk."""
        m_begin, _, m_end = self.walk.runs(work.n_block)
        if cutlass.const_expr(self.config.grouped):
            for g in cutlass.range(work.group, unroll=1):
                self.head(work, work.q_head + g, m_begin, m_end, wg)
        else:
            self.head(work, work.q_head, m_begin, m_end, wg)
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def head(self, work: Work, head: Int32, m_begin: Int32, m_end: Int32, wg: Int32):
        size_bytes = 4 * self.config.tile.dq_wg_floats
        blocks = (self.walk.q_len + (self.walk.tile_m - 1)) // self.walk.tile_m
        first = (work.batch * work.q_heads + head) * blocks
        for m in cutlass.range(m_begin, m_end, unroll=1):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the share sent last has been read out
            cute.arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + wg, number_of_threads=DQ_THREADS)
            cute.arch.barrier(barrier_id=Barrier.DQ_FULL + wg, number_of_threads=DQ_THREADS)
            with cute.arch.elect_one():
                target = self.dq_acc[first + m, wg, None]
                bulk_reduce_add_f32(self.sdQ[None, wg].iterator, target.iterator, size_bytes)
            cute.arch.cp_async_bulk_commit_group()
