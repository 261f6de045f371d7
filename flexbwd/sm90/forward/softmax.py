"""OnlineSoftmax: running row maximum and sum over the tiles of a walk.

m' = max(m, rowmax S);  P = exp2(c·S − c·m');  l' = l·exp2(c·(m − m')) + rowsum P;  O' = O·exp2(c·(m − m')) + P V
c = scale·log2 e
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from flexbwd.sm90.numerics import LN2, exp2, quad_max, quad_sum


@dataclass(frozen=True)
class OnlineSoftmax:
    """State of a thread's two rows, in registers. The sums are of this thread's columns until `finish`."""

    row_max: cute.Tensor  # fp32 [2], in units of the scores
    row_sum: cute.Tensor  # fp32 [2]
    factor: Float32  # c, or 1 when scores come scaled

    @cute.jit
    def step(
        self, rS: cute.Tensor, rescale: cute.Tensor, edge: cutlass.Constexpr[bool], first: cutlass.Constexpr[bool]
    ):
        """S becomes P in place (fp32); `rescale` [2] is what O is to be multiplied with (not written when `first`)."""
        columns = cute.size(rS, mode=[1])
        for r in cutlass.range_constexpr(2):
            before = self.row_max[r]
            # four chains: the latency of one chain of FMNMX would show
            peak = [rS[r, j] for j in range(4)]
            for j in cutlass.range_constexpr(4, columns):
                peak[j % 4] = cute.arch.fmax(peak[j % 4], rS[r, j])
            top = quad_max(cute.arch.fmax(cute.arch.fmax(peak[0], peak[1]), cute.arch.fmax(peak[2], peak[3])))
            if cutlass.const_expr(not first):
                top = cute.arch.fmax(top, before)
            self.row_max[r] = top
            if cutlass.const_expr(edge):  # noqa: SIM102  (static outside, dynamic inside)
                if top == -Float32.inf:  # a row that has kept nothing yet: any finite offset gives P = 0
                    top = Float32(0.0)
            offset = top * self.factor
            if cutlass.const_expr(not first):
                rescale[r] = exp2(before * self.factor - offset)
                self.row_sum[r] = self.row_sum[r] * rescale[r]
            sums = [Float32(0.0) for _ in range(4)]
            for j in cutlass.range_constexpr(columns):
                rS[r, j] = exp2(rS[r, j] * self.factor - offset)
                sums[j % 4] = sums[j % 4] + rS[r, j] if j >= 4 else rS[r, j]
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            self.row_sum[r] = total if cutlass.const_expr(first) else self.row_sum[r] + total

    @cute.jit
    def finish(self, lse: cute.Tensor, inverse: cute.Tensor):
        """lse [2], natural log, and inverse [2] = 1 / sum; a dead row gets -inf and 0."""
        for r in cutlass.range_constexpr(2):
            total = quad_sum(self.row_sum[r])
            lse[r] = -Float32.inf
            inverse[r] = Float32(0.0)
            if total > 0.0:
                lse[r] = (self.row_max[r] * self.factor + cute.math.log2(total, fastmath=True)) * LN2
                inverse[r] = cute.arch.rcp_approx(total)
