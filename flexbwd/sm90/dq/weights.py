"""Weights: what happens between S, dP and dS, on fragments with queries as rows."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.modgraph.modplan import JClass
from flexbwd.sm90.dq.roles import Operands, Scales
from flexbwd.sm90.dq.walk import DqWalk
from flexbwd.sm90.fragments import groups
from flexbwd.sm90.mods import Axis, ModConfig
from flexbwd.sm90.numerics import column_of, exp2
from flexbwd.sm90.walks import WalkKind

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
    mods: Any  # mod_tile.Rows: queries are rows


@dataclass(frozen=True)
class Weights:
    """The arithmetic of an element. Fragments are gone through in groups of columns, so that what a mod computes on the
    way lives shortly."""

    walk: DqWalk
    scales: Scales
    mods: cutlass.Constexpr[ModConfig]

    def rows(self, arguments: tuple, batch: Int32, head: Int32, row: Int32) -> Any:
        """Mods of one work item, before its tiles."""
        return self.mods.head(arguments, batch, head, self.scales.score_log2).rows(Axis(row, (0, 8)), "q")

    def exponentiate(self, acc_S: cute.Tensor, stats: RowStats, place: Place, kind: str) -> None:
        """S becomes P = exp2(s' − lse), 0 where not kept, times ∂s'/∂s if that depends on the score; in place."""
        for columns, score in groups(acc_S):
            tile, factor = self.tile(place, columns), None
            if self.mods.has_score:
                if self.mods.j_class is JClass.NONLINEAR:
                    factor = cute.make_rmem_tensor((2, len(columns)), Float32)
                tile.score_and_factor(score, factor)
            scale = 1.0 if self.mods.has_score else self.scales.score_log2
            for r in range(2):
                for j, column in enumerate(columns):
                    score[r, j] = self.within(score[r, j] * scale - stats.lse[r], place, r, column, kind)
            if self.mods.has_keep or (self.mods.has_mask and kind == PARTIAL):
                tile.mask(score, kind == PARTIAL)
            for r in range(2):
                for j in range(len(columns)):
                    score[r, j] = exp2(score[r, j])
            if factor is not None:
                tile.times_factor(score, factor)

    def within(self, x: Float32, place: Place, r: int, column: int, kind: str) -> Float32:
        """`x`, or -inf beyond the keys, and on partial tiles outside the band; one compare a side."""
        if kind == FULL:
            return x
        walk = self.walk
        band = walk.kind if kind == PARTIAL else WalkKind()
        past = walk.kv_len - place.col  # first column, from place.col on, that is not kept
        if band.has_lo:
            past = cutlass.min(past, place.row + (8 * r + 1) - walk.detail[1] - place.col)
        kept = past > column_of(column)
        if band.has_hi:
            kept = kept & (place.row + 8 * r - walk.detail[2] - place.col <= column_of(column))
        # a select of one value: an `if` around the store would carry the whole fragment through each branch
        return cutlass.select_(kept, x, -Float32.inf)

    def through_softmax(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, stats: RowStats, place: Place) -> None:
        """dP becomes dS = P ∘ (dP − delta) ∘ ∂s'/∂s, in place."""
        for columns, weight, grad in groups(acc_P, acc_dP):
            for r in range(2):
                for j in range(len(columns)):
                    grad[r, j] = weight[r, j] * (grad[r, j] - stats.delta[r])
            if self.mods.j_class in (JClass.CONST, JClass.LINEAR):
                self.tile(place, columns).times_factor(grad)

    def tile(self, place: Place, columns: tuple[int, ...]) -> Any:
        """Mods over some columns of a fragment."""
        return place.mods.tile(Axis(place.col, tuple(column_of(j) for j in columns)))
