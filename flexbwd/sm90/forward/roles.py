"""What the roles of the forward kernel share: arguments grouped by data role."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.sm90.pipes import Ring
from flexbwd.sm90.schedule import Schedule
from flexbwd.sm90.walk import Walk


@dataclass(frozen=True)
class Tma:
    """A copy atom and the tensor of coordinates it addresses."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class Operand4:
    """Everything in global memory. q (Sq, D, Hq, B), k (Skv, D, Hkv, B), v (Dv, Skv, Hkv, B), o (Sq, Dv, Hq, B),
    lse (B, Hq, Sq)."""

    q: Tma
    k: Tma
    v: Tma
    o: Tma
    lse: cute.Tensor
    group: Int32  # query heads per key head


@dataclass(frozen=True)
class Scales:
    """scale * log2(e), by which raw scores are multiplied inside exp2 (or beforehand, when `prescale`)."""

    log2: Float32


@dataclass(frozen=True)
class Pipes:
    """Rings of the forward kernel; what each orders is said in `flexbwd/sm90/pipes.py`.

    q      one single-buffer ring per warpgroup (q + wg); emptied by its O store having left shared memory
    k, v   emptied by one arrival per MMA warp, after the QK^T / PV wgmma that read them
    """

    q_bars: cute.Pointer
    k: Ring
    v: Ring
    wgs: cutlass.Constexpr[int]

    def q_full(self, wg: Int32) -> cute.Pointer:
        return self.q_bars + wg

    def q_empty(self, wg: Int32) -> cute.Pointer:
        return self.q_bars + self.wgs + wg


@dataclass(frozen=True)
class Plan:
    """What to visit, in which order."""

    schedule: Schedule
    walk: Walk
