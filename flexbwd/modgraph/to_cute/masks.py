"""Predicates over a fragment: words where `words.py` found runs, per-element code for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutlass._mlir.dialects import arith
from cutlass._mlir.extras import types as T

from flexbwd.modgraph.ir import I32, Node, topological

from .evaluate import Evaluator
from .kinds import Kind
from .words import Run, wordable

Value = Any
LANES = 32


@dataclass(frozen=True)
class Columns:
    """A fragment's columns: coordinate = first (an i32 value) + offsets; ascending."""

    first: Value
    offsets: tuple[int, ...]

    @property
    def is_paired(self) -> bool:
        """Offsets 0, 1, 8, 9, 16, 17, …: a wgmma accumulator."""
        return all(o == 8 * (j // 2) + j % 2 for j, o in enumerate(self.offsets))

    @property
    def is_dense(self) -> bool:
        return all(o == j for j, o in enumerate(self.offsets))

    @property
    def countable(self) -> bool:
        """Can the columns below a threshold be counted in a few instructions?"""
        return self.is_paired or self.is_dense

    @property
    def period(self) -> int:
        """A threshold moved by it moves the count by `per_period`."""
        return 8 if self.is_paired else 1

    @property
    def per_period(self) -> int:
        return 2 if self.is_paired else 1


class WordMaker:
    """Integer and word arithmetic on thresholds; needs no graph."""

    def __init__(self, emit: Any, columns: Columns) -> None:
        self.emit, self.columns = emit, columns

    def count(self, end: Value) -> Value:
        """How many columns lie below `end`; beyond 0 … len it goes on, so that it can be shifted."""
        emit = self.emit
        below = arith.subi(end, self.columns.first)
        if not self.columns.is_paired:
            return below
        whole = arith.muli(arith.shrsi(below, emit.const(3, I32)), emit.const(2, I32))
        return arith.addi(whole, arith.minsi(arith.andi(below, emit.const(7, I32)), emit.const(2, I32)))

    def below(self, count: Value, moved: int, chunk: int) -> Value:
        """The word of columns 32·chunk … whose place is below count + moved."""
        emit = self.emit
        length = arith.maxsi(arith.addi(count, emit.const(moved - LANES * chunk, I32)), emit.const(0, I32))
        return emit.low_bits(length)

    def everywhere(self, condition: Value) -> Value:
        """All lanes as one predicate."""
        return arith.select(condition, self.emit.const(-1, I32), self.emit.const(0, I32))

    def inverse(self, word: Value) -> Value:
        return arith.xori(word, self.emit.const(-1, I32))


class Predicates:
    """The predicates of a graph over one fragment.

    Args:
        column: the coordinate along the columns, "q_idx" or "kv_idx".
        roots: what must hold of every kept element.
    """

    def __init__(self, at: Evaluator, maker: WordMaker, column: str, roots: Sequence[Node]) -> None:
        self.at, self.maker, self.column, self.roots = at, maker, column, roots
        self.runs = at.graph.runs[column] if maker.columns.countable else {}
        self.good = wordable(roots, self.runs, column) if self.runs else set()
        self._words: dict[Any, Value] = {}

    def parts(self) -> tuple[list[Node], list[Node]]:
        """The conjuncts that are words, and the others."""
        conjuncts = [c for r in self.roots for c in _operands(r, "and")]
        words = [c for c in conjuncts if c in self.good]
        return words, [c for c in conjuncts if c not in self.good]

    def is_worth_it(self, words: Sequence[Node]) -> bool:
        """Beside compares, which chain, a bit to test costs as much as one more compare: are there several runs?

        What depends on q - kv alone is computed once per diagonal, and needs no words.
        """
        return sum(n in self.runs for n in topological(words)) > 1 and not all(map(self._is_diagonal, words))

    def _is_diagonal(self, node: Node) -> bool:
        return self.at.graph.kinds[node] is Kind.DIFFERENCE

    # -- words ---------------------------------------------------------------------------------------------------------
    def word(self, node: Node, row: int, chunk: int) -> Value:
        """32 columns of a wordable predicate, in the row at static offset `row`."""
        key = (node, row, chunk)
        if key not in self._words:
            self._words[key] = self._made(node, row, chunk)
        return self._words[key]

    def _made(self, node: Node, row: int, chunk: int) -> Value:
        run = self.runs.get(node)
        if run is not None:
            return self._run(run, row, chunk)
        if node.op == "const" or not any(a in self.good for a in node.args) or self._is_still(node):
            return self.maker.everywhere(self._still(node, row))
        args = [self.word(a, row, chunk) for a in node.args]
        if node.op == "not":
            return self.maker.inverse(args[0])
        if node.op == "where":
            c, x, y = args
            return arith.ori(arith.andi(c, x), arith.andi(self.maker.inverse(c), y))
        if node.op == "eq":
            return self.maker.inverse(arith.xori(*args))
        joins = {"and": arith.andi, "min": arith.andi, "or": arith.ori, "max": arith.ori}
        return joins.get(node.op, arith.xori)(*args)

    def _is_still(self, node: Node) -> bool:
        """Free of the column: one predicate for all lanes."""
        kind = self.at.graph.kinds[node].name
        return kind in ("UNIFORM", "Q" if self.column == "kv_idx" else "KV")

    def _run(self, run: Run, row: int, chunk: int) -> Value:
        word = self._below(run.end, row, chunk)
        if run.above:
            return self.maker.inverse(word)
        if run.start is not None:
            word = arith.andi(word, self.maker.inverse(self._below(run.start, row, chunk)))
        return self.maker.inverse(word) if run.inverted else word

    def _below(self, end: Node, row: int, chunk: int) -> Value:
        """Columns below a threshold; rows a whole number of periods apart share one count."""
        at, columns = self.at, self.maker.columns
        shift = at.graph.kinds.step(end)
        moved = 0
        if shift is not None:
            coefficient = shift[0] if self.column == "kv_idx" else shift[1]
            moved, rest = divmod(coefficient * row, columns.period)
            moved, row = (moved * columns.per_period, 0) if not rest else (0, row)
        key = at.key(end, *self._offsets(row, 0))
        count = self._once(("count", key), lambda: self.maker.count(self._still(end, row)))
        return self._once(("below", key, moved, chunk), lambda: self.maker.below(count, moved, chunk))

    def _once(self, key: Any, make: Callable[[], Value]) -> Value:
        if key not in self._words:
            self._words[key] = make()
        return self._words[key]

    def _still(self, node: Node, row: int) -> Value:
        return self.at.value(node, *self._offsets(row, 0))

    def _offsets(self, row: int, col: int) -> tuple[int, int]:
        """(q, kv) offsets of a row and a column offset."""
        return (row, col) if self.column == "kv_idx" else (col, row)

    def alternatives(self, node: Node) -> tuple[list[Node], list[Node]]:
        """A disjunction's operands: those that are words, and the others."""
        parts = _operands(node, "or")
        return [p for p in parts if p in self.good], [p for p in parts if p not in self.good]

    def bit(self, words: Sequence[Node], node: Node, row: int, lane: int) -> Value:
        """Does one of `words`, operands of `node`, keep the lane?"""
        chunk = lane // LANES
        key = ("any", node, row, chunk)
        word = self._once(key, lambda: _joined(arith.ori, [self.word(w, row, chunk) for w in words]))
        return self._bit(word, lane)

    # -- elements ------------------------------------------------------------------------------------------------------
    def holds(self, node: Node, row: int, lane: int) -> Value:
        """Any predicate at one element: bits of words where it has some."""
        if self._is_diagonal(node):
            return self.at.value(node, *self._offsets(row, self.maker.columns.offsets[lane]))
        if node in self.runs:
            return self._lane(self.runs[node], row, lane)
        if node in self.good:
            return self._bit(self.word(node, row, lane // LANES), lane)
        if node.op in ("and", "or"):
            parts = _operands(node, node.op)
            words = [self.word(p, row, lane // LANES) for p in parts if p in self.good]
            values = [self.holds(p, row, lane) for p in parts if p not in self.good]
            if words:
                key = ("joined", node, row, lane // LANES)
                merge = arith.andi if node.op == "and" else arith.ori
                values.append(self._bit(self._once(key, lambda: _joined(merge, words)), lane))
            return _joined(arith.andi if node.op == "and" else arith.ori, values)
        if node.op == "not":
            return arith.xori(self.holds(node.args[0], row, lane), arith.constant(T.bool(), 1))
        return self.at.value(node, *self._offsets(row, self.maker.columns.offsets[lane]))

    def _lane(self, run: Run, row: int, lane: int) -> Value:
        """A run at one element: thresholds against the lane's static place."""
        kept = self._beyond(run.end, row, lane)
        if run.start is not None:
            other = arith.xori(self._beyond(run.start, row, lane), arith.constant(T.bool(), 1))
            kept = arith.andi(kept, other)
        return arith.xori(kept, arith.constant(T.bool(), 1)) if run.above or run.inverted else kept

    def _beyond(self, end: Node, row: int, lane: int) -> Value:
        """Is the lane's column below a threshold?"""
        key = ("limit", self.at.key(end, *self._offsets(row, 0)))
        limit = self._once(key, lambda: arith.subi(self._still(end, row), self.maker.columns.first))
        place = self.at.emit.const(self.maker.columns.offsets[lane], I32)
        return self.at.emit.compare("gt", limit, place, I32)

    def _bit(self, word: Value, lane: int) -> Value:
        return self.at.emit.bit(word, lane % LANES)


def _joined(join: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    found = values[0]
    for value in values[1:]:
        found = join(found, value)
    return found


def _operands(node: Node, op: str) -> list[Node]:
    """The operands of a tree of one associative op."""
    if node.op != op:
        return [node]
    return [n for a in node.args for n in _operands(a, op)]
