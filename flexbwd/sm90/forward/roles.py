"""What the roles of the forward kernel share: arguments grouped by data role."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.sm90.pipes import Ring

WORK = 8  # Int32 per warpgroup: row, head, batch, n_partial, n_edge, n_full, and two for alignment


@dataclass(frozen=True)
class Tma:
    """A copy atom and the tensor of coordinates it addresses."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """q (Sq, D, Hq, B), k (Skv, D, Hkv, B), v (Dv, Skv, Hkv, B)."""

    q: Tma
    k: Tma
    v: Tma
    group: Int32  # query heads per key head


@dataclass(frozen=True)
class Outputs:
    """out (B, Hq, Sq, Dv) 16-bit, lse (B, Hq, Sq) fp32, top (B, Hq, Sq) fp32: row maxima, or None."""

    out: cute.Tensor
    lse: cute.Tensor
    top: Any


@dataclass(frozen=True)
class Scales:
    """scale * log2(e), by which raw scores are multiplied inside exp2 (or beforehand, when `prescale`)."""

    log2: Float32


@dataclass(frozen=True)
class Plan:
    """What to visit (`walk`), in which order (`schedule`), and who takes the next item (`tickets`)."""

    schedule: Any
    walk: Any
    tickets: Any


@dataclass(frozen=True)
class Pipes:
    """Rings of the forward kernel; what each orders is said in `flexbwd/sm90/pipes.py`.

    q      one single-buffer ring per warpgroup (q + wg) with the work item that goes with it; emptied by one arrival
           per warp, after the last QK^T of an item
    k, v   emptied by one arrival per MMA warp, after the QK^T / PV wgmma that read them; the number of a key tile
           comes with its K
    """

    q_bars: cute.Pointer
    k: Ring
    v: Ring
    wgs: cutlass.Constexpr[int]
    tiles: cute.Tensor  # int32 [stages]: key tile in each K buffer
    work: cute.Tensor  # int32 [wgs * WORK]

    def q_full(self, wg: Int32) -> cute.Pointer:
        return self.q_bars + wg

    def q_empty(self, wg: Int32) -> cute.Pointer:
        return self.q_bars + self.wgs + wg

    def release_q(self, wg: Int32) -> None:
        """MMA, each warp: neither Q nor the work item is needed any more."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.q_empty(wg))
