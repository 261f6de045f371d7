"""ScoreTile: what happens to a raw score tile before the softmax: scale, score_mod, and everything that masks.

What is not kept becomes -inf after the score mod, whatever that made of it: NaN or inf there reach nothing.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from flexbwd.sm90.forward.roles import Scales
from flexbwd.sm90.mods import Axis, Limits
from flexbwd.sm90.numerics import column_of


@dataclass(frozen=True)
class Bounds:
    """What masks a tile beside the mods: the end of the keys, and the band's limits, not read where there are none."""

    kv_len: Int32
    lo: Int32
    hi: Int32


@dataclass(frozen=True)
class Place:
    """Where this thread's fragment of a score tile lies: element [r, j] is row + 8*r, col + column_of(j)."""

    rows: Any  # the rows as the mods see them, with values that are the same in all tiles
    col: Int32

    def tile(self, columns: int) -> Any:
        """The fragment as the mods see it. Made anew where it is used: its values belong to that region of the code."""
        return self.rows.tile(Axis(self.col, tuple(column_of(j) for j in range(columns))))


@dataclass(frozen=True)
class ScoreTile:
    config: Any  # FwdConfig
    bounds: Bounds
    scales: Scales
    arguments: Any  # of the mods

    def rows(self, row: Int32, head: Int32, batch: Int32) -> Any:
        """Once per work item; `row` is this thread's first."""
        head_values = self.config.mods.head(self.arguments, batch, head, self.scales.log2)
        return head_values.rows(Axis(row, (0, 8)), "q")

    def apply(self, rS: cute.Tensor, place: Place, masked: bool, partial: Boolean) -> None:
        """Raw scores to what the softmax takes. A tile that is not `masked` is compared with nothing; of the masked
        ones mask_mod sees those that are `partial`."""
        config, columns = self.config, cute.size(rS, mode=[1])
        if config.mods.has_score:
            place.tile(columns).score(rS)
        elif config.prescale:
            for r in range(2):
                for j in range(columns):
                    rS[r, j] = rS[r, j] * self.scales.log2
        if masked:
            if config.mods.has_mask:
                self.mask_partial(rS, place, partial)
            else:
                place.tile(columns).mask(rS, False, self.limits())
        elif config.mods.has_keep:
            place.tile(columns).mask(rS, False)

    @cute.jit
    def mask_partial(self, rS: cute.Tensor, place: Place, partial: Boolean):
        columns = cute.size(rS, mode=[1])
        if partial:
            place.tile(columns).mask(rS, True, self.limits())
        else:
            place.tile(columns).mask(rS, False, self.limits())

    def limits(self) -> Limits:
        walk, bounds = self.config.walk, self.bounds
        return Limits(
            col_end=bounds.kv_len, lo=bounds.lo if walk.has_lo else None, hi=bounds.hi if walk.has_hi else None
        )
