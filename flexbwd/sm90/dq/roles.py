"""What the roles of the dQ kernel share: arguments grouped by data role."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.pipes import Ring


@dataclass(frozen=True)
class Matrix:
    """A matrix per head, moved by TMA in tiles."""

    atom: cute.CopyAtom
    m: cute.Tensor  # (rows, columns, heads, batch)


@dataclass(frozen=True)
class Operands:
    """Everything in global memory."""

    q: Matrix
    do: Matrix
    k: Matrix
    v: Matrix
    dq: Matrix
    lse: cute.Tensor  # [B*Hq, padded Sq] fp32, log2 domain; +inf on dead rows
    delta: cute.Tensor  # [B*Hq, padded Sq] fp32
    group: Int32  # query heads per key head


@dataclass(frozen=True)
class Scales:
    score_log2: Float32  # scale * log2(e)
    dq: Float32  # scale


@dataclass(frozen=True)
class Pipes:
    """Barriers of the dQ kernel.

    q full[wg]    TMA of the warpgroup's Q before its first S
    q empty[wg]   the warpgroup's dQ has left Q's place, and its last dP has retired, before the next item's Q and dO
    do full[wg]   TMA of the warpgroup's dO before its first dP
    k, v          see flexbwd/sm90/pipes.py; one arrival per MMA warp, after dQ (k) or dP (v) have retired.
                  The number of the key tile rides on k.
    """

    bars: cute.Pointer
    k: Ring
    v: Ring
    wgs: cutlass.Constexpr[int]

    @classmethod
    def of(cls, bars: cute.Pointer, tile: DqTile) -> "Pipes":
        rings = bars + 3 * tile.wgs
        return cls(bars, Ring(rings, tile.k_stages), Ring(rings + 2 * tile.k_stages, tile.v_stages), tile.wgs)

    def init(self) -> None:
        """By one thread."""
        for i in range(3 * self.wgs):
            cute.arch.mbarrier_init(self.bars + i, 1)
        self.k.init(4 * self.wgs)
        self.v.init(4 * self.wgs)

    def q_full(self, wg: Int32) -> cute.Pointer:
        return self.bars + wg

    def q_empty(self, wg: Int32) -> cute.Pointer:
        return self.bars + self.wgs + wg

    def do_full(self, wg: Int32) -> cute.Pointer:
        return self.bars + 2 * self.wgs + wg
