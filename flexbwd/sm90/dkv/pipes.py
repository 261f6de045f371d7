"""What orders the roles of the dK/dV kernel.

    kv full      TMA of K and V before the first S and dP
    Ring q, do   see flexbwd/sm90/pipes.py; each warpgroup that reads a ring frees its buffers

Named barriers (0 is the CTA's own), all of 256 threads:
    P_FULL+s     the value warpgroup has written P into exchange buffer s before the key warpgroup reads it
    P_EMPTY+s    the key warpgroup has read it before the value warpgroup writes the next into s
    EPILOGUE     both warpgroups are done with K and V before dK, dV overwrite them
and of 128 threads:
    STORE+w      warpgroup w has written its gradient before it is sent
"""

from dataclasses import dataclass
from enum import IntEnum

from cutlass import cute

from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.pipes import Ring


class Barrier(IntEnum):
    EPILOGUE = 1
    STORE = 2
    P_FULL = 4
    P_EMPTY = 8


@dataclass(frozen=True)
class Pipes:
    kv: cute.Pointer
    q: Ring
    do: Ring

    @classmethod
    def of(cls, bars: cute.Pointer, config: DkvConfig) -> "Pipes":
        tile = config.tile
        return cls(bars, Ring(bars + 1, tile.q_stages), Ring(bars + 1 + 2 * tile.q_stages, tile.do_stages))

    def init(self, config: DkvConfig) -> None:
        """By one thread."""
        cute.arch.mbarrier_init(self.kv, 2)  # a loader each
        self.q.init(readers=4 + 4 * config.want_dk)  # S, and dK
        self.do.init(readers=4 * config.want_dv + 4 * config.want_dk)  # dV, and dP
