"""Evaluates a prepared graph while a kernel is traced: every value once, where its kind says.

Coordinates are split: q = q_base + a static offset, kv = kv_base + a static offset. A node is computed at offsets
(0, 0) with run-time instructions; one that moves along a straight line is then stepped by a static amount. Values
made in one region of the program may be used only there and in regions inside: a `Scope` is one region's memo, and
its `parent` the region around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cutlass._mlir.dialects import arith

from flexbwd.modgraph.ir import I32, F, Node, topological, wrap

from .kinds import RAW, Kind
from .loads import Captures
from .ops import Emit
from .prepare import ModGraph

Value = Any
_PER_ELEMENT = (Kind.PAIR, Kind.SCORE)


@dataclass
class Scope:
    """Values made in one region. `inputs` are the leaves' values."""

    parent: Scope | None = None
    memo: dict[Any, Value] = field(default_factory=dict)

    def find(self, key: Any) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope.memo:
                return scope.memo[key]
            scope = scope.parent
        return None


class Evaluator:
    """One region's view of a graph.

    Args:
        inputs: leaf name -> value, of those known in this region.
    """

    def __init__(
        self, graph: ModGraph, emit: Emit, captures: Captures, inputs: dict[str, Value], scope: Scope | None = None
    ) -> None:
        self.graph, self.emit, self.captures, self.inputs = graph, emit, captures, inputs
        self.scope = scope if scope is not None else Scope()
        self._element: dict[Any, Value] = {}
        self._at: tuple[int, int] | None = None

    def inside(self, inputs: dict[str, Value]) -> Evaluator:
        """The evaluator of a region within this one, where more leaves are known."""
        return Evaluator(self.graph, self.emit, self.captures, {**self.inputs, **inputs}, Scope(self.scope))

    def settle(self, kind: Kind, offsets: Iterable[tuple[int, int]]) -> None:
        """Compute here what regions inside will read of nodes of `kind`."""
        graph, wanted = self.graph, []
        roots = set(graph.roots)
        for node in topological(graph.roots):
            wanted += [a for a in node.args if graph.kinds[a] is kind and graph.kinds[node] is not kind]
            if node in roots and graph.kinds[node] is kind:
                wanted.append(node)
        for node in dict.fromkeys(wanted):
            if node.op != "const":
                for q, kv in offsets:
                    self.value(node, q, kv)

    def element(self, q: int, kv: int, raw: Value | None) -> None:
        """Go to another element; `raw` is its q·k."""
        self._at, self._element = (q, kv), {}
        if raw is not None:
            self.inputs[RAW] = raw

    def value(self, node: Node, q: int, kv: int) -> Value:
        """The value of `node` at these static offsets."""
        kind = self.graph.kinds[node]
        shift = self.graph.shifts.get(node)
        if shift is not None:
            step = shift[0] * q + shift[1] * kv
            return self._memo((node, step), lambda: self._stepped(node, step))
        if kind in _PER_ELEMENT:
            found = self._element.get((node, q, kv))
            if found is None:
                found = self._element[node, q, kv] = self._compute(node, q, kv)
            return found
        key = {Kind.UNIFORM: 0, Kind.Q: q, Kind.KV: kv, Kind.DIFFERENCE: q - kv}[kind]
        return self._memo((node, key), lambda: self._compute(node, q, kv))

    def _memo(self, key: Any, make: Callable[[], Value]) -> Value:
        found = self.scope.find(key)
        if found is None:
            found = self.scope.memo[key] = make()
        return found

    def _stepped(self, node: Node, step: int) -> Value:
        """A straight line `step` away from its value at offsets (0, 0)."""
        if step == 0:
            return self._compute(node, 0, 0)
        start = self._memo((node, 0), lambda: self._compute(node, 0, 0))
        return arith.addi(start, self.emit.const(wrap(step, node.dtype), node.dtype))

    def _compute(self, node: Node, q: int, kv: int) -> Value:
        if node.op == "in":
            return self.inputs[str(node.attr)]
        if node.op == "const":
            return self.emit.const(node.value, node.dtype)
        args = [self.value(a, q, kv) for a in node.args]
        if node.op == "load":
            return self.captures.load(node, args, self.graph.guards[node])
        return self.emit.op(node, args, node in self.graph.exact, node in self.graph.nonnegative)


__all__ = ["I32", "Evaluator", "F", "Scope"]
