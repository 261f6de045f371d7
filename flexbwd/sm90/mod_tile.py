"""Head, Rows, Tile: the three regions in which a kernel evaluates mods. `mods.py` tells how to call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith

from flexbwd.modgraph.ir import Node
from flexbwd.modgraph.to_cute.evaluate import Evaluator
from flexbwd.modgraph.to_cute.kinds import SCALE, SCALE_LOG2, Kind
from flexbwd.modgraph.to_cute.loads import Captures, Source
from flexbwd.modgraph.to_cute.masks import LANES, Columns, Predicates, WordMaker
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
        keys = [k for k in config.captures if not k.empty]
        captures = Captures(emit, {k.slot: Source(a, k.unit, k.wide) for k, a in zip(keys, rest, strict=False)})
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
        """(row, column, q offset, kv offset) of every element, column by column."""
        found = []
        for j, y in enumerate(self.axis.offsets):
            for r, x in enumerate(self.rows.axis.offsets):
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
            at.element(Float32(frag[r, j]).ir_value())
            frag[r, j] = Float32(at.value(graph.score, q, kv))
            if factor is not None:
                value = Float32(1.0) if graph.factor is None else Float32(at.value(graph.factor, q, kv))
                factor[r, j] = factor.element_type(value)

    def times_factor(self, frag: Any, factor: Any = None) -> None:
        """frag *= ds'/ds, 0 where frag is 0."""
        graph, at = self.config.graph, self.evaluator
        if graph is None or graph.factor is None:
            return
        for r, j, q, kv in self._each():
            if factor is None:
                at.element(None)
                value = Float32(at.value(graph.factor, q, kv))
            else:
                value = Float32(factor[r, j])
            x = Float32(frag[r, j])
            product = x * value
            if not graph.factor_finite:
                product = Float32(cutlass.select_(x == 0.0, Float32(0.0), product))
            frag[r, j] = product

    def mask(self, frag: Any, partial: bool, limits: Limits | None = None) -> None:
        """-inf where not kept."""
        graph = self.config.graph
        found = [] if graph is None else [graph.keep, graph.mask if partial else None]
        wanted = [p for p in found if p is not None]
        bounds = MaskLimits.of(self, limits)
        if not wanted and bounds.is_empty:
            return
        predicates = self._predicates(wanted) if wanted else None
        words, singles = ([], []) if predicates is None else predicates.parts()
        plain = [n for n in singles if not predicates.alternatives(n)[0]]
        if plain and not predicates.is_worth_it(words):
            words, plain = [], [*words, *plain]
        for r, row in enumerate(self.rows.axis.offsets):

            def kept(j: int, r: int = r, row: int = row) -> Any:
                tests = bounds.kept(r, j, [predicates.word(w, row, j // LANES) for w in words], opaque=bool(plain))
                return self._all(tests + [predicates.holds(n, row, j) for n in plain])

            self._hide(frag, r, kept)
            for node in singles:
                if node not in plain:
                    self._hide_single(frag, r, row, node, predicates)

    def _predicates(self, roots: list[Node]) -> Predicates:
        """In global coordinates, as mods see them."""
        at = self.evaluator
        columns = Columns(at.inputs[self._column], self.axis.offsets)
        return Predicates(at, WordMaker(at.emit, columns), self._column, roots)

    def _hide_single(self, frag: Any, r: int, row: int, node: Node, predicates: Predicates) -> None:
        """One conjunct that is no word; of `words | others` the words choose first, alone again."""
        words, others = predicates.alternatives(node)
        before = [Float32(frag[r, j]).ir_value() for j in self._places]
        if words:
            self._hide(frag, r, lambda j: predicates.bit(words, node, row, j))
        for j in self._places:
            kept = self._all([predicates.holds(n, row, j) for n in others], "or")
            other = Float32(frag[r, j]).ir_value() if words else Float32(-Float32.inf).ir_value()
            frag[r, j] = Float32(arith.select(kept, before[j], other))

    def _hide(self, frag: Any, r: int, test: Callable[[int], Any]) -> None:
        lowest = Float32(-Float32.inf).ir_value()
        for j in self._places:
            kept = test(j)
            if kept is not None:
                frag[r, j] = Float32(arith.select(kept, Float32(frag[r, j]).ir_value(), lowest))

    def _all(self, tests: list[Any], op: str = "and") -> Any:
        """All (any) of the predicates; None of none."""
        found = tests[0] if tests else None
        for test in tests[1:]:
            found = Emit(host=self.config.host).join(op, found, test)
        return found

    @property
    def _places(self) -> range:
        return range(len(self.axis.offsets))

    @property
    def _column(self) -> str:
        return "kv_idx" if self.rows.rows_are == "q" else "q_idx"

    @property
    def sites(self) -> list[CaptureGrad]:
        return [] if self.config.graph is None else [CaptureGrad(self, s) for s in self.config.graph.sites]


class MaskLimits:
    """Row and column ends and a band, as words where columns can be counted, in local coordinates."""

    def __init__(self, tile: Tile, maker: WordMaker, limits: Limits) -> None:
        self.tile, self.maker, self.limits = tile, maker, limits
        self._words: dict[Any, Any] = {}

    @classmethod
    def of(cls, tile: Tile, limits: Limits | None) -> MaskLimits:
        emit = Emit(host=tile.config.host) if tile.evaluator is None else tile.evaluator.emit
        columns = Columns(Int32(tile.axis.first).ir_value(), tile.axis.offsets)
        return cls(tile, WordMaker(emit, columns), limits or Limits())

    @property
    def is_empty(self) -> bool:
        return all(x is None for x in self.limits)

    def kept(self, r: int, j: int, words: list[Any], opaque: bool) -> list[Any]:
        """Is element [r, j] within the limits and set in all `words` (of its row and chunk)? [] without any test."""
        if not self.maker.columns.countable:
            return self._compared(r, j) + [self.maker.emit.bit(w, j % LANES) for w in words]
        key = (r, j // LANES)
        if key not in self._words:
            words = words + self._limit_words(r, j // LANES)
            both = words[0] if words else None
            for w in words[1:]:
                both = arith.andi(both, w)
            self._words[key] = both
        both = self._words[key]
        return [] if both is None else [self.maker.emit.bit(both, j % LANES, opaque)]

    def _limit_words(self, r: int, chunk: int) -> list[Any]:
        """Thresholds: columns below an end; in a band, columns between two places that move with the row."""
        limits, maker, axis = self.limits, self.maker, self.tile.rows.axis
        row, step = axis.first, axis.offsets[r]
        found = []
        if limits.row_end is not None:
            found.append(maker.everywhere((row + step < limits.row_end).ir_value()))
        ends, starts = [], []
        if limits.col_end is not None:
            ends.append((limits.col_end, 0))
        by_query = self.tile.rows.rows_are == "q"
        if limits.lo is not None:  # rows are queries: kv <= q - lo;  rows are keys: q >= kv + lo
            (ends if by_query else starts).append(((row - limits.lo + 1) if by_query else (row + limits.lo), step))
        if limits.hi is not None:
            (starts if by_query else ends).append(((row - limits.hi) if by_query else (row + limits.hi + 1), step))
        found += [self._below(end, move, chunk) for end, move in ends]
        return found + [maker.inverse(self._below(start, move, chunk)) for start, move in starts]

    def _below(self, end: Any, move: int, chunk: int) -> Any:
        columns = self.maker.columns
        if move % columns.period:
            return self.maker.below(self.maker.count(Int32(end + move).ir_value()), 0, chunk)
        count = self.maker.count(Int32(end).ir_value())
        return self.maker.below(count, move // columns.period * columns.per_period, chunk)

    def _compared(self, r: int, j: int) -> list[Any]:
        limits, tile = self.limits, self.tile
        row, col = tile.rows.axis.first + tile.rows.axis.offsets[r], tile.axis.first + tile.axis.offsets[j]
        distance = row - col if tile.rows.rows_are == "q" else col - row
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
    def shape(self) -> tuple[Any, ...]:
        """Of the captured tensor."""
        source = self.tile.evaluator.captures.sources.get(self.slot)
        return tuple(source.tensor.shape) if source is not None and source.is_tensor else ()

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
        return at.captures.index(self.site.load, at.places(self.site.load, q, kv))

    def _at(self, r: int, j: int, raw: Any, make: Callable[[int, int], Any]) -> Any:
        x, y = self.tile.rows.axis.offsets[r], self.tile.axis.offsets[j]
        q, kv = (x, y) if self.tile.rows.rows_are == "q" else (y, x)
        self.tile.evaluator.element(None if raw is None else Float32(raw).ir_value())
        return make(q, kv)
