"""Loader: one warp that feeds Q, K and V to shared memory by TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.sm90.forward.roles import Operand4, Pipes, Plan
from flexbwd.sm90.forward.storage import warpgroup_tile
from flexbwd.sm90.tile import WG_ROWS, FwdTile


@dataclass(frozen=True)
class Loader:
    """For each work item, in the order of the walk: K, then Q of each warpgroup, then V, K, V, K, ..., V."""

    tile: FwdTile
    operands: Operand4
    pipes: Pipes
    plan: Plan
    memory: Any  # the Storage struct
    sK: cute.Tensor
    sV: cute.Tensor
    q_layout: Any
    dtype: Any

    @cute.jit
    def run(self):
        tile, op, pipes, walk, schedule = self.tile, self.operands, self.pipes, self.plan.walk, self.plan.schedule
        k_bytes = tile.tile_n * tile.dim * 2
        v_bytes = tile.tile_n * tile.value_dim * 2
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        items = schedule.items()
        tick = Int32(0)  # K tiles (and V tiles) issued so far
        turn = Int32(0)  # work items so far
        while index < items:
            m_block, head, batch = schedule.item(index)
            kv_head = head // op.group
            gK = cute.local_tile(op.k.tensor[None, None, kv_head, batch], (tile.tile_n, tile.dim), (None, 0))
            gV = cute.local_tile(op.v.tensor[None, None, kv_head, batch], (tile.value_dim, tile.tile_n), (0, None))
            gQ = cute.local_tile(op.q.tensor[None, None, head, batch], (WG_ROWS, tile.dim), (None, 0))
            tKs, tKg = self.partition(op.k.atom, self.sK, gK)
            tVs, tVg = self.partition(op.v.atom, self.sV, gV)
            _, n_end = walk.ends(m_block)
            if n_end > 0:
                pipes.k.acquire(tick, k_bytes)
                cute.copy(
                    op.k.atom, tKg[None, n_end - 1], tKs[None, pipes.k.buffer(tick)], tma_bar_ptr=pipes.k.full(tick)
                )
            for wg in cutlass.range_constexpr(tile.wgs):
                # the warpgroup's O of the item before has left the place that Q takes
                cute.arch.mbarrier_wait(pipes.q_empty(wg), (turn & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(pipes.q_full(wg), WG_ROWS * tile.dim * 2)
                sQ = warpgroup_tile(tile, self.memory.q, self.q_layout, self.dtype, wg)
                tQs, tQg = self.partition(op.q.atom, sQ, gQ)
                cute.copy(op.q.atom, tQg[None, m_block * tile.wgs + wg], tQs[None, 0], tma_bar_ptr=pipes.q_full(wg))
            for i in cutlass.range(1, n_end, unroll=1):
                n = n_end - 1 - i
                pipes.k.acquire(tick + i, k_bytes)
                cute.copy(
                    op.k.atom, tKg[None, n], tKs[None, pipes.k.buffer(tick + i)], tma_bar_ptr=pipes.k.full(tick + i)
                )
                j = tick + i - 1
                pipes.v.acquire(j, v_bytes)
                cute.copy(op.v.atom, tVg[None, n + 1], tVs[None, pipes.v.buffer(j)], tma_bar_ptr=pipes.v.full(j))
            if n_end > 0:
                last = tick + n_end - 1
                pipes.v.acquire(last, v_bytes)
                cute.copy(op.v.atom, tVg[None, 0], tVs[None, pipes.v.buffer(last)], tma_bar_ptr=pipes.v.full(last))
            tick = tick + cutlass.max(n_end, 0)
            turn = turn + 1
            index = index + step

    def partition(self, atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> Any:
        """Shared tile (copy, buffer) and global tiles (copy, tile)."""
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
        )
