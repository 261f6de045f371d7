"""MmaWarpgroups: the walk of the warpgroups that do the maths; step.py has the maths.

What to do is read from the records that the loader puts beside the query tiles: no list is read here.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.sm90.backward.capture_grads import CaptureGrads
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.epilogue import Epilogue
from flexbwd.sm90.backward.operands import Work
from flexbwd.sm90.backward.pipes import Pipes
from flexbwd.sm90.backward.products import Accumulators, Products, Share
from flexbwd.sm90.backward.step import EDGE, FULL, PARTIAL, Lane, Step
from flexbwd.sm90.backward.storage import Smem
from flexbwd.sm90.backward.tile import WG_THREADS
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.mods import Axis
from flexbwd.sm90.numerics import first_row


@dataclass(frozen=True)
class MmaWarpgroups:
    config: BwdConfig
    smem: Smem
    pipes: Pipes
    walk: BwdWalk
    epilogue: Epilogue
    scale_log2: Float32
    mod_arguments: tuple
    capture_targets: tuple

    @cute.jit
    def run(self, work: Work, wg: Int32, thread: Int32):
        """`thread` counts within both warpgroups."""
        tile, smem = self.config.tile, self.smem
        products = Products.of(tile, smem, wg)
        acc = Accumulators.of(products, tile)
        kv = work.n_block * tile.tile_n + first_row(thread % WG_THREADS)
        if cutlass.const_expr(tile.by_keys):
            kv += wg * 64
        share = Share.of(products, smem, thread)
        lane = Lane(wg, thread, kv)
        captures = CaptureGrads.of(self.config, self.capture_targets, thread)
        step = Step(
            self.config,
            smem,
            self.pipes,
            self.walk,
            products,
            share,
            acc,
            lane,
            self.scale_log2,
            captures,
        )
        cute.arch.mbarrier_wait(self.pipes.kv, 0)
        tick = Int32(0)
        m_block = step.await_query(tick)
        if cutlass.const_expr(self.config.grouped):
            while m_block >= 0:
                tick, m_block = self.head(step, work, tick, m_block)
        else:
            tick, m_block = self.head(step, work, tick, m_block)
        step.finish()
        self.epilogue.run(work, products, acc, thread)

    @cute.jit
    def head(self, step: Step, work: Work, tick: Int32, m_block: Int32):
        """All tiles of one query head, one loop per kind."""
        tile, walk = self.config.tile, self.walk
        record = self.smem.record[None, self.pipes.q.buffer(tick)]
        row, partial, kept = (cute.arch.make_warp_uniform(record[i]) for i in (1, 2, 3))
        if cutlass.const_expr(self.config.mods.graph is not None):
            head = row - work.batch * work.q_heads
            mods = self.config.mods.head(self.mod_arguments, work.batch, head, self.scale_log2)
            step = replace(step, mods=mods.rows(Axis(step.lane.kv, (0, 8)), "kv"))
        if cutlass.const_expr(step.captures is not None):
            step.captures.start()
        if cutlass.const_expr(walk.kind.lists or walk.kind.band):
            for _ in cutlass.range(partial, unroll=1):
                m_block = step.run(m_block, row, tick, PARTIAL)
                tick += 1
        if (work.n_block + 1) * tile.tile_n > walk.kv_len:
            for _ in cutlass.range(kept, unroll=1):
                m_block = step.run(m_block, row, tick, EDGE)
                tick += 1
        else:
            for _ in cutlass.range(kept, unroll=1):
                m_block = step.run(m_block, row, tick, FULL)
                tick += 1
        if cutlass.const_expr(step.captures is not None):
            step.captures.finish(step.mods)
        return tick, m_block
