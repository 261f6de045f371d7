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

from flexbwd.modgraph.ir import F, Node, topological, wrap

from .kinds import RAW, Kind
from .loads import Captures, Place
from .ops import Emit
from .prepare import ModGraph

Value = Any


@dataclass
class Scope:
    """Values made in one region."""

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

    def inside(self, inputs: dict[str, Value]) -> Evaluator:
        """The evaluator of a region within this one, where more leaves are known."""
        return Evaluator(self.graph, self.emit, self.captures, {**self.inputs, **inputs}, Scope(self.scope))

    def settle(self, kind: Kind, offsets: Iterable[tuple[int, int]]) -> None:
        """Compute here what regions inside will read of nodes of `kind`."""
        kinds, wanted = self.graph.kinds, []
        for node in topological(self.graph.evaluated):
            if kinds[node] is not kind:
                wanted += [a for a in node.args if kinds[a] is kind]
        wanted += [n for n in self.graph.evaluated if kinds[n] is kind]
        for node in dict.fromkeys(wanted):
            if node.op not in ("const", "in"):
                for q, kv in offsets:
                    self.value(node, q, kv)

    def element(self, raw: Value | None) -> None:
        """Go to another element; `raw` is its q·k."""
        self._element = {}
        self.inputs.pop(RAW, None)  # what needs it and has none must fail, not read the last element's
        if raw is not None:
            self.inputs[RAW] = raw

    def value(self, node: Node, q: int, kv: int) -> Value:
        """The value of `node` at these static offsets."""
        key = self.key(node, q, kv)
        if self.graph.kinds[node] is Kind.SCORE:
            found = self._element.get(key)
            if found is None:
                found = self._element[key] = self._compute(node, q, kv)
            return found
        return self.memo(key, lambda: self._stepped(node, q, kv))

    def key(self, node: Node, q: int, kv: int) -> Any:
        """Equal for offsets at which `node` has the same value."""
        shift = self.graph.kinds.step(node)
        if shift is not None:
            return node, shift[0] * q + shift[1] * kv
        kind = self.graph.kinds[node]
        return node, {Kind.UNIFORM: 0, Kind.Q: q, Kind.KV: kv, Kind.DIFFERENCE: q - kv}.get(kind, (q, kv))

    def memo(self, key: Any, make: Callable[[], Value]) -> Value:
        """A value of this region, made once."""
        found = self.scope.find(key)
        if found is None:
            found = self.scope.memo[key] = make()
        return found

    def _stepped(self, node: Node, q: int, kv: int) -> Value:
        """A straight line's value as a step from offsets (0, 0); anything else computed."""
        shift = self.graph.kinds.step(node)
        if shift is not None:
            step = shift[0] * q + shift[1] * kv
            if step == 0:
                return self._compute(node, 0, 0)
            start = self.value(node, 0, 0)
            return arith.addi(start, self.emit.const(wrap(step, node.dtype), node.dtype))
        slope = self.graph.slopes.get(node)
        step = kv if self.graph.kinds[node] is Kind.KV else q if self.graph.kinds[node] is Kind.Q else q - kv
        if slope is None or step == 0:
            return self._compute(node, q, kv)
        start = self.value(node, 0, 0)
        if slope.is_const:
            return arith.addf(start, self.emit.const(step * slope.value, F))
        return self.emit.fma(self.value(slope, 0, 0), self.emit.const(float(step), F), start)

    def _compute(self, node: Node, q: int, kv: int) -> Value:
        if node.op == "in":
            return self.inputs[str(node.attr)]
        if node.op == "const":
            return self.emit.const(node.value, node.dtype)
        if node.op == "load":
            return self.captures.load(node, self.places(node, q, kv), self.memo)
        args = [self.value(a, q, kv) for a in node.args]
        graph = self.graph
        exact = node in graph.exact or graph.kinds[node] is Kind.UNIFORM
        return self.emit.op(node, args, exact, bool(node.args) and node.args[0] in graph.nonnegative)

    def places(self, load: Node, q: int, kv: int) -> list[Place]:
        """The index of a load, with the static parts that are free split off."""
        found = []
        for dim, (index, guard) in enumerate(zip(load.args, self.graph.guards[load], strict=True)):
            shift = self.graph.kinds.step(index)
            if shift is not None and self.captures.may_step(int(load.attr), dim, guard):  # type: ignore[call-overload]
                found.append(Place(self.value(index, 0, 0), index, guard, shift[0] * q + shift[1] * kv))
            else:
                found.append(Place(self.value(index, q, kv), index, guard))
        return found
