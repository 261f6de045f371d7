"""Loader: one warp that draws work items, reads their walk, and feeds Q, K and V to shared memory by TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from flexbwd.sm90.forward.roles import WORK, Inputs, Pipes, Plan
from flexbwd.sm90.forward.storage import warpgroup_tile
from flexbwd.sm90.tile import WG_ROWS, FwdTile


@dataclass(frozen=True)
class Loader:
    """For each work item, in the order of the walk: K, then Q of each warpgroup, then K, V, K, V, ..., V.

    It alone knows schedule and walk. What the others need travels with the copies: a work item with Q, the number of a
    key tile with K. An item without tiles brings no Q; row -1 says that there are no more items.
    """

    tile: FwdTile
    inputs: Inputs
    pipes: Pipes
    plan: Plan
    memory: Any  # the Storage struct
    sK: cute.Tensor
    sV: cute.Tensor
    q_layout: Any
    dtype: Any

    @cute.jit
    def run(self):
        tile, op, pipes, plan = self.tile, self.inputs, self.pipes, self.plan
        k_bytes = tile.tile_n * tile.dim * 2
        v_bytes = tile.tile_n * tile.value_dim * 2
        items = plan.schedule.items()
        tick = Int32(0)  # K tiles (and V tiles) issued so far
        turn = Int32(0)  # work items so far
        index, _, _ = cute.arch.block_idx()
        while index < items:
            row, head, batch = plan.schedule.item(index)
            kv_head = head // op.group
            gK = cute.local_tile(op.k.tensor[None, None, kv_head, batch], (tile.tile_n, tile.dim), (None, 0))
            gV = cute.local_tile(op.v.tensor[None, None, kv_head, batch], (tile.value_dim, tile.tile_n), (0, None))
            tKs, tKg = self.partition(op.k.atom, self.sK, gK)
            tVs, tVg = self.partition(op.v.atom, self.sV, gV)
            partial, edge, full = plan.walk.runs(row, head, batch)
            total = partial + edge + full
            n = Int32(0)
            if total > 0:
                n = plan.walk.tile(row, head, batch, Int32(0))
                pipes.k.acquire_with(tick, k_bytes, pipes.tiles, n)
                cute.copy(op.k.atom, tKg[None, n], tKs[None, pipes.k.buffer(tick)], tma_bar_ptr=pipes.k.full(tick))
            self.hand_out(turn, (row, head, batch, partial, edge, full), total)
            for i in cutlass.range(1, total, unroll=1):
                before = n
                n = plan.walk.tile(row, head, batch, i)
                at = tick + i
                pipes.k.acquire_with(at, k_bytes, pipes.tiles, n)
                cute.copy(op.k.atom, tKg[None, n], tKs[None, pipes.k.buffer(at)], tma_bar_ptr=pipes.k.full(at))
                self.load_v(at - 1, v_bytes, tVg, tVs, before)
            tick = tick + total
            if total > 0:
                self.load_v(tick - 1, v_bytes, tVg, tVs, n)
            turn = turn + 1
            index = plan.tickets.draw()
        self.hand_out(turn, (Int32(-1), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)), Int32(0))
        plan.tickets.put_back(index)

    @cute.jit
    def load_v(self, tick: Int32, v_bytes: cutlass.Constexpr[int], tVg: cute.Tensor, tVs: cute.Tensor, n: Int32):
        v = self.pipes.v
        v.acquire(tick, v_bytes)
        cute.copy(self.inputs.v.atom, tVg[None, n], tVs[None, v.buffer(tick)], tma_bar_ptr=v.full(tick))

    @cute.jit
    def hand_out(self, turn: Int32, work: tuple, total: Int32):
        """A work item to each warpgroup, with its Q if it has tiles: once the warpgroup has read the item before, and
        its last QK^T is done."""
        tile, op, pipes = self.tile, self.inputs, self.pipes
        row, head, batch = work[:3]
        for wg in cutlass.range_constexpr(tile.wgs):
            cute.arch.mbarrier_wait(pipes.q_empty(wg), (turn & 1) ^ 1)
            with cute.arch.elect_one():
                for field, value in enumerate(work):
                    pipes.work[wg * WORK + field] = value
                if total > 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(pipes.q_full(wg), WG_ROWS * tile.dim * 2)
                else:
                    cute.arch.mbarrier_arrive(pipes.q_full(wg))
            if total > 0:
                gQ = cute.local_tile(op.q.tensor[None, None, head, batch], (WG_ROWS, tile.dim), (None, 0))
                sQ = warpgroup_tile(tile, self.memory.q, self.q_layout, self.dtype, wg)
                tQs, tQg = self.partition(op.q.atom, sQ, gQ)
                cute.copy(op.q.atom, tQg[None, row * tile.wgs + wg], tQs[None, 0], tma_bar_ptr=pipes.q_full(wg))

    def partition(self, atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> Any:
        """Shared tile (copy, buffer) and global tiles (copy, tile)."""
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
        )
