"""Weights: what happens between S, dP and dS."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flexbwd.modgraph.modplan import JClass
from flexbwd.sm90.dq.roles import Operands, Scales
from flexbwd.sm90.dq.walk import DqWalk
from flexbwd.sm90.mods import Axis, ModConfig
from flexbwd.sm90.numerics import column_of, exp2

FULL, EDGE, PARTIAL = "full", "edge", "partial"


@dataclass(frozen=True)
class RowStats:
    """LSE (log2 domain) and delta of this thread's two rows."""

    lse: cute.Tensor
    delta: cute.Tensor

    @cute.jit
    def load(self, op: Operands, row_of_heads: Int32, row: Int32, q_len: Int32):
        """Rows beyond the queries get P = 0."""
        for r in cutlass.range_constexpr(2):
            self.lse[r] = Float32.inf
            self.delta[r] = Float32(0.0)
            if row + 8 * r < q_len:
                self.lse[r] = op.lse[row_of_heads, row + 8 * r]
                self.delta[r] = op.delta[row_of_heads, row + 8 * r]


@dataclass(frozen=True)
class Place:
    """Where this thread's fragment of a score tile lies: element [r, j] is row + 8*r, col + column_of(j)."""

    row: Int32
    col: Int32


@dataclass(frozen=True)
class Weights:
    """The arithmetic of one element; mods are evaluated on the same fragments."""

    walk: DqWalk
    scales: Scales
    mods: cutlass.Constexpr[ModConfig]
    tile_n: cutlass.Constexpr[int]

    def rows(self, arguments: tuple, batch: Int32, head: Int32, row: Int32) -> Any:
        """Mods of one work item, before its tiles."""
        return self.mods.head(arguments, batch, head, self.scales.score_log2).rows(Axis(row, (0, 8)), "q")

    def tile(self, rows: Any, col: Int32) -> Any:
        """Mods of one tile."""
        return rows.tile(Axis(col, tuple(column_of(j) for j in range(self.tile_n // 4))))

    def factor(self, dtype: Any) -> cute.Tensor | None:
        """Where ds'/ds is kept between the scores and dS, if it depends on the score: 16 bits an element."""
        if self.mods.j_class is not JClass.NONLINEAR:
            return None
        return cute.make_rmem_tensor(cute.make_layout((2, self.tile_n // 4)), dtype)

    @cute.jit
    def exponentiate(
        self,
        rS: cute.Tensor,
        factor: Any,
        stats: RowStats,
        place: Place,
        tile: Any,
        kind: cutlass.Constexpr[str],
    ):
        """S becomes P = exp2(s' − lse), in place; 0 where not kept."""
        if cutlass.const_expr(self.mods.has_score):
            tile.score_and_factor(rS, factor)
        scale = 1.0 if self.mods.has_score else self.scales.score_log2
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(cute.size(rS, mode=[1])):
                rS[r, j] = rS[r, j] * scale - stats.lse[r]
        if cutlass.const_expr(self.mods.has_keep or (self.mods.has_mask and kind == PARTIAL)):
            tile.mask(rS, kind == PARTIAL)
        for r in cutlass.range_constexpr(2):
            self.limit(rS, r, place, kind)
            for j in cutlass.range_constexpr(cute.size(rS, mode=[1])):
                rS[r, j] = exp2(rS[r, j])

    def limit(self, rS: cute.Tensor, r: int, place: Place, kind: str) -> None:
        """-inf beyond the keys, and on partial tiles outside the band; one compare an element and side."""
        if kind == FULL:
            return
        walk = self.walk
        band = walk.kind if kind == PARTIAL else None
        past = walk.kv_len - place.col  # first column, from place.col on, that does not exist
        if band is not None and band.has_lo:
            past = cutlass.min(past, place.row + (8 * r + 1) - walk.detail[1] - place.col)
        for j in range(cute.size(rS, mode=[1])):
            kept = past > column_of(j)
            if band is not None and band.has_hi:
                kept = kept & (place.row + 8 * r - walk.detail[2] - place.col <= column_of(j))
            # a select of one value: an `if` around the store would carry the whole fragment through each branch
            rS[r, j] = cutlass.select_(Boolean(kept), rS[r, j], -Float32.inf)

    @cute.jit
    def through_softmax(self, rP: cute.Tensor, rdP: cute.Tensor, factor: Any, stats: RowStats, tile: Any):
        """dP becomes dS = P ∘ (dP − delta) ∘ ds'/ds, in place."""
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(cute.size(rdP, mode=[1])):
                rdP[r, j] = rP[r, j] * (rdP[r, j] - stats.delta[r])
        if cutlass.const_expr(self.mods.j_class is not JClass.ONE):
            tile.times_factor(rdP, factor)
