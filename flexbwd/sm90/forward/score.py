"""ScoreTile: what happens to a raw score tile before the softmax. Score and mask mods will be called here, on the
same fragment."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.sm90.forward.roles import Scales
from flexbwd.sm90.numerics import column_of
from flexbwd.sm90.walk import Walk


@dataclass(frozen=True)
class Place:
    """Where this thread's fragment of a score tile lies: element [r, j] is row + 8*r, col + column_of(j)."""

    row: Int32
    col: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class ScoreTile:
    walk: Walk
    scales: Scales
    prescale: cutlass.Constexpr[bool]

    @cute.jit
    def apply(self, rS: cute.Tensor, place: Place, edge: cutlass.Constexpr[bool]):
        """Scale (only if `prescale`), and on an edge tile set what is not kept to -inf. A full tile is compared
        with nothing."""
        if cutlass.const_expr(self.prescale):
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(cute.size(rS, mode=[1])):
                    rS[r, j] = rS[r, j] * self.scales.log2
        if cutlass.const_expr(edge):
            for r in cutlass.range_constexpr(2):
                kept = self.walk.kv_len - place.col  # columns from place.col on that exist
                if cutlass.const_expr(self.walk.causal):
                    kept = cutlass.min(kept, place.row + (8 * r + 1) - place.col)
                for j in cutlass.range_constexpr(cute.size(rS, mode=[1])):
                    # a select of one value: an `if` around the store would carry the whole fragment through each branch
                    rS[r, j] = cutlass.select_(kept > column_of(j), rS[r, j], -Float32.inf)
