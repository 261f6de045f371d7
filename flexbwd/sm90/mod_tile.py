"""Head, Rows, Tile: the three regions in which a kernel evaluates mods. `mods.py` tells how to call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith

from flexbwd.modgraph.ir import I32, Node
from flexbwd.modgraph.to_cute.evaluate import Evaluator
from flexbwd.modgraph.to_cute.kinds import SCALE, SCALE_LOG2, Kind
from flexbwd.modgraph.to_cute.loads import Captures
from flexbwd.modgraph.to_cute.ops import LN_2, Emit
from flexbwd.modgraph.to_cute.prepare import Site
from flexbwd.sm90.mods import Axis, Limits, ModConfig


@dataclass(frozen=True)
class Bases:
    """Offsets from local to global coordinates, as Int32 or as int32 tensors per block; None: 0."""

    b: Any = None
    h: Any = None
    q: Any = None
    kv: Any = None


@dataclass(frozen=True)
class Head:
    """One (b, h)."""

    config: ModConfig
    evaluator: Evaluator | None
    bases: Bases
    scale_log2: Any

    @classmethod
    def of(cls, config: ModConfig, arguments: tuple[Any, ...], b: Any, h: Any, scale_log2: Any) -> Head:
        if config.graph is None:
            return cls(config, None, Bases(), scale_log2)
        rest, bases = list(arguments), Bases()
        if config.base is not None:
            b_off, h_off = rest.pop(0), rest.pop(0)
            q = rest.pop(0) if config.base.q_block else None
            kv = rest.pop(0) if config.base.kv_block else None
            bases, b, h = Bases(b_off, h_off, q, kv), b + b_off, h + h_off
        emit = Emit(config.precision == "fast", config.host)
        empty = frozenset(k.slot for k in config.captures if k.empty)
        captures = Captures(emit, {k.slot: a for k, a in zip(config.captures, rest, strict=False)}, empty)
        scale_log2 = Float32(scale_log2)
        inputs = {
            "b": Int32(b).ir_value(),
            "h": Int32(h).ir_value(),
            SCALE_LOG2: scale_log2.ir_value(),
            SCALE: (scale_log2 * LN_2).ir_value(),
        }
        evaluator = Evaluator(config.graph, emit, captures, inputs)
        evaluator.settle(Kind.UNIFORM, [(0, 0)])
        return cls(config, evaluator, bases, scale_log2)

    def rows(self, axis: Axis, rows_are: str) -> Rows:
        """The stationary axis."""
        if self.evaluator is None:
            return Rows(self, axis, rows_are, None)
        name, kind = ("q_idx", Kind.Q) if rows_are == "q" else ("kv_idx", Kind.KV)
        inside = self.evaluator.inside({name: self.place(axis, rows_are)})
        inside.settle(kind, [(o, 0) if rows_are == "q" else (0, o) for o in axis.offsets])
        return Rows(self, axis, rows_are, inside)

    def place(self, axis: Axis, coordinate: str) -> Any:
        """Global index of the axis' first element."""
        table = self.bases.q if coordinate == "q" else self.bases.kv
        first = Int32(axis.first)
        if table is None:
            return first.ir_value()
        block = self.config.base.q_block if coordinate == "q" else self.config.base.kv_block
        last = Int32(table.shape[0]) - 1
        return (first + Int32(table[cutlass.min(first // block, last)])).ir_value()


@dataclass(frozen=True)
class Rows:
    """One (b, h) and one position of the stationary axis."""

    head: Head
    axis: Axis
    rows_are: str
    evaluator: Evaluator | None

    def tile(self, axis: Axis) -> Tile:
        if self.evaluator is None:
            return Tile(self, axis, None)
        cols_are = "kv" if self.rows_are == "q" else "q"
        name = "kv_idx" if cols_are == "kv" else "q_idx"
        return Tile(self, axis, self.evaluator.inside({name: self.head.place(axis, cols_are)}))


@dataclass(frozen=True)
class Tile:
    """One fragment of scores."""

    rows: Rows
    axis: Axis
    evaluator: Evaluator | None

    @property
    def config(self) -> ModConfig:
        return self.rows.head.config

    def _each(self) -> list[tuple[int, int, int, int]]:
        """(row, column, q offset, kv offset) of every element."""
        found = []
        for r, x in enumerate(self.rows.axis.offsets):
            for j, y in enumerate(self.axis.offsets):
                found.append((r, j, x, y) if self.rows.rows_are == "q" else (r, j, y, x))
        return found

    def score(self, frag: Any) -> None:
        """Raw q·k becomes s' * log2(e), in place."""
        self.score_and_factor(frag, None)

    def score_and_factor(self, frag: Any, factor: Any) -> None:
        """The same, and ds'/ds into `factor`."""
        head = self.rows.head
        graph = self.config.graph
        if not self.config.has_score:
            for r, j, _, _ in self._each():
                frag[r, j] = frag[r, j] * head.scale_log2
                if factor is not None:
                    factor[r, j] = factor.element_type(1.0)
            return
        at = self.evaluator
        for r, j, q, kv in self._each():
            at.element(q, kv, Float32(frag[r, j]).ir_value())
            frag[r, j] = Float32(at.value(graph.score, q, kv))
            if factor is not None:
                value = Float32(1.0) if graph.factor is None else Float32(at.value(graph.factor, q, kv))
                factor[r, j] = factor.element_type(value)

    def times_factor(self, frag: Any, factor: Any = None) -> None:
        """frag *= ds'/ds, 0 where frag is 0."""
        graph, at = self.config.graph, self.evaluator
        if factor is None and (graph is None or graph.factor is None):
            return
        for r, j, q, kv in self._each():
            if factor is None:
                at.element(q, kv, None)
                value = Float32(at.value(graph.factor, q, kv))
            else:
                value = Float32(factor[r, j])
            x = frag[r, j]
            frag[r, j] = Float32(cutlass.select_(x == 0.0, Float32(0.0), x * value))

    def mask(self, frag: Any, partial: bool, limits: Limits | None = None) -> None:
        """-inf where not kept."""
        graph = self.config.graph
        predicates = [] if graph is None else [graph.keep, graph.mask if partial else None]
        wanted = [p for p in predicates if p is not None]
        if not wanted and limits is None:
            return
        for r, j, q, kv in self._each():
            kept = self._kept(wanted, q, kv)
            kept += self._within(limits or Limits(), r, j)
            both = kept[0]
            for k in kept[1:]:
                both = arith.andi(both, k)
            frag[r, j] = Float32(arith.select(both, Float32(frag[r, j]).ir_value(), Float32(-Float32.inf).ir_value()))

    def _kept(self, roots: list[Node], q: int, kv: int) -> list[Any]:
        if not roots:
            return []
        self.evaluator.element(q, kv, None)
        return [self.evaluator.value(n, q, kv) for n in roots]

    def _within(self, limits: Limits, r: int, j: int) -> list[Any]:
        row, col = self.rows.axis.first + self.rows.axis.offsets[r], self.axis.first + self.axis.offsets[j]
        distance = row - col if self.rows.rows_are == "q" else col - row
        tests = []
        if limits.row_end is not None:
            tests.append(row < limits.row_end)
        if limits.col_end is not None:
            tests.append(col < limits.col_end)
        if limits.lo is not None:
            tests.append(distance >= limits.lo)
        if limits.hi is not None:
            tests.append(distance <= limits.hi)
        return [cutlass.Boolean(t).ir_value() for t in tests]

    @property
    def sites(self) -> list[CaptureGrad]:
        return [] if self.config.graph is None else [CaptureGrad(self, s) for s in self.config.graph.sites]


@dataclass(frozen=True)
class CaptureGrad:
    """d(capture[slot])[index(r, j)] += dS'[r, j] * jacobian(r, j, raw), kept elements only.

    `kind` says which coordinates the index depends on; `uses_score`: the Jacobian needs the raw q·k.
    """

    tile: Tile
    site: Site

    @property
    def slot(self) -> int:
        return self.site.slot

    @property
    def uses_score(self) -> bool:
        return self.tile.config.graph.kinds[self.site.jacobian] is Kind.SCORE

    def index(self, r: int, j: int) -> tuple[Any, ...]:
        """Int32 index of the element's entry, one per dimension, inside the tensor."""
        return tuple(Int32(i) for i in self._at(r, j, None, self._indices))

    def jacobian(self, r: int, j: int, raw: Any = None) -> Any:
        """Float32 ds'/d(loaded value)."""
        return Float32(self._at(r, j, raw, lambda q, kv: self.tile.evaluator.value(self.site.jacobian, q, kv)))

    def _indices(self, q: int, kv: int) -> list[Any]:
        at = self.tile.evaluator
        return at.captures.indices(self.site.load, [at.value(a, q, kv) for a in self.site.load.args],
                                   at.graph.guards[self.site.load])  # fmt: skip

    def _at(self, r: int, j: int, raw: Any, make: Callable[[int, int], Any]) -> Any:
        x, y = self.tile.rows.axis.offsets[r], self.tile.axis.offsets[j]
        q, kv = (x, y) if self.tile.rows.rows_are == "q" else (y, x)
        self.tile.evaluator.element(q, kv, None if raw is None else Float32(raw).ir_value())
        return make(q, kv)


__all__ = ["I32", "CaptureGrad", "Head", "Rows", "Tile"]
