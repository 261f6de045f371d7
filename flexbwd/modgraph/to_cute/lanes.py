"""Integer bounds over the lanes of a kernel, and what they allow: no wraps, i32 in place of i64, cheap guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.interval_base import Range
from flexbwd.modgraph.intervals import IntervalProgram
from flexbwd.modgraph.ir import COMPARE, I32, I64, Builder, Node, topological

Bounds = Mapping[Node, tuple[int, int]]

BELOW = 1 << 30  # coordinates are below it, whatever an IndexBase adds
_LOW, _HIGH = -(2**31), 2**31 - 1
_STEPPED = frozenset({"add", "sub", "mul", "neg", "max", "min", "fdiv", "tdiv", "mod", "fmod", "abs", "where", "cast"})

FLIP = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}  # of a comparison's operands
_ABS_SPLIT = frozenset({"lt", "le", "gt", "ge"})

#: What an index needs, as bits: it may be below 0, it may be past the end.
GUARD_LOW, GUARD_HIGH = 1, 2


def padded(extents: Extents, tile: tuple[int, int]) -> Extents:
    """Rows and columns that lanes reach: whole tiles."""
    q, kv = (-(-max(n, 1) // t) * t for n, t in zip((extents.q_idx, extents.kv_idx), tile, strict=True))
    return Extents(extents.b, extents.h, q, kv)


def lane_bounds(roots: Sequence[Node], extents: Extents, based: bool) -> dict[Node, tuple[int, int]]:
    """Inclusive bounds of every integer node; the whole type where arithmetic may wrap.

    Args:
        based: an IndexBase moves the coordinates to anywhere below `BELOW`.
    """
    ranges = {}
    for name in Extents._fields:
        last = BELOW - 1 if based else max(extents.last(name), 0)
        ranges[name] = (np.array(0), np.array(last))
    found: dict[Node, tuple[int, int]] = {}
    for root in roots:
        for node, interval in IntervalProgram(root, None).all(ranges).items():
            if node.dtype.is_int and isinstance(interval, Range):
                found[node] = int(interval.lo), int(interval.hi)
    return found


def is_bounded(node: Node, bounds: Bounds) -> bool:
    """Are the bounds inside i32, so that nothing has wrapped?"""
    low, high = bounds.get(node, (_LOW, _HIGH))
    return low > _LOW and high < _HIGH


def guard_of(index: Node, size: int, bounds: Bounds) -> int:
    """Guard bits of one index."""
    low, high = bounds.get(index, (_LOW, _HIGH))
    inner = _wrapped(index)
    if inner is not None and inner in bounds:
        x_low, x_high = bounds[inner]
        low = x_low if x_low >= 0 else (x_low + size if x_high < 0 else min(0, x_low + size))
        high = x_high if x_high >= 0 else x_high + size
        high = max(high, size - 1) if x_low < 0 else high
    return (GUARD_LOW if low < 0 else 0) | (GUARD_HIGH if high >= size else 0)


def _wrapped(node: Node) -> Node | None:
    """x of `where(x < 0, x + n, x)`, Python's meaning of a negative index."""
    if node.op != "where" or node.args[0].op != "lt" or not node.args[0].args[1].is_value(0):
        return None
    x = node.args[2]
    return x if node.args[0].args[0] is x else None


class Integers:
    """Rebuilds a graph with what bounds over the real lanes allow.

    Lanes beyond the lengths may get other values: they reach nothing.
    """

    def __init__(self, builder: Builder, bounds: Bounds) -> None:
        self.builder, self.bounds = builder, bounds
        self.done: dict[Node, Node] = {}
        self._narrow: dict[Node, Node | None] = {}

    def rebuild(self, roots: Sequence[Node]) -> list[Node]:
        for node in topological(roots):
            self.done[node] = self._visit(node)
        return [self.done[r] for r in roots]

    def _visit(self, node: Node) -> Node:
        inner = _wrapped(node)
        if inner is not None and self.bounds[inner][0] >= 0:
            return self.done[inner]
        if node.op in COMPARE and node.args[0].dtype is I64:
            compared = self._compare(node)
            if compared is not None:
                return compared
        if node.op in _ABS_SPLIT and node.args[0].dtype is I32 and "abs" in (a.op for a in node.args):
            return self._split_abs(node)
        narrow = self.narrow(node) if node.dtype is I64 else None
        if narrow is not None:
            return self.builder.cast(narrow, I64)
        return self.builder.rebuild(node, [self.done[a] for a in node.args])

    def narrow(self, node: Node) -> Node | None:
        """An i64 node as i32 arithmetic, where every step of it fits."""
        if node not in self._narrow:
            self._narrow[node] = self._narrowed(node) if is_bounded(node, self.bounds) else None
        return self._narrow[node]

    def _narrowed(self, node: Node) -> Node | None:
        builder = self.builder
        if node.op == "const":
            return builder.const(node.value, I32)
        if node.op == "cast" and node.args[0].dtype is I32:
            return self.done[node.args[0]]
        if node.op == "cast" and node.args[0].dtype is not I64:
            return builder.cast(self.done[node.args[0]], I32)
        if node.op not in _STEPPED:
            return None
        args = [self.narrow(a) if a.dtype is I64 else self.done[a] for a in node.args]
        return None if None in args else builder.emit(node.op, *args)  # type: ignore[arg-type]

    def _compare(self, node: Node) -> Node | None:
        """An i64 comparison as one of i32: the side that fits, against the other side brought near it."""
        x, y = node.args
        left, right = self.narrow(x), self.narrow(y)
        if left is None and right is None:
            return None
        left = self._near(x, self.bounds[y]) if left is None else left
        right = self._near(y, self.bounds[x]) if right is None else right
        return self.builder.emit(node.op, left, right)

    def _split_abs(self, node: Node) -> Node:
        """|x| < t  as  x < t and x > -t, two comparisons with a straight line."""
        b, (size, limit), op = self.builder, node.args, node.op
        if size.op != "abs":
            size, limit, op = limit, size, FLIP[op]
        x, t = self.done[size.args[0]], self.done[limit]
        if not is_bounded(size, self.bounds):
            return b.emit(op, b.emit("abs", x), t)
        opposite = b.emit(FLIP[op], x, b.emit("neg", t))
        return b.emit("and" if op in ("lt", "le") else "or", b.emit(op, x, t), opposite)

    def _near(self, wide: Node, span: tuple[int, int]) -> Node:
        """`wide` clamped to one beyond `span` on either side: it compares with that span as before."""
        builder, wide = self.builder, self.done[wide]
        low, high = builder.const(span[0] - 1, I64), builder.const(span[1] + 1, I64)
        return builder.cast(builder.emit("min", builder.emit("max", wide, low), high), I32)
