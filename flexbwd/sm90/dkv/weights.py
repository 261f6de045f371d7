"""Weights: what happens between S, dP and dS, on fragments with keys as rows and queries as columns.

Fragments are gone through in groups of columns, so that what a mod computes on the way lives shortly.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.modgraph.modplan import JClass
from flexbwd.sm90.backward.walk import BwdWalk
from flexbwd.sm90.dkv.exchange import P_BITS
from flexbwd.sm90.fragments import groups, part
from flexbwd.sm90.mods import Axis, ModConfig
from flexbwd.sm90.numerics import column_of, exp2

FULL, EDGE, PARTIAL = "full", "edge", "partial"


@dataclass(frozen=True)
class Place:
    """Where this thread's fragment lies: element [r, j] is key kv + 8*r, query q + column_of(j)."""

    kv: Int32
    q: Int32
    mods: Any  # mod_tile.Rows: keys are rows


def statistics(stats: cute.Tensor, stage: Int32, thread: Int32) -> cute.Tensor:
    """(2, groups of 8 columns) view of the statistics (tile_m, stages) of the queries this thread holds."""
    rows, stages = cute.size(stats, mode=[0]), cute.size(stats, mode=[1])
    layout = cute.make_layout((2, 4, rows // 8, stages), stride=(1, 2, 8, rows))
    return cute.make_tensor(stats.iterator, layout)[None, thread % 4, None, stage]


def loaded(stats: cute.Tensor, columns: tuple[int, ...]) -> cute.Tensor:
    """The statistics of some columns, an even number of neighbours, in registers."""
    held = cute.make_rmem_tensor((2, len(columns) // 2), Float32)
    start = cute.make_tensor(stats[None, columns[0] // 2].iterator, cute.make_layout(held.shape, stride=(1, 8)))
    cute.autovec_copy(start, held)
    return cute.make_tensor(held.iterator, cute.make_layout((len(columns),)))


@dataclass(frozen=True)
class Weights:
    walk: BwdWalk
    scale_log2: Float32
    mods: cutlass.Constexpr[ModConfig]

    def exponentiate(
        self,
        acc_S: cute.Tensor,
        targets: tuple[cute.Tensor | None, cute.Tensor | None],
        lse: cute.Tensor,
        place: Place,
        kind: str,
    ) -> None:
        """2^P_BITS·P, 0 where not kept, rounded into the two targets: as it is for dV, and times ∂s'/∂s, if that
        depends on the score, for dK."""
        rP, sent = targets
        for columns, score in groups(acc_S):
            held = loaded(lse, columns)
            tile = self.tile(place, columns)
            factor = None
            if self.mods.has_score:
                if self.mods.j_class is JClass.NONLINEAR and sent is not None:
                    factor = cute.make_rmem_tensor((2, len(columns)), Float32)
                tile.score_and_factor(score, factor)
            scale = 1.0 if self.mods.has_score else self.scale_log2
            for j, column in enumerate(columns):
                shift = held[j] - float(P_BITS)
                for r in range(2):
                    score[r, j] = self.within(score[r, j] * scale - shift, place, r, column, kind)
            if self.mods.has_keep or (self.mods.has_mask and kind == PARTIAL):
                tile.mask(score, kind == PARTIAL)
            for j in range(len(columns)):
                for r in range(2):
                    score[r, j] = exp2(score[r, j])
            flat = part(acc_S, columns)
            if rP is not None:
                part(rP, columns).store(flat.load().to(rP.element_type))
            if factor is not None:
                tile.times_factor(score, factor)
            if sent is not None:
                part(sent, columns).store(flat.load().to(sent.element_type))

    def within(self, x: Float32, place: Place, r: int, column: int, kind: str) -> Float32:
        """`x`, or -inf where the keys end or the band does not reach."""
        if kind == FULL:
            return x
        keep = place.kv + 8 * r < self.walk.kv_len
        if kind == PARTIAL and self.walk.kind.band:
            keep = keep & self.walk.keep(place.q, place.kv, column_of(column) - 8 * r)
        return cutlass.select_(keep, x, -Float32.inf)

    def through_softmax(self, sent: cute.Tensor, acc_dP: cute.Tensor, delta: cute.Tensor, place: Place) -> None:
        """dP becomes dS = P ∘ (dP − delta) ∘ ∂s'/∂s, in place."""
        down = 2.0**-P_BITS
        for columns, weight, grad in groups(sent, acc_dP):
            held = loaded(delta, columns)
            for j in range(len(columns)):
                offset = held[j] * down
                for r in range(2):
                    grad[r, j] = weight[r, j].to(Float32) * (grad[r, j] * down - offset)
            if self.mods.j_class in (JClass.CONST, JClass.LINEAR):
                self.tile(place, columns).times_factor(grad)

    def tile(self, place: Place, columns: tuple[int, ...]) -> Any:
        """Mods over some columns of a fragment."""
        return place.mods.tile(Axis(place.q, tuple(column_of(j) for j in columns)))
