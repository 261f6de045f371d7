"""What orders the roles of the dK/dV kernel.

    kv full      TMA of K and V before the first S and dP
    Ring q, do   see flexbwd/sm90/pipes.py; each warpgroup that reads a ring frees its buffers, in every CTA of the
                 cluster: a loader fills a buffer of all CTAs when the readers of all are done with it
    cluster      barriers are initialised before another CTA arrives at them; no CTA ends before the others' last
                 arrivals and copies

Named barriers (0 is the CTA's own), all of 256 threads:
    P_FULL+s     the value warpgroup has written P into exchange buffer s before the key warpgroup reads it
    P_EMPTY+s    the key warpgroup has read it before the value warpgroup writes the next into s
    EPILOGUE     both warpgroups are done with K and V before dK, dV overwrite them
and of 128 threads:
    STORE+w      warpgroup w has written its gradient before it is sent
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
from cutlass import Int32, cute

from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.pipes import Ring


class Barrier(IntEnum):
    EPILOGUE = 1
    STORE = 2
    P_FULL = 4
    P_EMPTY = 8


@dataclass(frozen=True)
class ClusterRing(Ring):
    """A ring whose buffers are filled by all CTAs of a cluster together."""

    cluster: cutlass.Constexpr[int]

    def release(self, tick: Int32) -> None:
        """Reader, each warp: the tick-th fill is no longer needed here."""
        if self.cluster == 1:
            super().release(tick)
        else:
            with cute.arch.elect_one():
                for rank in range(self.cluster):
                    cute.arch.mbarrier_arrive(self.empty(tick), rank)


@dataclass(frozen=True)
class Pipes:
    kv: cute.Pointer
    q: ClusterRing
    do: ClusterRing

    @classmethod
    def of(cls, bars: cute.Pointer, config: DkvConfig) -> "Pipes":
        tile = config.tile
        q = ClusterRing(bars + 1, tile.q_stages, tile.cluster)
        return cls(bars, q, ClusterRing(bars + 1 + 2 * tile.q_stages, tile.do_stages, tile.cluster))

    def init(self, config: DkvConfig) -> None:
        """By one thread."""
        ctas = config.tile.cluster
        cute.arch.mbarrier_init(self.kv, 2)  # a loader each
        self.q.init(readers=ctas * (4 + 4 * config.want_dk))  # S, and dK
        self.do.init(readers=ctas * (4 * config.want_dv + 4 * config.want_dk))  # dV, and dP
