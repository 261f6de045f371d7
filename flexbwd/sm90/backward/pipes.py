"""What orders the roles of the backward kernel.

    kv full      TMA of K and V before the first S, and before dK, dV overwrite them
    Ring q, do   see flexbwd.sm90.pipes; 8 MMA warps empty a buffer. q's full[s] also orders the loader's record of the
                 tile before the MMA warps read it

Named barriers (0 is the CTA's own):
    DS           256: dS (and P) of both warpgroups written before either reads them for dQ (dK, dV); with one buffer
                 also: both have finished reading before it is written again
    DQ_FULL+w    160: warpgroup w has written its dQ and the target before its writer warp sends it
    DQ_EMPTY+w   160: the writer warp has read both before warpgroup w writes the next
    EPILOGUE     256: both warpgroups are done with K and V before dK, dV overwrite them; then dK, dV are written before
                 they are sent
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass.cute as cute

from flexbwd.sm90.backward.tile import MMA_THREADS, WG_THREADS, BwdTile
from flexbwd.sm90.pipes import Ring

DQ_THREADS = WG_THREADS + 32
DQ_END = -1  # in place of a tile of the accumulator: no more comes
_MMA_WARPS = MMA_THREADS // 32


class Barrier(IntEnum):
    DS = 1
    DQ_FULL = 2
    DQ_EMPTY = 4
    EPILOGUE = 6


@dataclass(frozen=True)
class Pipes:
    kv: cute.Pointer
    q: Ring
    do: Ring

    @classmethod
    def of(cls, bars: cute.Pointer, tile: BwdTile) -> "Pipes":
        return cls(bars, Ring(bars + 1, tile.q_stages), Ring(bars + 1 + 2 * tile.q_stages, tile.do_stages))

    def init(self) -> None:
        """By one thread."""
        cute.arch.mbarrier_init(self.kv, 1)
        self.q.init(readers=_MMA_WARPS)
        self.do.init(readers=_MMA_WARPS)
