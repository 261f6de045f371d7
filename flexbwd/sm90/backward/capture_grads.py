"""CaptureGrads: gradients of captured tensors, d(c)[index] += Σ dS'·∂s'/∂c over kept elements, in fp32.

A thread holds keys (kv, kv + 8) and queries q + 8·g + c; its warp 4 x 8 such sets. What an index does not depend on is
summed before anything goes to memory:

    uniform    the whole walk of a head in a register, then the warp                   one atomic per warp and head
    col        (index by kv) the walk of a head, then the quad that shares a key       one per key, warp and head
    row        (index by q) the keys of a warp                                         one per query, warp and step
    toeplitz   (index by q − kv) the diagonals of a warp                               one per diagonal, warp and step
    else       nothing                                                                 one per element

Masked elements have dS' = 0; where an index is of theirs alone, nothing is added.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flexbwd.modgraph.modplan import LoadClass
from flexbwd.sm90.backward.config import BwdConfig, trained_slots
from flexbwd.sm90.mods import Axis
from flexbwd.sm90.numerics import column_of, quad_sum, rows_and_columns

_HELD = {LoadClass.UNIFORM: 1, LoadClass.COL: 2}  # registers that live through a head's walk


def add_if(wanted: Boolean, target: cute.Tensor, index: tuple[Int32, ...], value: Float32) -> None:
    """target[index] += value in global memory, fire and forget; nothing where not `wanted`."""
    offset = cute.crd2idx(index if index else (0,), target.layout)
    cute.arch.inline_ptx(
        "{.reg .pred p; setp.ne.s32 p, {$r0}, 0; @p red.relaxed.gpu.global.add.f32 [{$r1}], {$r2};}",
        read_only_args=[Int32(wanted), (target.iterator + offset).toint(), value],
    )


def _term(site: Any, grad: cute.Tensor, r: int, j: int) -> Float32:
    """dS'·∂s'/∂c of one element, 0 where dS' is 0."""
    ds = grad[r, j]
    if site.site.jacobian.is_value(1):
        return ds
    return cutlass.select_(ds == 0.0, Float32(0.0), ds * site.jacobian(r, j))


@dataclass(frozen=True)
class CaptureGrads:
    targets: tuple  # fp32, of each its captured tensor's shape; by `trained_slots`
    slots: tuple[int, ...]
    sums: tuple  # by site: registers, or None
    thread: Int32

    @classmethod
    def of(cls, config: BwdConfig, targets: tuple, thread: Int32) -> "CaptureGrads | None":
        """None where nothing is trained."""
        if not config.want_captures:
            return None
        graph = config.mods.graph
        sums = tuple(cute.make_rmem_tensor((_HELD[s.kind],), Float32) if s.kind in _HELD else None for s in graph.sites)
        return cls(targets, tuple(trained_slots(config.mods)), sums, thread)

    def start(self) -> None:
        """Before a head's walk."""
        for held in self.sums:
            if held is not None:
                held.fill(0.0)

    def add(self, rows: Any, acc_dS: cute.Tensor, q: Int32) -> None:
        """What one step adds; `rows` are the mods over the thread's keys, `acc_dS` is dS' = P ∘ (dP − delta)."""
        grad = rows_and_columns(acc_dS)
        tile = rows.tile(Axis(q, tuple(column_of(j) for j in range(cute.size(grad, mode=[1])))))
        for site, held in zip(tile.sites, self.sums, strict=True):
            kind = site.site.kind
            if kind is LoadClass.UNIFORM or kind is LoadClass.COL:
                self._hold(site, held, grad)
            elif kind is LoadClass.ROW:
                self._by_query(site, grad)
            elif kind is LoadClass.TOEPLITZ:
                self._by_diagonal(site, grad)
            else:
                self._by_element(site, grad)

    def finish(self, rows: Any) -> None:
        """After a head's walk: what was held goes to memory."""
        tile = rows.tile(Axis(Int32(0), (0,)))
        lane = self.thread % 32
        for site, held in zip(tile.sites, self.sums, strict=True):
            if held is None:
                continue
            totals = [quad_sum(held[i]) for i in range(cute.size(held))]
            if site.site.kind is LoadClass.COL:
                for r, total in enumerate(totals):
                    add_if(lane % 4 == 0, self._target(site), site.index(r, 0), total)
            else:
                add_if(lane == 0, self._target(site), site.index(0, 0), _over_keys(totals[0]))

    def _target(self, site: Any) -> cute.Tensor:
        return self.targets[self.slots.index(site.slot)]

    def _hold(self, site: Any, held: cute.Tensor, grad: cute.Tensor) -> None:
        for r in range(2):
            total = Float32(0.0)
            for j in range(cute.size(grad, mode=[1])):
                total += _term(site, grad, r, j)
            held[r % cute.size(held)] += total

    def _by_query(self, site: Any, grad: cute.Tensor) -> None:
        lane = self.thread % 32
        for j in range(cute.size(grad, mode=[1])):
            total = _over_keys(_term(site, grad, 0, j) + _term(site, grad, 1, j))
            add_if(lane // 4 == j % 8, self._target(site), site.index(0, j), total)

    def _by_diagonal(self, site: Any, grad: cute.Tensor) -> None:
        """Row 0 of column group k lies on the diagonal of row 1 of group k + 1; lane (x, y) on that of (x+1, y+2)."""
        lane = self.thread % 32
        x, y = lane % 4, lane // 4
        groups = cute.size(grad, mode=[1]) // 2
        for k in range(-1, groups):
            for c in range(2):
                value = Float32(0.0)
                if k >= 0:
                    value += _term(site, grad, 0, 2 * k + c)
                if k + 1 < groups:
                    value += _term(site, grad, 1, 2 * (k + 1) + c)
                for reach in (1, 2):
                    other = cute.arch.shuffle_sync_down(value, offset=9 * reach)
                    there = (x + reach < 4) & (y + 2 * reach < 8)
                    value += cutlass.select_(there, other, Float32(0.0))
                index = site.index(0, 2 * k + c) if k >= 0 else site.index(1, c)
                first = (x == 0) | (y < 2)
                add_if(first & (value != 0.0), self._target(site), index, value)

    def _by_element(self, site: Any, grad: cute.Tensor) -> None:
        for j in range(cute.size(grad, mode=[1])):
            for r in range(2):
                value = _term(site, grad, r, j)
                add_if(value != 0.0, self._target(site), site.index(r, j), value)


def _over_keys(x: Float32) -> Float32:
    """Sum over the eight threads of a warp that hold the same queries."""
    for offset in (4, 8, 16):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x
