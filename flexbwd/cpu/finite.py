"""Which graph values are finite for any coordinates, so that 0 times them is 0."""

from __future__ import annotations

import math

from flexbwd.modgraph.ir import F, Node, topological

_CLOSED = frozenset({
    "add", "sub", "mul", "neg", "abs", "max", "min", "sign", "tanh", "sigmoid", "sin", "cos", "erf", "floor", "ceil",
    "trunc", "round", "detach", "where",
})  # fmt: skip


def always_finite(root: Node) -> bool:
    """Is `root` finite for every lane, given a finite score? False when in doubt: loads may hold anything."""
    known: dict[Node, bool] = {}
    for node in topological([root]):
        if node.dtype is not F:
            known[node] = True
        elif node.op == "const":
            known[node] = math.isfinite(node.value)
        elif node.op == "div":
            divisor = node.args[1]
            known[node] = known[node.args[0]] and divisor.is_const and divisor.value != 0
        elif node.op == "load":
            known[node] = False
        else:
            known[node] = node.op in ("in", "cast") or (node.op in _CLOSED and all(known[a] for a in node.args))
    return known[root]
