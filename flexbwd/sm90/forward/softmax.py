"""OnlineSoftmax: running row maximum and sum over the tiles of a walk.

m' = max(m, rowmax S);  P = exp2(c·S − c·m');  l' = l·exp2(c·(m − m')) + rowsum P;  O' = O·exp2(c·(m − m')) + P V
c = scale·log2 e

Any m' will do that keeps P within range, so m' stays m until the maximum of some row of the warp has grown by more than
SLACK: O is then left alone. P reaches 2^SLACK, which 16-bit floats hold with the same relative error as values below 1.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from flexbwd.sm90.numerics import LN2, exp2, fma, quad_max, quad_sum

SLACK = 8.0  # in powers of two


@dataclass(frozen=True)
class OnlineSoftmax:
    """State of a thread's two rows, in registers. The sums are of this thread's columns until `finish`."""

    row_max: cute.Tensor  # fp32 [2], m in units of the scores
    row_sum: cute.Tensor  # fp32 [2]
    factor: Float32  # c, or 1 when scores come scaled
    exact: cutlass.Constexpr[bool]  # m is the maximum itself: no slack

    def first(self, rS: cute.Tensor) -> None:
        """The first tile of a walk: S becomes P in place (fp32)."""
        for r in range(2):
            self.row_max[r] = self.peak(rS, r)
            self.row_sum[r] = self.exponentiate(rS, r, True)

    @cute.jit
    def step(self, rS: cute.Tensor, rescale: cute.Tensor, dead: cutlass.Constexpr[bool]) -> Boolean:
        """A later tile: S becomes P in place. Returns whether O is to be multiplied with `rescale` [2], the same in all
        threads of a warp. `dead`: there may be rows that have kept nothing so far."""
        tops = [cute.arch.fmax(self.peak(rS, r), self.row_max[r]) for r in range(2)]
        grown = Boolean(True)
        if cutlass.const_expr(not self.exact):
            growth = cute.arch.fmax(tops[0] - self.row_max[0], tops[1] - self.row_max[1])  # from -inf: inf
            grown = cute.arch.vote_any_sync(growth * self.factor > SLACK)
        for r in cutlass.range_constexpr(2):
            before = self.row_max[r]
            self.row_max[r] = cutlass.select_(grown, tops[r], before)
            rescale[r] = exp2(before * self.factor - self.offset(r, dead))
            self.row_sum[r] = self.row_sum[r] * rescale[r] + self.exponentiate(rS, r, dead)
        return grown

    def peak(self, rS: cute.Tensor, r: int) -> Float32:
        """Maximum of a row of the tile; NaN is ignored. Four chains: the latency of one chain of FMNMX would show."""
        peak = [rS[r, j] for j in range(4)]
        for j in range(4, cute.size(rS, mode=[1])):
            peak[j % 4] = cute.arch.fmax(peak[j % 4], rS[r, j])
        return quad_max(cute.arch.fmax(cute.arch.fmax(peak[0], peak[1]), cute.arch.fmax(peak[2], peak[3])))

    def offset(self, r: int, dead: bool) -> Float32:
        """c·m; 0 for a row that has kept nothing so far, as any finite offset gives P = 0."""
        top = self.row_max[r]
        if dead:
            top = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
        return top * self.factor

    def exponentiate(self, rS: cute.Tensor, r: int, dead: bool) -> Float32:
        """P of a row in place, and its sum."""
        offset = self.offset(r, dead)
        sums = []
        for j in range(cute.size(rS, mode=[1])):
            rS[r, j] = exp2(rS[r, j] * self.factor - offset)
            if j < 4:
                sums.append(rS[r, j])
            else:
                sums[j % 4] = sums[j % 4] + rS[r, j]
        return (sums[0] + sums[1]) + (sums[2] + sums[3])

    @cute.jit
    def finish(self, lse: cute.Tensor, inverse: cute.Tensor, top: cute.Tensor):
        """lse [2] and top [2] (the row maximum, if `exact`), both in natural units, and inverse [2] = 1 / sum; a dead
        row gets -inf and 0, a row with NaN gets NaN."""
        for r in cutlass.range_constexpr(2):
            total = quad_sum(self.row_sum[r])
            lse[r] = fma(self.row_max[r], self.factor, cute.math.log2(total, fastmath=True)) * LN2
            inverse[r] = cute.arch.rcp_approx(total)
            top[r] = self.row_max[r] * self.factor * LN2
            if total == 0.0:  # also where factor would turn -inf to NaN
                lse[r] = -Float32.inf
                inverse[r] = Float32(0.0)
                top[r] = -Float32.inf
