"""Predicates as 32-lane words: bit k of a word tells of a fragment's k-th column.

A comparison whose difference moves with the column coordinate alone by ±1 keeps a run of columns: everything below a
threshold, or everything from it on. Both take a few instructions per 32 columns. Such comparisons are found through
integer sums and through `coordinate // constant`, which is monotone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexbwd.modgraph.analyze import depends
from flexbwd.modgraph.ir import BOOL, COMPARE, I32, Builder, Node, topological

from .lanes import BELOW, FLIP, is_bounded

Spans = dict[Node, tuple[int, int]]
_ANY = (-(2**31), 2**31 - 1)
_JOINS = frozenset({"and", "or", "xor", "not", "min", "max", "where", "eq", "ne"})


@dataclass(frozen=True, eq=False)
class Run:
    """Columns kept by one comparison: coordinate < end, or all the others if `above`; from `start` on if given.

    `end` and `start` are i32 nodes free of the column coordinate, near the lanes' coordinates. `inverted`: the columns
    of start … end - 1 are those *not* kept.
    """

    end: Node
    above: bool = False
    start: Node | None = None
    inverted: bool = False

    @property
    def nodes(self) -> list[Node]:
        return [self.end] if self.start is None else [self.end, self.start]


@dataclass(frozen=True, eq=False)
class _Line:
    """step * coordinate // divisor + rest, or with no coordinate at all (step 0)."""

    step: int
    divisor: int
    rest: Node


class Runs:
    """Finds the comparisons of a predicate that keep runs of `column`, "q_idx" or "kv_idx"."""

    def __init__(self, builder: Builder, roots: Sequence[Node], column: str, bounds: Spans) -> None:
        self.builder, self.column, self.bounds = builder, column, bounds
        self.reads = depends(roots)
        self._lines: dict[Node, _Line | None] = {}
        self.found: dict[Node, Run] = {}
        for node in topological(roots):
            if node.op in COMPARE and node.args[0].dtype is I32 and column in self.reads[node]:
                run = self._run(node)
                if run is not None:
                    self.found[node] = run

    def _run(self, node: Node) -> Run | None:
        (moving, still), op = node.args, node.op
        if self.column in self.reads[still]:
            moving, still, op = still, moving, FLIP[op]
        line = self._line(moving)
        if line is None or abs(line.step) != 1 or self.column in self.reads[still]:
            return None
        limit = self._limit(moving, still, line)
        if limit is None:
            return None
        if line.step < 0:  # r - c < t  is  c > r - t
            op = FLIP[op]
        b = self.builder
        at, after = (self._scaled(b.emit("add", limit, b.const(k, I32)), line.divisor) for k in (0, 1))
        return {
            "lt": Run(at), "le": Run(after), "gt": Run(after, above=True), "ge": Run(at, above=True),
            "eq": Run(after, start=at), "ne": Run(after, start=at, inverted=True),
        }[op]  # fmt: skip

    def _limit(self, moving: Node, still: Node, line: _Line) -> Node | None:
        """What the bare coordinate is compared with, within ±BELOW; None where it may wrap."""
        low, high = self._span(moving)
        if low <= -BELOW or high >= BELOW or not is_bounded(moving, self.bounds):
            return None
        b, (rest_low, rest_high) = self.builder, self._span(line.rest)
        if rest_low <= -BELOW or rest_high >= BELOW:
            return None
        low, high = self._span(still)
        still, low, high = self._near(still, low, high), max(low, -BELOW), min(high, BELOW)
        if line.step < 0:
            return self._near(b.emit("sub", line.rest, still), rest_low - high, rest_high - low)
        return self._near(b.emit("sub", still, line.rest), low - rest_high, high - rest_low)

    def _span(self, node: Node) -> tuple[int, int]:
        return (int(node.value), int(node.value)) if node.is_const else self.bounds.get(node, _ANY)

    def _near(self, node: Node, low: int, high: int) -> Node:
        """`node`, bounded by low … high, brought into ±BELOW: all coordinates are on one side of what is beyond."""
        b = self.builder
        if low < -BELOW:
            node = b.emit("max", node, b.const(-BELOW, I32))
        return b.emit("min", node, b.const(BELOW, I32)) if high > BELOW else node

    def _scaled(self, node: Node, divisor: int) -> Node:
        """c // divisor < t  is  c < divisor * t."""
        if divisor == 1:
            return node
        b, most = self.builder, BELOW // divisor
        node = b.emit("min", b.emit("max", node, b.const(-most, I32)), b.const(most, I32))
        return b.emit("mul", node, b.const(divisor, I32))

    # -- lines ---------------------------------------------------------------------------------------------------------
    def _line(self, node: Node) -> _Line | None:
        if node not in self._lines:
            self._lines[node] = self._found_line(node)
        return self._lines[node]

    def _found_line(self, node: Node) -> _Line | None:
        b = self.builder
        if self.column not in self.reads.get(node, depends([node])[node]):
            return _Line(0, 1, node)
        if node.op == "in":
            return _Line(1, 1, b.const(0, I32))
        if node.op == "fdiv" and node.args[1].is_const and int(node.args[1].value) > 0:
            inner = self._line(node.args[0])
            if inner is not None and inner.step == 1 and inner.divisor == 1 and inner.rest.is_value(0):
                return _Line(1, int(node.args[1].value), b.const(0, I32))
            return None
        if node.op not in ("add", "sub", "neg") or not is_bounded(node, self.bounds):
            return None
        lines = [line for line in map(self._line, node.args) if line is not None]
        if len(lines) < len(node.args):
            return None
        x, y = lines[0], lines[-1]
        if node.op == "neg":
            return _Line(-x.step, x.divisor, self._noted("neg", x.rest))
        if x.step and y.step:
            return None
        moving = x if x.step else y
        step = moving.step if node.op == "add" or x.step else -moving.step
        return _Line(step, moving.divisor, self._noted(node.op, x.rest, y.rest))

    def _noted(self, op: str, *args: Node) -> Node:
        """A new node with its bounds."""
        node = self.builder.emit(op, *args)
        if node not in self.bounds:
            low, high = self._span(args[0])
            if op == "neg":
                low, high = -high, -low
            else:
                other = self._span(args[1])
                low, high = (low + other[0], high + other[1]) if op == "add" else (low - other[1], high - other[0])
            if low >= -(2**31) and high < 2**31:
                self.bounds[node] = (low, high)
        return node


def wordable(roots: Sequence[Node], runs: Mapping[Node, Run], column: str) -> set[Node]:
    """Predicates that are words throughout: runs, what does not depend on the column, and what joins these."""
    reads = depends(roots)
    good: set[Node] = set()
    for node in topological(roots):
        if node.dtype is not BOOL:
            continue
        if column not in reads[node] or node in runs or (node.op in _JOINS and all(a in good for a in node.args)):
            good.add(node)
    return good
